"""From a `.kdsl` file or text to callable kernels and ops."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.runtime.checked_modules import Checked, checked, checked_text
from kgen.runtime.kernel import Kernel

if TYPE_CHECKING:
    from kgen.dsl import ast
    from kgen.dsl.host import ir as host_ir
    from kgen.runtime.host.op import HostOp


class KernelModule:
    """The kernels and ops of one file, as attributes (`module.rms_norm`) and by name (`module["rms_norm"]`); iterates
    names."""

    def __init__(self, source: Checked | ast.Module) -> None:
        found = source if isinstance(source, Checked) else Checked.of(source)
        self.__name__ = Path(found.path).stem
        self.__file__ = found.path
        self.__doc__ = found.doc
        own = {name: Kernel(found, name) for name in found.kernels}
        self._kernels = own
        self._ops: dict[str, HostOp] = {}
        if found.ops:
            from kgen.runtime.host.op import HostOp  # a third of what there is to import

            others: dict[str, Kernel] = {}

            def kernel(name: str, ref: host_ir.KernelRef) -> Kernel:
                return own.get(name) or others.setdefault(name, Kernel(ref.module, ref.name))

            self._ops = {name: HostOp(found.module, name, kernel) for name in found.ops}

    def __getitem__(self, name: str) -> Any:
        """The kernel or op called `name`. Raises KeyError listing the names there are."""
        found = self._kernels.get(name) or self._ops.get(name)
        if found is None:
            raise KeyError(self._unknown(name))
        return found

    def __getattr__(self, name: str) -> Any:
        # Only reached where there is no ordinary attribute; the dictionaries are missing while unpickling.
        for known in (self.__dict__.get("_kernels", {}), self.__dict__.get("_ops", {})):
            if name in known:
                return known[name]
        raise AttributeError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        names = [*self.__dict__.get("_kernels", {}), *self.__dict__.get("_ops", {})]
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(names) or 'no kernels'}"
        return f"{self.__dict__.get('__file__')} has no kernel '{name}'; {hint}"

    def __iter__(self) -> Iterator[str]:
        return iter((*self._kernels, *self._ops))

    def __len__(self) -> int:
        return len(self._kernels) + len(self._ops)

    def __contains__(self, name: object) -> bool:
        return name in self._kernels or name in self._ops

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._kernels, *self._ops]

    def __repr__(self) -> str:
        ops = f"; ops {', '.join(self._ops)}" if self._ops else ""
        return f"<kernels {', '.join(self._kernels)}{ops} of {self.__file__}>"


def load(path: str | os.PathLike[str]) -> KernelModule:
    """The kernels of the file at `path`, which is checked as a whole.

    Raises DslError with every mistake in it, KgenError where it cannot be read.
    """
    return KernelModule(checked(path))


def loads(text: str, name: str = "<string>") -> KernelModule:
    """The kernels of `text`; `name` stands for the file in messages. Imports are looked for in the current folder.

    Raises DslError with every mistake.
    """
    return KernelModule(checked_text(text, name))


@functools.cache
def load_packaged(name: str) -> KernelModule:
    """The kernels of a file that comes with kgen, such as `rms_norm.kdsl`. Loaded once a process."""
    with importlib.resources.as_file(importlib.resources.files("kgen.ops")) as folder:
        return load(folder / name)
