"""Kernels without a call: what a kernel is compiled for when there are no tensors yet, only sizes and dtypes.

Tensors are taken to be contiguous and 16-byte aligned, as torch allocates them. Sizes come from the caller or from the
kernel's `example` statement; what is then compiled in is in the layout's variant.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from kgen.codegen.collapse import Merge, collapse
from kgen.codegen.knobs import Knobs
from kgen.codegen.machines import OLDEST, too_old
from kgen.codegen.pipeline import CAPABILITY, MULTIPROCESSORS, schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.resident import least_shared
from kgen.codegen.schedule import Scheduled
from kgen.codegen.shapes import ShapeError, bind_dims, constants, flat_shape
from kgen.dsl import ast, ir
from kgen.dsl.check import Signature, Specialization, elaborate, example_sizes, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import BF16, DTYPES, DType
from kgen.runtime import nvrtc
from kgen.runtime.backends.base import keep_templates
from kgen.runtime.cache import CACHE, Cache, cache_key
from kgen.runtime.errors import ArgumentError, BackendError
from kgen.runtime.foreign_caches import before_triton_compiles
from kgen.runtime.layouts import Layout, Memory, layout
from kgen.runtime.nvrtc import Resources

Value = int | float | bool
BACKENDS = ("cuda", "triton")
_FUNCTION = re.compile(r"Function properties for (\w+)\n")  # in the compiler's log
_ANY = 1024  # the size of a dimension that changes nothing


@dataclass(frozen=True)
class Choices:
    """What a user chose; whatever is not in here has its default.

    dims: sizes of dimensions and of const integers. dtype: for every dtype variable that `dtypes` does not name.
    consts: values of const parameters, as text. without: optional tensors that are absent (all others are present).
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    dtype: str | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    consts: Mapping[str, str] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Target:
    """One kernel of a file with everything chosen that its compilation depends on.

    `kernel` is as the source has it; `layout.kernel` has neighbouring parallel indices merged, as `merges` says.
    """

    module: ast.Module
    signature: Signature
    kernel: ir.Kernel
    layout: Layout
    merges: tuple[Merge, ...]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    def scheduled(
        self,
        backend: str,
        num_sms: int = MULTIPROCESSORS,
        knobs: Knobs | None = None,
        capability: int = CAPABILITY,
    ) -> Scheduled:
        """The kernel in normal form with the schedule of `backend` for a device of `num_sms` multiprocessors and
        compute capability `capability` (90 for sm_90), turned by `knobs`."""
        return schedule_kernel(
            self.layout.kernel, self.layout.variant, backend, num_sms=num_sms, knobs=knobs, capability=capability
        )

    def program(
        self,
        backend: str,
        num_sms: int = MULTIPROCESSORS,
        knobs: Knobs | None = None,
        capability: int = CAPABILITY,
    ) -> Program:
        """The generated program of `backend`, `cuda` or `triton`. Of several launches each has a source of its own."""
        if backend == "cuda":
            from kgen.codegen.cuda.emit import emit
        else:
            from kgen.codegen.triton.emit import emit
        keep_templates(CACHE)
        return emit(self.scheduled(backend, num_sms, knobs, capability))

    def launches(self, backend: str, archs: Iterable[str] = ()) -> tuple[Program, ...]:
        """The launches of `program`, in order, for all of `archs`. On `cuda` the source of each is the file that holds
        them all. Without `archs`, what fits any on `triton`."""
        goals = [capability(arch) for arch in archs]
        if backend == "triton":
            return self.program(backend, capability=least_shared(goals)).launches
        oldest = min(goals, default=CAPABILITY)
        program = self.program(backend, capability=oldest)
        if not program.then:
            return program.launches
        from kgen.codegen.cuda.bundle import bundle

        source = bundle(self.scheduled(backend, capability=oldest))
        return tuple(replace(p, source=source, lines=(), then=()) for p in program.launches)


