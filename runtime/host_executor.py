"""Generated CUDA C on a CPU: compiled by g++ against `templates/cuda/host/kgen_host.hpp`, run by fibres.

The text of a kernel is not changed. The header stands in for the device primitives, and says which names it defines,
what is simulated and what is not. In short: grids, clusters, blocks, warps with masks, shared memory, barriers,
shuffles, votes and atomics are simulated; the device's weak memory order, asynchronous copies, tensor cores and
spinning on another thread's store are not. Each thread is a fibre that runs until its next barrier or collective;
blocks are spread over system threads. What is undefined on a device is an error here where it can be seen: a barrier
that not all threads reach, a shuffle from a lane that takes no part, a misaligned vector access, an index outside an
array of known size, an access to unmapped memory. Shared memory starts as 0xff bytes, which are NaN as floats.

A launch with `order_seed` runs blocks and threads in a shuffled order, the same for the same seed: a kernel that lacks
a barrier gives other results for some seeds.

    kernel = compile_host(source, "row_sum", cache_dir=Path("cache"))
    kernel.launch((rows, 1, 1), (256, 1, 1), 0, [c_void_p(x.data_ptr()), c_void_p(y.data_ptr()), c_longlong(n)])
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.dsl.locks import lock
from kgen.runtime.errors import BackendError

logger = logging.getLogger(__name__)

HEADER_FOLDER = Path(__file__).resolve().parents[1] / "templates" / "cuda" / "host"

# IEEE arithmetic as it is written: no contraction to FMA, no fast-math. Signed overflow wraps, as on the device, and
# pointers may be reinterpreted, as vector loads do. Nothing of a kernel is visible outside its library, since its name
# may be that of a C function.
_NUMERICS = (
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fsigned-char",
)
_COMMON = ("-std=c++17", "-fPIC", "-shared", "-U_FORTIFY_SOURCE")
KERNEL_FLAGS = (
    *_COMMON,
    "-O1",  # compile time is most of a test; at run time the switches between fibres weigh more than the code
    *_NUMERICS,
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fstack-clash-protection",  # a large frame touches the guard page, not the next fibre's stack
    "-fsanitize=alignment,bounds,integer-divide-by-zero",  # handled in kgen_host_launch.cpp; libubsan is not needed
    "-w",  # generated code is checked elsewhere; `#pragma unroll` means nothing to g++
    "-Wl,-Bsymbolic",
    "-nodefaultlibs",
)
RUNTIME_FLAGS = (*_COMMON, "-O2", "-fno-gnu-unique", "-pthread")

_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)
_BLOCK_THREADS = 1024
DYNAMIC_SHARED_LIMIT = 232448
"""Most bytes of dynamic shared memory a launch may ask for: what an sm_90 device gives a block."""


class HostCompileError(BackendError):
    """g++ is missing or refused the source; the text holds the compiler's own messages."""


class HostLaunchError(BackendError):
    """A launch got what the kernel does not take, or the kernel failed: the text names kernel, block and thread."""


# Mirrors of the structures in kgen_host_abi.hpp.


class _Parameter(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("size", ctypes.c_uint)]


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("invoke", ctypes.c_void_p),
        ("shared_anchor", ctypes.c_void_p),
        ("dynamic_shared", ctypes.c_void_p),
        ("cluster", ctypes.c_int),
        ("parameter_count", ctypes.c_int),
        ("parameters", ctypes.POINTER(_Parameter)),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("workers", ctypes.c_int),
        ("shuffled", ctypes.c_int),
        ("poison", ctypes.c_int),
        ("order_seed", ctypes.c_ulonglong),
    ]


_KINDS = {"p": "a pointer", "i": "a signed integer", "u": "an unsigned integer", "b": "a bool", "f": "a float"}
_CTYPE_KINDS = {
    **dict.fromkeys("zZPO", "p"),  # the format characters of the `struct` module, as ctypes types carry them
    **dict.fromkeys("cbhilq", "i"),
    **dict.fromkeys("BHILQ", "u"),
    "?": "b",
    **dict.fromkeys("fd", "f"),
}


