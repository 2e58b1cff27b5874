"""Ejected Python files on the interpreter of the Triton tests, which rounds as a GPU does: what they import is answered
with its stand-ins, and with a torch whose new memory holds NaN."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from kgen.codegen.program import Arg
from kgen.codegen.torch_dtypes import FROM_TORCH
from kgen.codegen.triton.intrinsics import TYPES
from kgen.dsl.dtypes import DTYPES
from kgen.runtime.triton_interpret import _language

_BY_TYPE = {text.removeprefix("tl."): DTYPES[name] for name, text in TYPES.items()}


class _Jit:
    """What `@triton.jit` makes: called by other kernels, launched as `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        language = _language()
        parameters = inspect.signature(self.function).parameters.values()

        def launch(*values: Any, num_warps: int) -> None:
            assert num_warps in (1, 2, 4, 8, 16, 32)
            args = []
            for p, v in zip(parameters, values, strict=True):
                if isinstance(v, torch.Tensor):
                    args.append(language.argument(Arg("tensor", p.name, FROM_TORCH[v.dtype]), v))
                else:
                    named = next(n for n, member in vars(language.tl).items() if member is p.annotation)
                    args.append(language.argument(Arg("scalar", p.name, _BY_TYPE[named]), v))
            with np.errstate(all="ignore"):
                for index in range(grid[0]):
                    language.builder.position.index = index
                    self.function(*args)

        return launch


def _jit(function: Any = None, **_: object) -> Any:
    return _Jit(function) if function is not None else _Jit


def _poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
    t = torch.empty(*args, **kwargs)
    return t.fill_(float("nan") if t.is_floating_point() else 10**6)


def _torch() -> ModuleType:
    own = ModuleType("torch")
    own.__dict__.update(vars(torch))
    own.empty = _poisoned  # type: ignore[attr-defined]
    return own


def load(path: Path, package: str = "") -> SimpleNamespace:
    """The names of the file `path`; it may import its neighbours, as a module of `package` by relative imports."""
    language = _language()
    triton = SimpleNamespace(**{**vars(language.triton), "jit": _jit})
    answers = {"triton": triton, "triton.language": language.tl, "triton.language.extra": language.extra}
    seen: dict[str, SimpleNamespace] = {}

    def answer(name: str, _globals: Any = None, _locals: Any = None, names: Any = (), level: int = 0) -> Any:
        if name in answers:
            return answers[name] if names else answers[name.split(".")[0]]
        if name == "torch":
            return _torch()
        assert bool(level) == bool(package), name
        if name not in seen:
            seen[name] = run(path.parent / f"{name}.py")
        return seen[name]

    def run(file: Path) -> SimpleNamespace:
        scope: dict[str, Any] = {
            "__builtins__": {**vars(builtins), "__import__": answer, "range": language.range},
            "__name__": file.stem,
            "__package__": package,
        }
        exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), scope)
        return SimpleNamespace(**scope)

    return run(path)