def capability(arch: str) -> int:
    """The compute capability of an architecture: 90 for sm_90 and sm_90a."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def settled(module: ast.Module, declared: ast.Kernel, choices: Choices) -> tuple[Signature, ir.Kernel]:
    """The signature of kernel `declared` of the checked `module`, and the kernel as `choices` settle its dtypes,
    constants and optional tensors; sizes stay symbols.

    Raises ArgumentError for a choice that does not fit the signature, DslError where the specialised kernel is wrong.
    """
    signature = signature_of(declared, Diagnostics())
    return signature, elaborate(module, declared.name, specialization(signature, choices, example_sizes(declared)))


def target(module: ast.Module, declared: ast.Kernel, choices: Choices) -> Target:
    """The kernel `declared` of the checked `module` under `choices`.

    Names in `choices` that the kernel does not have are ignored (`unknown_names` finds them). Raises ArgumentError for
    a choice that does not fit the signature and for a dimension without a size, DslError where the specialised
    kernel is wrong.
    """
    signature, kernel = settled(module, declared, choices)
    dims = _sizes(kernel, choices, example_sizes(declared))
    shapes = {t.name: flat_shape(t, dims) for t in kernel.tensors}
    for name, shape in shapes.items():
        if any(n < 0 for n in shape):
            raise ArgumentError(
                f"{kernel.name}: '{name}' would have shape {shape} with {_listed(dims)}; give other sizes"
            )
    try:
        bind_dims(kernel, shapes)
    except ShapeError as error:
        raise ArgumentError(str(error)) from None
    for a in kernel.axes:
        if a.kind == "parallel" and a.extent.evaluate(dims) <= 0:
            raise ArgumentError(
                f"{kernel.name}: index '{a.name}' has no values with {_listed(dims)}, so there is nothing to compile"
            )
    if all(0 in shapes[t.name] for t in kernel.tensors if t.role != "in"):
        raise ArgumentError(
            f"{kernel.name}: every result is empty with {_listed(dims)}, so there is nothing to compile"
        )
    memory = {t.name: Memory(shapes[t.name], contiguous(shapes[t.name]), t.dtype.itemsize, 0) for t in kernel.tensors}
    return placed(module, signature, kernel, layout(kernel, dims, memory))


def placed(module: ast.Module, signature: Signature, kernel: ir.Kernel, where: Layout) -> Target:
    """`kernel` of `module` for the class of calls that `where` is one of."""
    return Target(module, signature, kernel, where, collapse(kernel, where.groups)[1])


def specialization(signature: Signature, choices: Choices, example: Mapping[str, int]) -> Specialization:
    """The dtypes, constants and optional tensors that `choices` gives the kernel."""
    name = signature.name
    dtypes: dict[str, DType] = {}
    for var, allowed in signature.dtype_vars.items():
        text = choices.dtypes.get(var, choices.dtype)
        if text is None:
            dtypes[var] = BF16 if BF16 in allowed else allowed[0]
            continue
        if text not in DTYPES or DTYPES[text] not in allowed:
            raise ArgumentError(
                f"{name}: dtype variable {var} stands for one of {', '.join(map(str, allowed))}, got '{text}'"
            )
        dtypes[var] = DTYPES[text]
    consts: dict[str, Value] = {}
    for p in signature.scalars:
        if not p.const:
            continue
        kind = DTYPES[p.dtype].kind if p.dtype in DTYPES else "float"
        if p.name in choices.consts:
            consts[p.name] = const_value(name, p.name, kind, choices.consts[p.name])
        elif p.name in choices.dims:
            consts[p.name] = choices.dims[p.name]
        elif p.default is not None:
            consts[p.name] = p.default
        elif p.name in example:
            consts[p.name] = example[p.name]
        else:
            raise ArgumentError(
                f"{name}: the const parameter '{p.name}' has no default; give its value: --const {p.name}=..."
            )
    optional = {t.name for t in signature.tensors if t.optional}
    return Specialization(dtypes, consts, frozenset(optional - choices.without))


def const_value(kernel: str, name: str, kind: str, text: str) -> Value:
    """The value that `text` stands for. Raises ArgumentError where it is none of a `kind` (bool, int or float)."""
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return int(text, 0) if kind == "int" else float(text)
    except (KeyError, ValueError):
        wanted = {"bool": "true or false", "int": "an integer"}.get(kind, "a number")
        raise ArgumentError(f"{kernel}: const parameter '{name}' must be {wanted}, got '{text}'") from None


def unknown_names(choices: Choices, signatures: Iterable[Signature]) -> list[tuple[str, str, list[str]]]:
    """Names in `choices` that none of the kernels has: (option, name, the names that there are)."""
    dims: set[str] = set()
    dtypes: set[str] = set()
    consts: set[str] = set()
    optional: set[str] = set()
    for s in signatures:
        dtypes |= s.dtype_vars.keys()
        consts |= {p.name for p in s.scalars if p.const}
        dims |= {
            *s.dims,
            *(p.name for p in s.scalars if p.const and p.dtype in DTYPES and DTYPES[p.dtype].kind == "int"),
        }
        optional |= {t.name for t in s.tensors if t.optional}
    out = []
    for option, given, there in (
        ("--dim", choices.dims, dims),
        ("--dtype", choices.dtypes, dtypes),
        ("--const", choices.consts, consts),
        ("--with", choices.given, optional),
        ("--without", choices.without, optional),
    ):
        out += [(option, name, sorted(there)) for name in sorted(given) if name not in there]
    return out


def _sizes(kernel: ir.Kernel, choices: Choices, example: Mapping[str, int]) -> dict[str, int]:
    sizes = constants(kernel)
    needed = _needed(kernel)
    missing = []
    for d in kernel.dims:
        if d in choices.dims:
            sizes[d] = choices.dims[d]
        elif d in example:
            sizes[d] = example[d]
        elif d in needed:
            missing.append(d)
        else:
            sizes[d] = _ANY
    if missing:
        options = " ".join(f"--dim {d}=..." for d in missing)
        raise ArgumentError(
            f"{kernel.name}: no size is known for {', '.join(missing)}; give {'it' if len(missing) == 1 else 'them'} "
            f"({options}), or write an `example` statement into the kernel"
        )
    return sizes


def _needed(kernel: ir.Kernel) -> frozenset[str]:
    """The dimensions whose sizes change what is generated: those of tiles and of strides, and, where vectors run along
    a parallel index, all."""
    if not kernel.tiles:
        return frozenset(kernel.dims)
    polys = [a.extent for a in kernel.tiles] + [p for t in kernel.tensors for p in t.shape[1:]]
    polys += [p for r in kernel.requires for p in (r.left, r.right)]
    return frozenset[str]().union(*(p.symbols for p in polys))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor of this shape that lies without gaps."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.insert(0, step)
        step *= max(1, n)
    return tuple(strides)


def _listed(dims: Mapping[str, int]) -> str:
    return ", ".join(f"{d} = {v}" for d, v in dims.items())


@dataclass(frozen=True)
class Binary:
    """A program compiled for one architecture: its machine code and PTX, and what it occupies.

    `shared_bytes` is the dynamic shared memory that a launch asks for; `resources` has the static shared memory.
    """

    cubin: bytes
    ptx: str
    resources: Resources
    shared_bytes: int

    @property
    def sass(self) -> str:
        """The machine code, disassembled. Raises KgenError where no `nvdisasm` is found."""
        return nvrtc.Compiled("kernel", "", self.cubin, self.ptx, "", self.resources).sass


def binary(target: Target, program: Program, arch: str, cache: Cache = CACHE) -> Binary:
    """`program` of `target` compiled for `arch` (`sm_90`), from the cache or by its compiler. No GPU is needed.

    Raises BackendError where the compiler is missing or does not know `arch`.
    """
    compiled = _triton if program.backend == "triton" else _cuda
    key, build = compiled(target, program, arch)
    head, _, rest = cache.get_or_build(key, lambda: _packed(*build())).partition(b"\n")
    meta = json.loads(head)
    used = Resources(**meta["resources"][program.entry])
    return Binary(rest[meta["ptx"] :], rest[: meta["ptx"]].decode(), used, meta["shared"])


_Build = Callable[[], tuple[Binary, Mapping[str, Resources]]]  # the resources of every kernel in the binary


def _packed(b: Binary, resources: Mapping[str, Resources]) -> bytes:
    ptx = b.ptx.encode()
    head = {"ptx": len(ptx), "resources": {e: asdict(r) for e, r in resources.items()}, "shared": b.shared_bytes}
    return json.dumps(head).encode() + b"\n" + ptx + b.cubin


def _cuda(target: Target, program: Program, arch: str) -> tuple[str, _Build]:
    try:
        version, why = nvrtc.version(), nvrtc.refusal(arch)
    except nvrtc.CudaCompileError as error:
        raise BackendError(str(error)) from None
    if why is not None:
        raise BackendError(why)

    def build() -> tuple[Binary, Mapping[str, Resources]]:
        done = nvrtc.compile_cuda(program.source, program.entry, arch, lines=program.lines)
        used = {e: nvrtc.parse_resources(done.log, e) for e in _FUNCTION.findall(done.log)}
        return Binary(done.cubin, done.ptx.rstrip("\0"), done.resources, program.shared_bytes), used

    # The kernels of a file are compiled together, whichever of them is asked for.
    return cache_key("cuda-file", program.source, version, *nvrtc.NUMERICS_FLAGS, arch), build


def _triton(target: Target, program: Program, arch: str) -> tuple[str, _Build]:
    from kgen.runtime.backends.triton import missing_triton

    missing = missing_triton()
    if missing is not None:
        raise BackendError(missing)
    import triton
    from triton import knobs

    from kgen.runtime.triton_compile import assembler, compile_triton, told

    number = arch.removeprefix("sm_")
    if not number.isdigit():
        raise BackendError(f"Triton cannot compile for {arch}; it knows sm_{OLDEST} and later, without suffix")
    if why := too_old(int(number)):
        raise BackendError(why)
    if knobs.runtime.interpret:
        raise BackendError("Triton runs as an interpreter here because TRITON_INTERPRET is set; unset it to compile")
    variant = program.stage.variant if program.stage is not None else target.layout.variant

    def build() -> tuple[Binary, Mapping[str, Resources]]:
        before_triton_compiles()
        with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
            done = compile_triton(program, variant, int(number), Path(folder))
        made = Binary(done.cubin, done.ptx.rstrip("\0"), done.resources, done.shared_bytes)
        return made, {program.entry: done.resources}

    key = cache_key(
        "triton-file", program.source, program.entry, triton.__version__, assembler(int(number)).version,
        told(program, variant), arch, repr(variant),
    )  # fmt: skip
    return key, build
