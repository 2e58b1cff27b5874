"""Ahead-of-time builds: which files does a kernel become, and what does their manifest say?

Everything is generated and compiled first, several compilers at a time, and written only if all of it succeeded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kgen.codegen.program import Program
from kgen.dsl import ast
from kgen.dsl.check import TensorParam
from kgen.dsl.diagnostics import DslError
from kgen.dsl.errors import KgenError
from kgen.dsl.garbage import collected_later
from kgen.dsl.host import ast as host
from kgen.runtime import eject
from kgen.runtime.ahead import BACKENDS, Binary, Choices, Target, binary, target
from kgen.runtime.eject_op import kernel_files, op_source
from kgen.runtime.eject_steps import function_names
from kgen.runtime.eject_triton import triton_source
from kgen.runtime.errors import BackendError
from kgen.runtime.launches import derived_dims, device_word, grid, known_dims, shares, workspaces
from kgen.runtime.op_target import OpTarget, op_target

__all__ = ["BACKENDS", "BuildError", "Job", "run"]

Manifest = dict[str, Any]


class BuildError(KgenError):
    """Kernels that cannot be built as they are: one paragraph each. Nothing was written."""


@dataclass(frozen=True)
class Job:
    """A kernel or an op to build into the folder `place`, which an op has for itself. `source_hash` is that of its file
    and what that imports. Of an op: the `gradients` of which parameters are wanted (None: of all that have one), and
    how sums over chunks are held (`kgen.runtime.host.options.ACCUMULATE`). Its kernels are built for Triton at least.
    """

    module: ast.Module
    item: ast.Kernel | host.Op
    choices: Choices
    place: Path
    backends: tuple[str, ...]
    archs: tuple[str, ...]
    source_hash: str
    allow_spills: bool = False
    gradients: tuple[str, ...] | None = None
    accumulate: str = "auto"
    # Of a kernel that is derived from another: what the manifest says of it. Its text is written beside its code.
    gradient: Mapping[str, object] | None = None

    @property
    def name(self) -> str:
        """What is built."""
        return self.item.name


# By place in the list of what is made, backend and architecture: a binary for each launch.
_Binaries = dict[tuple[int, str, str], list[Binary]]


@dataclass(frozen=True)
class _Made:
    job: Job
    target: Target
    programs: dict[str, tuple[Program, ...]]  # by backend, in order of launch
    stem: str  # of its files


@dataclass(frozen=True)
class _MadeOp:
    job: Job
    op: OpTarget
    text: str


def run(
    jobs: Sequence[Job], workers: int = 0, done: Callable[[str, int], None] = lambda what, total: None
) -> dict[Path, Manifest]:
    """Build `jobs`; the manifest of each folder. `workers` 0 is one for each CPU core; `done` is told each compilation,
    and how many there are.

    Raises BuildError with everything that failed, BackendError where a compiler is missing, KgenError where a folder
    cannot be written to.
    """
    failures: list[str] = []
    made, ops = _emitted(jobs, failures)
    binaries: _Binaries = {}
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="kgen-build")
    try:
        waiting: dict[Future[list[Binary]], tuple[int, str, str]] = {}
        for i, m in enumerate(made):
            for backend, programs in m.programs.items():
                for arch in m.job.archs:
                    waiting[pool.submit(_compiled, m.target, programs, arch)] = (i, backend, arch)
        for future in as_completed(waiting):
            i, backend, arch = waiting[future]
            with _collected(failures, made[i].job):
                found = future.result()
                if not made[i].job.allow_spills:
                    for program, one in zip(made[i].programs[backend], found, strict=True):
                        _refuse_spills(made[i].target, program, arch, one)
                binaries[i, backend, arch] = found
            done(f"{made[i].target.name} for {backend} {arch}", len(waiting))
    finally:
        pool.shutdown(cancel_futures=True)
    if failures:
        raise BuildError("\n".join(failures) + "\nNothing was written.")
    return _write(made, ops, binaries)


@collected_later()
def _emitted(jobs: Sequence[Job], failures: list[str]) -> tuple[list[_Made], list[_MadeOp]]:
    """The sources of `jobs`, of kernels and of ops; what is wrong with one goes to `failures`."""
    made: list[_Made] = []
    ops: list[_MadeOp] = []
    for job in jobs:
        with _collected(failures, job):
            if isinstance(job.item, ast.Kernel):
                goal = target(job.module, job.item, job.choices)
                made.append(_Made(job, goal, {b: goal.launches(b, job.archs) for b in job.backends}, goal.name))
                continue
            op = op_target(job.module, job.item, job.choices, job.gradients, job.accumulate)
            files = kernel_files(op)
            ops.append(_MadeOp(job, op, op_source(op, files)))
            for file in {f.stem: f for _, f in files}.values():
                rest = (b for b in job.backends if b != "triton")
                programs = {**{b: file.target.launches(b, job.archs) for b in rest}, "triton": file.launches}
                made.append(_Made(job, file.target, programs, file.stem))
    return made, ops


@contextlib.contextmanager
def _collected(failures: list[str], job: Job) -> Iterator[None]:
    """Keep what a kernel's author must change for the end; a missing compiler ends the build at once."""
    try:
        yield
    except BackendError:
        raise
    except DslError as error:
        failures.append(f"{job.name}: this combination of dtypes and constants is wrong:\n{error}")
    except KgenError as error:
        failures.append(str(error))