@dataclass(frozen=True)
class HostKernel:
    """A compiled kernel, ready to launch from any thread. `path` is its library in the cache folder."""

    name: str
    path: Path
    parameters: tuple[tuple[str, int], ...]
    """Kind ('p' pointer, 'i' signed, 'u' unsigned, 'b' bool, 'f' float, 's' structure) and bytes of each parameter."""
    _runtime: ctypes.CDLL
    _library: ctypes.CDLL
    _exported: _Kernel

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[Any],
        *,
        order_seed: int | None = None,
        threads: int | None = None,
        poison: bool = True,
    ) -> None:
        """Run the grid to its end.

        `args` are ctypes values in the kernel's order; a pointer is a `c_void_p` to memory that the caller keeps alive.
        `shared_bytes` is the size of the dynamic shared memory. `order_seed` shuffles the order of blocks and threads
        (None: ascending). `threads` is the number of system threads (None: one for each CPU of the process). `poison`
        fills shared memory with 0xff bytes before each block. The GIL is released meanwhile.

        Raises HostLaunchError for arguments that the kernel does not take, sizes that no device allows, and a kernel
        that fails.
        """
        self._check_sizes(grid, block, shared_bytes)
        self._check_arguments(args)
        launch = _Launch(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            shared_bytes,
            threads if threads is not None else len(os.sched_getaffinity(0)),
            order_seed is not None,
            poison,
            (order_seed or 0) % 2**64,
        )
        pointers = (ctypes.c_void_p * max(1, len(args)))(*(ctypes.addressof(arg) for arg in args))
        error = ctypes.create_string_buffer(4096)
        if self._runtime.kgen_host_launch(
            ctypes.byref(self._exported), ctypes.byref(launch), pointers, error, ctypes.c_ulong(len(error))
        ):
            raise HostLaunchError(error.value.decode(errors="replace"))

    def _check_sizes(self, grid: Sequence[int], block: Sequence[int], shared_bytes: int) -> None:
        for what, extents, limits in (("grid", grid, _GRID_LIMITS), ("block", block, _BLOCK_LIMITS)):
            allowed = len(extents) == 3 and all(1 <= e <= limit for e, limit in zip(extents, limits, strict=True))
            if not allowed:
                raise HostLaunchError(
                    f"kernel {self.name!r}: the {what} is {tuple(extents)}; "
                    f"expected three extents from 1 to {', '.join(map(str, limits))}"
                )
        if (count := block[0] * block[1] * block[2]) > _BLOCK_THREADS:
            raise HostLaunchError(
                f"kernel {self.name!r}: the block has {count} threads; at most {_BLOCK_THREADS} are allowed"
            )
        cluster = self._exported.cluster
        if cluster > 1 and (grid[0] % cluster or count % 32):
            raise HostLaunchError(
                f"kernel {self.name!r} has clusters of {cluster} blocks, and the grid {grid[0]} blocks of {count} "
                f"threads; expected a multiple of {cluster} blocks, and of 32 threads"
            )
        if not 0 <= shared_bytes <= DYNAMIC_SHARED_LIMIT:
            raise HostLaunchError(
                f"kernel {self.name!r}: {shared_bytes} bytes of shared memory; expected 0 to {DYNAMIC_SHARED_LIMIT}"
            )

    def _check_arguments(self, args: Sequence[Any]) -> None:
        if len(args) != len(self.parameters):
            raise HostLaunchError(
                f"kernel {self.name!r} takes {len(self.parameters)} arguments; {len(args)} were given"
            )
        for i, (arg, (kind, size)) in enumerate(zip(args, self.parameters, strict=True)):
            code = getattr(arg, "_type_", None)
            given = _CTYPE_KINDS.get(code) if isinstance(code, str) else "p" if code is not None else "s"
            if not isinstance(arg, _CTYPES) or given != kind or ctypes.sizeof(arg) != size:
                expected = f"{_KINDS.get(kind, 'a structure')} of {size} bytes"
                raise HostLaunchError(
                    f"kernel {self.name!r}: argument {i} is {arg!r}; expected a ctypes value that holds {expected}"
                )


