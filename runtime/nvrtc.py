"""CUDA C to a cubin through NVRTC, and what the result uses of the machine. No GPU is needed.

The flags are the numerics contract of every compiled kernel: multiplications and additions may be contracted to FMA,
subnormals are kept, division and square root are IEEE round-to-nearest.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.codegen.machines import OLDEST, too_old
from kgen.codegen.origins import position
from kgen.dsl.errors import KgenError
from kgen.dsl.source import Span
from kgen.runtime.foreign_caches import before_cupy

NUMERICS_FLAGS = ("--fmad=true", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


class CudaCompileError(KgenError):
    """NVRTC refused generated code, or is not installed. Names the `.kdsl` lines where they are known."""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel occupies: registers a thread; bytes of local memory a thread (its whole stack frame),
    of which bytes of spilled registers; bytes of static shared memory a block."""

    registers: int
    local_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: `cubin` for `arch` (such as "sm_90"), its `ptx`, and its resources by entry name."""

    entry: str
    arch: str
    cubin: bytes
    ptx: str
    log: str
    resources: Resources

    @property
    def sass(self) -> str:
        """The machine code, disassembled. Raises CudaCompileError where no `nvdisasm` is found."""
        with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(self.cubin)
            done = subprocess.run(
                [find_tool("nvdisasm"), "-c", str(path)],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
        if done.returncode:
            raise CudaCompileError(f"nvdisasm could not read the cubin of {self.entry!r}: {done.stderr.strip()}")
        return done.stdout


def compile_cuda(
    source: str,
    entry: str,
    arch: str = "sm_90",
    *,
    flags: Sequence[str] = (),
    lines: Sequence[Span | None] = (),
) -> Compiled:
    """Compile `source` (no includes) for `arch`: the cubin, with the resources of the kernel `entry`.

    `lines` maps generated lines to `.kdsl` spans, for messages. Raises CudaCompileError when NVRTC is missing,
    does not know `arch`, or rejects the text.
    """
    nvrtc = _nvrtc()
    if why := refusal(arch):
        raise CudaCompileError(why)
    options = ["--std=c++17", f"--gpu-architecture={arch}", *NUMERICS_FLAGS, "--ptxas-options=-v", *flags]
    if tuple(nvrtc.getVersion()) >= (12, 9):
        # From 12.9 on NVRTC has a cache of its own, and what comes out of it comes without the figures of ptxas.
        options.append("--no-cache")
    program = nvrtc.createProgram(source, f"{entry}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, tuple(options))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip() or str(error)
            raise CudaCompileError(_rejected(entry, log, lines)) from None
        log = nvrtc.getProgramLog(program)
        cubin = _whole_elf(nvrtc.getCUBIN(program))
        ptx = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    return Compiled(entry, arch, cubin, text, log, parse_resources(log, entry))


def version() -> str:
    """NVRTC's version, such as "13.0"."""
    return ".".join(map(str, _nvrtc().getVersion()))


def supported_archs() -> tuple[str, ...]:
    """Compute capabilities that this NVRTC compiles generated code for, such as ("80", "90", "100")."""
    return tuple(str(a) for a in _nvrtc().getSupportedArchs() if a >= OLDEST)


def refusal(arch: str) -> str | None:
    """Why generated code is not compiled for `arch` (`sm_90`); None where it is. Raises CudaCompileError where there is
    no NVRTC."""
    number = arch.removeprefix("sm_").rstrip("af")
    known = supported_archs()
    if number in known:
        return None
    why = too_old(int(number)) if number.isdigit() else None
    return why or f"NVRTC {version()} cannot compile for {arch}; it knows {', '.join(f'sm_{a}' for a in known)}"


def parse_resources(log: str, entry: str) -> Resources:
    """The figures that `ptxas -v` printed in `log` for `entry`. Raises CudaCompileError if there are none."""
    found = re.search(
        rf"Function properties for {re.escape(entry)}\n(.*?)(?=Compile time|Function properties|\Z)",
        log,
        re.S,
    )
    if found is None:
        raise CudaCompileError(f"NVRTC reported no resource usage for {entry!r}")
    text = found.group(1)

    def figure(pattern: str) -> int:
        match = re.search(pattern, text)
        return int(match.group(1)) if match else 0

    return Resources(
        registers=figure(r"Used (\d+) registers"),
        local_bytes=figure(r"(\d+) bytes stack frame"),
        spill_store_bytes=figure(r"(\d+) bytes spill stores"),
        spill_load_bytes=figure(r"(\d+) bytes spill loads"),
        shared_bytes=figure(r"(\d+) bytes smem"),
    )


def find_tool(name: str) -> str:
    """The path of a CUDA binary tool (`nvdisasm`, `cuobjdump`, `ptxas`): Triton's own, else the one on PATH.

    Raises CudaCompileError where there is neither.
    """
    try:
        import triton

        own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        if own.is_file():
            return str(own)
    except ImportError:
        pass
    if found := shutil.which(name):
        return found
    raise CudaCompileError(f"{name} was not found: install triton, which carries it, or put the CUDA toolkit on PATH")


def _nvrtc() -> Any:
    before_cupy()
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise CudaCompileError(
            "compiling CUDA needs CuPy with NVRTC: pip install 'kgen[cuda13]' "
            f"(or 'kgen[cuda12]' for a CUDA 12 driver); {error}"
        ) from None
    return nvrtc


def _whole_elf(cubin: bytes) -> bytes:
    """`cubin` with the last byte that CuPy 14.2's getCUBIN takes for a string terminator and drops.

    The loader does not mind, nvdisasm does. The tables at the end of the file say how long it must be.
    """
    if cubin[:4] != b"\x7fELF":
        return cubin
    program_table, section_table = struct.unpack_from("<QQ", cubin, 0x20)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", cubin, 0x36)
    end = max(program_table + program_size * program_count, section_table + section_size * section_count)
    return cubin + b"\0" * max(0, end - len(cubin)) if end - len(cubin) <= 1 else cubin


def _rejected(entry: str, log: str, lines: Sequence[Span | None]) -> str:
    """NVRTC's log, each message followed by the `.kdsl` line that the offending line was generated from."""
    out = [f"NVRTC rejected the generated kernel {entry!r}:"]
    for text in log.splitlines():
        out.append(text)
        place = re.match(rf"{re.escape(entry)}\.cu\((\d+)\)", text)
        if place and int(place.group(1)) <= len(lines):
            span = lines[int(place.group(1)) - 1]
            if span is not None:
                out.append(f"  generated from {position(span)}: {span.text.strip()}")
    return "\n".join(out)