def _compiled(target: Target, programs: Sequence[Program], arch: str) -> list[Binary]:
    return [binary(target, p, arch) for p in programs]


def _refuse_spills(target: Target, program: Program, arch: str, found: Binary) -> None:
    r = found.resources
    spilled = r.spill_store_bytes + r.spill_load_bytes
    if spilled:
        which = "kernel" if program.stage is None else f"kernel {program.entry}"
        raise BuildError(
            f"{target.name}: the {program.backend} {which} for {arch} spills registers ({r.spill_store_bytes} bytes "
            f"stored, {r.spill_load_bytes} bytes loaded a thread, {r.registers} registers), which makes it slow; "
            f"take other sizes, or --allow-spills"
        )


# ---- files ---------------------------------------------------------------------------------------------------------


def _write(made: list[_Made], ops: list[_MadeOp], binaries: _Binaries) -> dict[Path, Manifest]:
    import json

    files: dict[Path, bytes] = {}
    manifests: dict[Path, Manifest] = {}

    def add(place: Path, name: str, data: str | bytes) -> str:
        if place / name in files:
            raise BuildError(f"two kernels would both be written to {place / name}; build them into different folders")
        files[place / name] = data.encode() if isinstance(data, str) else data
        return name

    for i, m in enumerate(made):
        place = m.job.place
        manifest = manifests.setdefault(place, _head(m.job))
        entry = kernel_entry(m.target)
        if m.job.gradient is not None:
            text = m.target.kernel.span.source.text
            entry["gradient"] = {**m.job.gradient, "file": add(place, f"{m.stem}.kdsl", text)}
        manifest["kernels"][m.stem] = entry
        for backend, programs in m.programs.items():
            manifest["compilers"][backend] = _compiler(backend)
            suffix = "_triton" if backend == "triton" else ""
            text = (triton_source if backend == "triton" else eject.cuda_source)(m.target, programs)
            stem = m.stem + suffix
            source = add(place, f"{stem}.py" if backend == "triton" else f"{stem}.cu", text)
            own = entry["backends"][backend] = backend_entry(m.target, programs, source, text)
            for arch in m.job.archs:
                kept: dict[bytes, list[str]] = {}  # one binary holds all kernels of a .cu
                for program, launch, found in zip(programs, own["launches"], binaries[i, backend, arch], strict=True):
                    if found.cubin not in kept:
                        name = stem
                        if kept:  # its name is that of the kernel and more
                            name = m.stem + program.entry.removeprefix(programs[0].entry) + suffix
                        pair = (("cubin", found.cubin), ("ptx", found.ptx))
                        kept[found.cubin] = [add(place, f"{name}.{arch}.{kind}", data) for kind, data in pair]
                    launch["binaries"][arch] = binary_entry(program, found, *kept[found.cubin])
    for one in ops:
        file = add(one.job.place, f"{one.op.name}.py", one.text)
        manifest = manifests.setdefault(one.job.place, _head(one.job))
        manifest["op"] = op_entry(one.op, file, one.text)
    for place, manifest in manifests.items():
        add(place, "manifest.json", json.dumps(manifest, indent=2) + "\n")
    for path, data in files.items():
        _put(path, data)
    return manifests