_CTYPES = (ctypes._SimpleCData, ctypes._Pointer, ctypes.Structure)


def available() -> str | None:
    """None if kernels can be compiled and run here, else one sentence that says what to install."""
    if not sys.platform.startswith("linux"):
        return "the host executor needs Linux"
    compiler = _compiler()[0]
    if shutil.which(compiler) is None:
        return f"the host executor needs the C++ compiler {compiler!r}: install g++ (apt-get install g++)"
    return None


def compile_host(source: str, entry: str, *, cache_dir: Path) -> HostKernel:
    """Compile the kernel `entry` of `source`, or take it from `cache_dir`.

    `source` is CUDA C without the device primitives and without includes. The compiler is `g++`, or what `CXX` names
    if it understands g++'s options. The cache is addressed by the hash of the text, the headers, the compiler and its
    flags; any number of processes may share it, and a damaged entry is compiled again. Where the folder cannot be
    written, a temporary one is used, with one warning. Raises HostCompileError with the compiler's messages.
    """
    if reason := available():
        raise HostCompileError(reason)
    text = _translation_unit(source, entry)
    key = _digest(text, _fingerprint(), *KERNEL_FLAGS)
    kernel = _kernels.get(key)
    if kernel is None:
        runtime = _load_runtime(cache_dir)
        path, library = _load(_Unit(f"{entry}-{key}", (("kernel.cpp", text),), KERNEL_FLAGS, ("-lm", "-lc")), cache_dir)
        exported = _Kernel.in_dll(library, "kgen_host_kernel")
        found = [exported.parameters[i] for i in range(exported.parameter_count)]
        parameters = tuple((chr(p.kind), int(p.size)) for p in found)
        # Two threads may come here with one kernel: they loaded the same library, and either value will do.
        kernel = _kernels.setdefault(key, HostKernel(entry, path, parameters, runtime, library, exported))
    return kernel


# ---- from source to a loaded library ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unit:
    """A library to build: its name in the cache, its files (name, text), and the options before and after them."""

    name: str
    files: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    libraries: tuple[str, ...]


_kernels: dict[str, HostKernel] = {}
_runtime_lock = lock()
_runtime: ctypes.CDLL | None = None


_DYNAMIC_SHARED = re.compile(r"\bextern\s+__shared__\s+([^;{}]*?)\b(\w+)\s*\[\s*\]")
_CLUSTER = r"__cluster_dims__\s*\(\s*(\w+)\s*,\s*1\s*,\s*1\s*\)\s*(?:__launch_bounds__\s*\([^()]*\)\s*)?{entry}\s*\("
_ALIGNMENT = re.compile(r"(?:__align__|alignas)\s*\([^()]*\)")


def _translation_unit(source: str, entry: str) -> str:
    """`source` between the header and the export of `entry`. Dynamic shared memory is declared there, defined here."""
    declared = {(_ALIGNMENT.sub("", kind).strip(), name) for kind, name in _DYNAMIC_SHARED.findall(source)}
    if len(declared) > 1:
        listed = ", ".join(sorted(f"{kind} {name}[]" for kind, name in declared))
        raise HostCompileError(f"kernel {entry!r} declares several dynamic shared arrays ({listed}); one is supported")
    # Its size is that of the largest block, so that one library serves every launch.
    define, address = "", "nullptr"
    for kind, name in declared:
        define = f"alignas(128) thread_local {kind} {name}[kgen_host::kDynamicSharedLimit / sizeof({kind})];\n"
        address = name
    clusters = re.findall(_CLUSTER.format(entry=re.escape(entry)), source)
    return (
        f'#include "kgen_host.hpp"\n#line 1 "{entry}.cu"\n{source}\n'
        f'#line 1 "kgen_host_export"\n{define}KGEN_HOST_KERNEL({entry}, {address}, {clusters[0] if clusters else 1})\n'
    )


