"""An emitted Triton module to PTX and a cubin, and what the result uses of the machine. No GPU is needed.

Triton reads the source of a function from a file, so a module is written to one, named by its content, before it is
imported. Compilation goes through `triton.compile` with the argument types of the program spelled out; nothing is
specialised to the values of a call but what the program's variant has proved: the alignment of pointers.

The options are the numerics contract of every compiled kernel, the same as under NVRTC: multiplications and additions
may be contracted to FMA, and libdevice keeps subnormals.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from kgen.codegen.program import Program
from kgen.codegen.triton.intrinsics import SIGNATURE
from kgen.codegen.variant import Variant
from kgen.dsl.errors import KgenError
from kgen.dsl.locks import rlock
from kgen.runtime.nvrtc import CudaCompileError, Resources, find_tool, parse_resources

NUMERICS_OPTIONS = {"enable_fp_fusion": True, "enable_reflect_ftz": False}

_MODULE_PREFIX = "kgen_triton_"
_lock = rlock()  # Triton's compiler and the module table are shared by all threads


class TritonCompileError(KgenError):
    """Triton refused generated code, or is not installed. Names the `.kdsl` lines where they are known."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: `cubin` for compute capability `cap` (90 for sm_90) and its `ptx`; `shared_bytes` is the
    dynamic shared memory that a launch must ask for, `threads` the threads of a program. `handle` is Triton's own
    object, which can load and launch it."""

    entry: str
    cap: int
    cubin: bytes
    ptx: str
    shared_bytes: int
    threads: int
    handle: Any = field(repr=False, compare=False)

    @property
    def sass(self) -> str:
        """The machine code, disassembled. Raises KgenError where no `nvdisasm` is found."""
        with _temporary("kernel.cubin", self.cubin) as path:
            return _run(find_tool("nvdisasm"), "-c", str(path))

    @property
    def resources(self) -> Resources:
        """Registers, local memory and spills, as `ptxas -v` reports them. Raises TritonCompileError where
        no `ptxas` reads the PTX."""
        target = re.search(r"^\.target (\w+)", self.ptx, re.M)
        arch = target.group(1) if target else f"sm_{self.cap}"
        problem: TritonCompileError | None = None
        with _temporary("kernel.ptx", self.ptx.encode()) as path:
            for tool in _assemblers(self.cap):
                try:
                    log = _run(tool, "-v", f"--gpu-name={arch}", "-o", os.devnull, str(path))
                except TritonCompileError as error:
                    problem = problem or error
                else:
                    return parse_resources(log, self.entry)
        assert problem is not None  # there is an assembler, or finding one has raised
        raise problem


def assembler(cap: int) -> Any:
    """The `ptxas` that Triton now takes for compute capability `cap`: its `path` and `version`."""
    from triton import knobs

    return knobs.nvidia.ptxas_blackwell if cap >= 100 else knobs.nvidia.ptxas


def _assemblers(cap: int) -> Iterator[str]:
    """The `ptxas` that may have made a cubin for `cap`, the likeliest first.

    Triton takes the one that TRITON_PTXAS_PATH names, and writes PTX of the version of that one, which an older one
    refuses. torch.compile sets the variable to the `ptxas` of torch, for all that runs in the process after it. And
    PTX in Triton's cache may be of one that is no longer named: then the newest of Triton's own can read it.
    """
    yield assembler(cap).path
    with contextlib.suppress(CudaCompileError):
        yield find_tool("ptxas-blackwell")


def load_module(source: str, name: str, folder: Path) -> ModuleType:
    """Import generated `source` from a file in `folder` named by its content; the same source gives the same module.

    The file is written in full before it gets its name, so that any number of processes may share a folder.
    """
    path = write_source(source, name, folder)
    full_name = f"{_MODULE_PREFIX}{path.stem}"
    with _lock:
        module = sys.modules.get(full_name)
        if module is not None:
            return module
        spec = importlib.util.spec_from_file_location(full_name, path)
        assert spec is not None and spec.loader is not None  # a .py file always has a loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module  # Triton looks a function's module up by name
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[full_name]
            raise
        return module


def write_source(source: str, name: str, folder: Path) -> Path:
    """The file in `folder` that holds `source`, written if it is not there."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:24]
    path = folder / f"{name}_{digest}.py"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == source:
            return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}_", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(source)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def signature(program: Program) -> dict[str, str]:
    """Triton's type of each parameter of the program's function, in order."""
    names = _parameter_names(program)
    return {
        n: f"*{SIGNATURE[a.dtype.name]}" if a.kind == "tensor" else SIGNATURE[a.dtype.name]
        for n, a in zip(names, program.args, strict=True)
    }


def options(program: Program) -> dict[str, object]:
    """What Triton's compiler is told beside the source of `program`."""
    most = program.schedule.registers
    told: dict[str, object] = {"num_warps": program.schedule.threads // 32, **NUMERICS_OPTIONS}
    return told | {"maxnreg": most} if most else told


def told(program: Program, variant: Variant) -> str:
    """All that Triton's compiler is told beside the text of `program`, for the keys of caches: programs for several
    dtypes may have one text."""
    return repr((options(program), signature(program), attributes(program, variant)))


def compile_triton(program: Program, variant: Variant, cap: int, folder: Path) -> Compiled:
    """Compile `program`, emitted for `variant`, for compute capability `cap` (80, 90, 100). The module's file is kept
    in `folder`; Triton keeps a cache of its own.

    Raises TritonCompileError where Triton is missing or rejects the module.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise TritonCompileError(f"Triton is missing ({error}); install it with: pip install triton") from None
    function: Any = getattr(load_module(program.source, program.entry, folder), program.entry)
    source = ASTSource(function, signature(program), attrs=attributes(program, variant))
    try:
        with _lock:
            built: Any = triton.compile(source, target=GPUTarget("cuda", cap, 32), options=options(program))
    except Exception as error:  # Triton raises its own, MLIR's and ptxas's errors, without a common base
        raise TritonCompileError(_rejected(program, error)) from error
    return Compiled(
        program.entry,
        cap,
        built.asm["cubin"],
        built.asm["ptx"],
        built.metadata.shared,
        program.schedule.threads,
        built,
    )


def attributes(program: Program, variant: Variant) -> dict[tuple[int, ...], list[list[object]]]:
    """What the variant proves of pointer arguments. Strides carry their proofs in the source."""
    return {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(program.args)
        if a.kind == "tensor" and variant.tensor(a.name).align >= 16
    }


def _parameter_names(program: Program) -> list[str]:
    found = re.search(rf"^def {re.escape(program.entry)}\((.*?)^\):", program.source, re.M | re.S)
    assert found is not None  # the template has it
    return [line.strip().split(":")[0].rstrip(",") for line in found.group(1).strip().split("\n") if line.strip()]


def _rejected(program: Program, error: Exception) -> str:
    line = re.search(r"at (\d+):\d+", str(error))
    message = str(error).strip() or type(error).__name__
    where = ""
    if line:
        start = program.source[: program.source.index(f"def {program.entry}(")].count("\n")
        at = start + int(line.group(1)) - 1
        span = program.lines[at] if 0 <= at < len(program.lines) else None
        where = f" at {span}" if span is not None else ""
    return f"Triton rejected the generated module of {program.entry}{where}: {message}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise TritonCompileError(f"{Path(command[0]).name} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr


@contextlib.contextmanager
def _temporary(name: str, data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


__all__ = [
    "NUMERICS_OPTIONS",
    "Compiled",
    "TritonCompileError",
    "attributes",
    "compile_triton",
    "load_module",
    "options",
    "signature",
    "told",
    "write_source",
]