def _put(path: Path, data: bytes) -> None:
    """`data` at `path`, all or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".kgen-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are for their owner alone
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise KgenError(f"cannot write {path}: {error.strerror or error}") from None


def _umask() -> int:
    # There is no way to ask without setting it; the build's threads are done by now.
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---- manifest ------------------------------------------------------------------------------------------------------


def _head(job: Job) -> Manifest:
    import kgen

    return {
        "format": 2,
        "kgen": kgen.__version__,
        "source": {"file": Path(job.module.path).name, "sha256": job.source_hash},
        "compilers": {},
        "kernels": {},
    }


def _compiler(backend: str) -> str:
    if backend == "cuda":
        from kgen.runtime import nvrtc

        return f"NVRTC {nvrtc.version()} {' '.join(nvrtc.NUMERICS_FLAGS)}"
    import triton

    return f"Triton {triton.__version__}"


def op_entry(op: OpTarget, file: str, text: str) -> Manifest:
    """An ejected op: its functions, and what was chosen for it. `file` holds `text`."""
    p, header = op.plan, op.header
    return {
        "name": op.name,
        "file": file,
        "sha256": _sha256(text),
        "functions": function_names(op),
        "signature": eject.signature_text(header),
        "doc": op.op.doc.strip(),
        "line": op.op.span.line,
        "dtypes": {name: str(d) for name, d in op.spec.dtypes.items()},
        "consts": dict(op.spec.consts),
        "optional": {t.name: t.name in op.spec.present for t in op.signature.tensors if t.optional},
        "scalars": [
            {"name": s.name, "dtype": s.dtype, "default": s.default}
            for s in op.signature.params
            if not isinstance(s, TensorParam) and not s.const
        ],
        "dims": {
            "compiled": op.compiled,
            "run_time": [d for d in header.dims if d not in op.compiled],
            "built_for": {d: n for d, n in op.dims.items() if d in header.dims and d not in op.unsized},
        },
        "outputs": [n for n, _ in p.outputs],
        "gradients": [n for n, _ in p.gradients],
        "chunks": {loop.chunk: loop.dim for loop in op.chunks.values()},
        "accumulate": op.accumulate,
    }


def kernel_entry(target: Target) -> Manifest:
    """What all backends of a kernel share: signature, specialisation, and what is assumed of a call."""
    kernel, variant = target.kernel, target.layout.variant
    known = known_dims(target)
    present = {t.name for t in kernel.tensors}
    return {
        "signature": eject.signature_text(kernel),
        "doc": kernel.doc.strip(),
        "line": kernel.span.line,
        "dtypes": {name: str(d) for name, d in kernel.dtypes},
        "consts": dict(kernel.consts),
        "optional": {t.name: t.name in present for t in target.signature.tensors if t.optional},
        "tensors": [
            {
                "name": t.name,
                "dtype": str(t.dtype),
                "shape": [("*" if t.star and i == 0 else "") + str(p) for i, p in enumerate(t.shape)],
                "role": t.role,
                "innermost_stride_1": variant.tensor(t.name).unit,
                "align_bytes": variant.tensor(t.name).align,
                "dense": variant.tensor(t.name).dense,
            }
            for t in kernel.tensors
        ],
        "scalars": [{"name": s.name, "dtype": str(s.dtype), "default": s.default} for s in kernel.scalars],
        "dims": {
            "compiled": {d: known[d] for d in kernel.dims if d in known},
            "run_time": [d for d in kernel.dims if d not in known],
            "derived": {d: str(p) for d, p in derived_dims(target).items()},
            "multiples": {d: n for d, n in variant.multiples if n > 1},
            "tuned_for": {d: target.layout.dims[d] for d in kernel.dims},
        },
        "index_bits": 64 if variant.wide else 32,
        "assumes": eject.assumptions(target, peeled=True),
        "backends": {},
    }


def backend_entry(target: Target, programs: Sequence[Program], file: str, text: str) -> Manifest:
    """How the kernel is launched on one backend, in how many launches. `file` holds `text`, the ejected source."""
    first = programs[0]
    whole = replace(first, then=tuple(programs[1:]))
    out: Manifest = {"file": file, "sha256": _sha256(text)}
    if first.backend == "triton":
        out["host_function"] = f"launch_{first.entry}"
    if first.stage is not None:
        out["shares"] = [
            {
                "dim": s.dim,
                "programs": s.text(device_word(target)),
                "multiprocessors": device_word(target),
                "most": s.steps.text(),
                "programs_per_multiprocessor": s.resident,
            }
            | ({"blocks_per_program": s.cluster} if s.cluster > 1 else {})
            for s in shares(target, whole)
        ]
        out["workspaces"] = [
            {
                "name": w.tensor.name,
                "dtype": str(w.tensor.dtype),
                "shape": [str(p) for p in w.shape],
                "bytes": str(w.bytes),
                "zeroed": w.zeroed,
            }
            for w in workspaces(target, whole)
        ]
    out["launches"] = [launch_entry(target, p) for p in programs]
    return out


def launch_entry(target: Target, program: Program) -> Manifest:
    """One launch: the kernel's name in the binary, its grid, its arguments in order."""
    s = program.schedule
    out: Manifest = {
        "entry": program.entry,
        "grid": grid(target, program).text(),
        "block": s.threads,
        "arguments": [
            {"kind": a.kind, "name": a.name, "dtype": str(a.dtype)}
            | ({"axis": a.axis} if a.kind == "stride" else {})
            | {"meaning": eject.argument_text(target, program, a)}
            for a in program.args
        ],
        "schedule": {
            "name": s.name, "threads": s.threads, "rows": s.rows, "vector": s.vector, "chunks": dict(s.chunks),
            "cluster": s.cluster, "peeled": s.peeled, "held": s.held,
        },
        "launch_bounds": s.threads,
        "binaries": {},
    }  # fmt: skip
    if program.backend == "triton":
        out["num_warps"] = s.threads // 32
        del out["schedule"]["vector"], out["schedule"]["cluster"], out["schedule"]["peeled"]
    else:
        del out["schedule"]["held"]
    return out


def binary_entry(program: Program, found: Binary, cubin: str, ptx: str) -> Manifest:
    """The files for one architecture and what the kernel occupies.

    `trailing_null_pointers`: a launch of the binary passes so many null pointers after the arguments (Triton's scratch
    memory).
    """
    entry = re.search(rf"\.entry\s+{re.escape(program.entry)}\s*\((.*?)\)", found.ptx, re.S)
    params = entry.group(1).count(".param") if entry else len(program.args)
    return {
        "cubin": cubin,
        "ptx": ptx,
        "sha256": _sha256(found.cubin),
        **asdict(found.resources),
        "dynamic_shared_bytes": found.shared_bytes,
        "trailing_null_pointers": params - len(program.args),
    }


def _sha256(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()