def _load_runtime(cache_dir: Path) -> ctypes.CDLL:
    """The scheduler and the launch, once per process. Its symbols are global: kernels refer to them."""
    global _runtime
    with _runtime_lock:
        if _runtime is None:
            sources = tuple((path.name, path.read_text()) for path in sorted(HEADER_FOLDER.glob("*.cpp")))
            key = _digest(_fingerprint(), *RUNTIME_FLAGS)
            _, _runtime = _load(_Unit(f"kgen_host-{key}", sources, RUNTIME_FLAGS, ()), cache_dir, ctypes.RTLD_GLOBAL)
        return _runtime


def _load(unit: _Unit, cache_dir: Path, mode: int = ctypes.RTLD_LOCAL) -> tuple[Path, ctypes.CDLL]:
    path = cache_dir / f"{unit.name}.so"
    if _intact(path):
        try:
            return path, ctypes.CDLL(str(path), mode)
        except OSError as error:
            logger.debug("cached library %s does not load, and is compiled again: %s", path, error)
    path = _build(unit, _writable(cache_dir))
    try:
        return path, ctypes.CDLL(str(path), mode)
    except OSError as error:
        raise HostCompileError(f"the library of {unit.name!r} does not load: {error}") from None


def _build(unit: _Unit, folder: Path) -> Path:
    """Compile in a folder of this process, then move into place: others see a whole file or none."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        library = Path(scratch) / "library.so"
        for name, text in unit.files:
            (Path(scratch) / name).write_text(text)
        names = [str(Path(scratch) / name) for name, _ in unit.files]
        command = [*_compiler(), *unit.flags, f"-I{HEADER_FOLDER}", *names, *unit.libraries, "-o", str(library)]
        logger.debug("compiling %s: %s", unit.name, shlex.join(command))
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env={**os.environ, "LC_ALL": "C"}
        )
        if done.returncode:
            messages = done.stderr.replace(f"{scratch}/", "").strip()
            raise HostCompileError(f"{_compiler()[0]} rejected {unit.name.rpartition('-')[0]!r}:\n{messages}")
        content = library.read_bytes()
        # A loader ignores what follows an ELF file; _intact() compares it.
        library.write_bytes(content + hashlib.sha256(content).digest())
        path = folder / f"{unit.name}.so"
        os.replace(library, path)
    return path


def _intact(path: Path) -> bool:
    """Whether the file is there and whole. A truncated library would kill the process that loads it."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        reason = "it is not writable"
    except OSError as error:
        reason = str(error)
    return _temporary_folder(folder, reason)


@functools.cache
def _temporary_folder(instead_of: Path, reason: str) -> Path:
    logger.warning("compiled kernels are not kept: %s cannot be used (%s)", instead_of, reason)
    holder = tempfile.TemporaryDirectory(prefix="kgen-host-")
    atexit.register(holder.cleanup)
    return Path(holder.name)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _fingerprint() -> str:
    """What beside the text decides a library: the compiler, the machine, and our own C++ files."""
    return _fingerprint_of(tuple(_compiler()))


@functools.cache
def _fingerprint_of(compiler: tuple[str, ...]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    files = [path.read_text() for path in sorted(HEADER_FOLDER.glob("kgen_host*"))]
    return _digest(*compiler, done.stdout, platform.machine(), *files)


def _digest(*parts: str) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(f"{len(part)}:".encode())
        hashed.update(part.encode())
    return hashed.hexdigest()[:32]
