"""Hand-written backwards: what each parameter of one is in the kernel it belongs to, and which calls it serves.

Everything is found by name. A parameter is an input, a scalar or an output of the forward kernel by its own name, the
gradient of an output (`d_y`), or a value that the forward kernel saves (`saved_r`); an output is the gradient of an
input. Not here: the body, which is checked as that of any kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kgen.dsl import ast, ir
from kgen.dsl.affine import Poly
from kgen.dsl.check.scope import Specialization
from kgen.dsl.check.signature import ScalarParam, Signature, TensorParam, literal_value
from kgen.dsl.diagnostics import Diagnostics, suggestion
from kgen.dsl.dtypes import DTYPES, F32, F64, DType
from kgen.dsl.source import Span

SAVED = "saved_"

Value = int | float | bool


def gradient_names(tensors: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """The names of the gradients of `tensors`: `d_x` of `x`, or `d_x_2`, ... where one of `taken` is called so."""
    known = set(taken)
    names: dict[str, str] = {}
    for t in tensors:
        name, n = f"d_{t}", 1
        while name in known:
            n += 1
            name = f"d_{t}_{n}"
        known.add(name)
        names[t] = name
    return names


@dataclass(frozen=True)
class Backward:
    """A hand-written backward beside its kernel.

    It serves the calls whose dtype variables are among `dtypes`, whose const parameters are among `consts` (one that is
    not there may have any value), and whose optional tensors are there or not as `present` says. `signature` is its
    header; `cotangents` and `gradients` map an output and an input of the forward kernel to a parameter and an output
    of this one, `outputs` are those taken as they are, and `saved` maps a parameter to a value's name.
    """

    kernel: ast.Backward
    signature: Signature
    dtypes: Mapping[str, tuple[DType, ...]]
    consts: Mapping[str, tuple[Value, ...]]
    present: Mapping[str, bool]
    cotangents: Mapping[str, str]
    gradients: Mapping[str, str]
    outputs: tuple[str, ...]
    saved: Mapping[str, str]

    @property
    def known(self) -> dict[str, Value]:
        """What is the same in every call it serves: const parameters, and whether optional tensors are there."""
        return {n: v[0] for n, v in self.consts.items() if len(v) == 1} | dict(self.present)

    def why_not(self, spec: Specialization) -> str:
        """Why a call specialised to `spec` is not served; empty where it is."""
        for name, dtype in spec.dtypes.items():
            if name in self.dtypes and dtype not in self.dtypes[name]:
                return f"{name} is {dtype}"
        for name, values in self.consts.items():
            if all(repr(spec.consts[name]) != repr(v) for v in values):
                return f"{name} is {str(spec.consts[name]).lower()}"
        for name, there in self.present.items():
            if (name in spec.present) != there:
                return f"'{name}' is {'absent' if there else 'given'}"
        return ""

    def specialization(self, spec: Specialization) -> Specialization:
        """What this kernel is specialised to in a call of the forward kernel that is specialised to `spec`."""
        own = {s.name for s in self.signature.scalars if s.const}
        optional = {t.name for t in self.signature.tensors if t.optional}
        return Specialization(
            {v: spec.dtypes[v] for v in self.signature.dtype_vars},
            {n: v for n, v in spec.consts.items() if n in own},
            frozenset(optional & spec.present),
        )


@dataclass(frozen=True)
class Residual:
    """A value that a forward kernel saves: the `Let` that makes it, the tensor for it, and that tensor's indices."""

    let: str
    tensor: ir.Tensor
    indices: tuple[str, ...]


@dataclass(frozen=True)
class Misfit:
    """Why there is no such residual, and what to do about it; `unassigned` if there is one on other paths, maybe."""

    message: str
    help: str
    unassigned: bool = False


def residual(kernel: ir.Kernel, value: str) -> Residual | Misfit:
    """The residual for what `kernel` calls `value`: one element a program, in the value's own dtype."""
    name = dict(kernel.values).get(value)
    let = next((s for s in kernel.body if isinstance(s, ir.Let) and s.name == name), None)
    if let is None:
        help = "compute it again from the inputs"
        return Misfit(f"value '{value}' is not assigned here, or is index arithmetic", help, unassigned=True)
    parallel = [a for a in kernel.axes if a.kind == "parallel"]
    tiles = sorted(let.value.axes - {a.name for a in parallel})
    if tiles:
        help = f"compute it again from the inputs; what sum(..., {tiles[0]}) or another reduction gives can be saved"
        return Misfit(f"value '{value}' carries tile index '{tiles[0]}'", help)
    stars = {t.shape[0].as_symbol for t in kernel.tensors if t.star}
    starred = [a for a in parallel if a.extent.as_symbol in stars]
    if len(starred) > 1:
        help = "compute it again from the inputs"
        return Misfit(f"value '{value}' carries two starred indices, and a tensor has at most one", help)
    order = [*starred, *(a for a in parallel if a not in starred)]
    shape = tuple(a.extent for a in order)
    tensor = ir.Tensor(SAVED + value, let.value.dtype, shape, "out", bool(starred), False, let.span)
    return Residual(let.name, tensor, tuple(a.name for a in order))


def misfit(kernel: ir.Kernel, own: ir.Tensor, value: str) -> Misfit | None:
    """Why `own`, a parameter of a backward, cannot hold what forward kernel `kernel` calls `value`."""
    made = residual(kernel, value)
    if isinstance(made, Misfit):
        return made
    t = made.tensor
    if (own.dtype, own.shape, own.star) == (t.dtype, t.shape, t.star):
        return None
    form = _form(str(t.dtype), t.shape, t.star)
    return Misfit(f"value '{value}' is saved as {form}, an element for each program", f"declare it {own.name}: {form}")


def fitted(backward: Backward, forward: ir.Kernel) -> Signature:
    """The header of `backward` beside `forward`: a value declared `f32` is f64 where the forward computes in f64."""

    def fit(p: TensorParam | ScalarParam) -> TensorParam | ScalarParam:
        made = residual(forward, backward.saved[p.name]) if p.name in backward.saved and p.dtype == F32.name else None
        return p._replace(dtype=F64.name) if isinstance(made, Residual) and made.tensor.dtype == F64 else p

    return replace(backward.signature, params=tuple(map(fit, backward.signature.params)))


def match(
    forward: Signature, assigned: frozenset[str], kernel: ast.Backward, own: Signature, diagnostics: Diagnostics
) -> Backward | None:
    """`kernel`, whose header is `own`, beside the kernel of header `forward`, which assigns the names `assigned`.

    Reports K0230 to K0234; None where something does not fit.
    """
    before = len(diagnostics.items)
    found = _Matcher(forward, assigned, kernel, own, diagnostics).run()
    return found if len(diagnostics.items) == before else None


def assigned_names(statements: Iterable[ast.Stmt]) -> Iterator[str]:
    """Every name that statements assign, on any path."""
    for s in statements:
        if isinstance(s, ast.Assign):
            yield from (t.id for t in s.targets if isinstance(t, ast.Name))
        elif isinstance(s, ast.If):
            yield from assigned_names((*s.body, *s.orelse))


class _Matcher:
    def __init__(
        self,
        forward: Signature,
        assigned: frozenset[str],
        kernel: ast.Backward,
        own: Signature,
        diagnostics: Diagnostics,
    ) -> None:
        self.forward = forward
        self.assigned = assigned
        self.kernel = kernel
        self.own = own
        self.diagnostics = diagnostics
        self.name = forward.name
        self.dtypes = dict(forward.dtype_vars)
        self.consts: dict[str, tuple[Value, ...]] = {}
        self.present: dict[str, bool] = {}
        self.cotangents: dict[str, str] = {}
        self.gradients: dict[str, str] = {}
        self.outputs: list[str] = []
        self.saved: dict[str, str] = {}
        taken = {p.name for p in (*forward.params, *forward.outputs)} | set(forward.dims)
        inputs = [p.name for p in forward.params if isinstance(p, TensorParam)]
        self.names = gradient_names([*(t.name for t in forward.outputs), *inputs], taken)

    def error(self, code: str, message: str, span: Span, help: str) -> None:
        self.diagnostics.error(code, message, span, help=help)

    def run(self) -> Backward:
        forward = self.forward
        for t in forward.tensors:
            if t.role == "inout":
                help = "make it an input of the kernel and store the new value to an output"
                message = f"kernel '{self.name}' overwrites '{t.name}' in place, so it has no backward"
                self.error("K0230", message, self.kernel.name_span, help)
        self.limits()
        for p in self.own.params:
            self.param(p)
        for t in self.own.outputs:
            self.gradient(t)
        for name, choices in self.dtypes.items():
            if not choices:
                help = f"{name} stands for one dtype wherever kernel '{self.name}' has it"
                self.error("K0234", f"no dtype fits {name} as this header has it", self.kernel.name_span, help)
        self.optional()
        outputs = tuple(
            t._replace(optional=True, follows=origin)
            if (origin := self.origin(t.name)) is not None and origin not in self.present and self.is_optional(origin)
            else t
            for t in self.own.outputs
        )
        own_dtypes = {v: self.dtypes.get(v, c) for v, c in self.own.dtype_vars.items()}
        return Backward(
            self.kernel,
            replace(self.own, outputs=outputs, dtype_vars=own_dtypes),
            self.dtypes,
            self.consts,
            self.present,
            self.cotangents,
            self.gradients,
            tuple(self.outputs),
            self.saved,
        )

    def origin(self, gradient: str) -> str | None:
        return next((t for t, d in self.gradients.items() if d == gradient), None)

    def is_optional(self, name: str) -> bool:
        return any(t.name == name and t.optional for t in self.forward.tensors)

    # ---- which calls

    def limits(self) -> None:
        """What the header says in brackets, and the const parameters that it leaves out."""
        for v in self.kernel.dtype_vars:
            if v.name not in self.dtypes:
                known = ", ".join(self.dtypes) or "none"
                message = f"kernel '{self.name}' has no dtype variable '{v.name}'"
                self.error("K0234", message, v.span, f"its dtype variables: {known}")
            else:
                self.narrow(v.name, [DTYPES[c] for c in v.choices if c in DTYPES])
        consts = {s.name: s for s in self.forward.scalars if s.const}
        for c in self.kernel.serves:
            if c.name not in consts:
                message = f"kernel '{self.name}' has no const parameter '{c.name}'"
                self.error("K0234", message, c.span, f"its const parameters: {', '.join(consts) or 'none'}")
                continue
            kind = DTYPES[consts[c.name].dtype].kind if consts[c.name].dtype in DTYPES else "float"
            values = [literal_value(v) for v in c.values]
            if any(not _fits(v, kind) for v in values):
                message = f"'{c.name}' is {consts[c.name].dtype}, and this is none"
                self.error("K0234", message, c.span, f"write {kind} literals")
            self.consts[c.name] = tuple(float(v) if kind == "float" else v for v in values if v is not None)
        taken = {p.name for p in self.own.params}
        for s in consts.values():
            if s.name in taken or s.name in self.consts:
                continue
            if s.default is None:
                message = f"the backward of '{self.name}' says nothing of const parameter '{s.name}'"
                help = f"take it as a parameter, {s.name}: const {s.dtype}, or name its values in brackets"
                self.error("K0234", message, self.kernel.name_span, help)
            else:
                self.consts[s.name] = (s.default,)

    def optional(self) -> None:
        own = {p.name: p for p in self.own.params}
        for t in self.forward.tensors:
            if t.optional:
                p = own.get(t.name)
                if not (isinstance(p, TensorParam) and p.optional):
                    self.present[t.name] = p is not None or t.name in self.gradients

    def narrow(self, var: str, choices: Iterable[DType]) -> None:
        choices = tuple(choices)
        self.dtypes[var] = tuple(d for d in self.dtypes[var] if d in choices)

    # ---- what is what

    def param(self, p: TensorParam | ScalarParam) -> None:
        original = next((q for q in self.forward.params if q.name == p.name), None)
        if original is not None:
            self.input(p, original)
            return
        for t in self.forward.outputs:
            if p.name in (t.name, self.names[t.name]):
                if p.name == t.name:
                    self.outputs.append(t.name)
                else:
                    self.cotangents[t.name] = p.name
                    self.floats(t, p)
                self.same(p, t, "the gradient of" if p.name != t.name else "")
                return
        value = p.name.removeprefix(SAVED)
        if value != p.name and isinstance(p, TensorParam):
            self.residual(p, value)
            return
        inputs = [q.name for q in self.forward.params]
        outputs = [n for t in self.forward.outputs for n in (self.names[t.name], t.name)]
        known = [*inputs, *outputs, *(SAVED + v for v in sorted(self.assigned))]
        near = suggestion(p.name, known)
        help = near if near.startswith("did you mean") else f"parameters may be {', '.join(known[:8])}"
        self.error("K0231", f"'{p.name}' is nothing that kernel '{self.name}' has", p.span, help)

    def input(self, p: TensorParam | ScalarParam, original: TensorParam | ScalarParam) -> None:
        if isinstance(p, TensorParam) and isinstance(original, TensorParam):
            if p.optional and not original.optional:
                message = f"'{p.name}' is not optional in kernel '{self.name}'"
                self.error("K0232", message, p.span, "remove the '?'")
            self.same(p._replace(optional=False), original, "")
        elif isinstance(p, ScalarParam) and isinstance(original, ScalarParam):
            if p.const != original.const:
                word = "const" if original.const else "not const"
                help = f"declare it {p.name}: {'const ' if original.const else ''}{original.dtype}"
                self.error("K0232", f"'{p.name}' is {word} in kernel '{self.name}'", p.span, help)
            self.dtype(p, original.dtype)
        else:
            self.mismatch(p, original)

    def gradient(self, t: TensorParam) -> None:
        inputs = [q for q in self.forward.params if isinstance(q, TensorParam)]
        original = next((q for q in inputs if self.names[q.name] == t.name), None)
        if original is None:
            known = ", ".join(self.names[q.name] for q in inputs)
            message = f"'{t.name}' is the gradient of no input of kernel '{self.name}'"
            self.error("K0231", message, t.span, f"its outputs may be {known or 'none'}")
            return
        self.gradients[original.name] = t.name
        self.floats(original, t)
        self.same(t, original, "the gradient of")

    def floats(self, original: TensorParam, t: TensorParam | ScalarParam) -> None:
        dtype = DTYPES.get(original.dtype)
        if dtype is not None and dtype.kind != "float":
            message = f"'{original.name}' is {dtype} and has no gradient"
            self.error("K0231", message, t.span, "only floating-point tensors have one; remove it")

    def residual(self, p: TensorParam, value: str) -> None:
        if value not in self.assigned:
            values = sorted(self.assigned)
            near = suggestion(value, values)
            help = f"the values it names: {', '.join(values[:8]) or 'none'}"
            message = f"kernel '{self.name}' assigns no value '{value}'"
            self.error("K0233", message, p.span, near if near.startswith("did you mean") else help)
        elif p.dtype not in DTYPES and p.dtype not in self.forward.dtype_vars:
            self.error("K0232", f"kernel '{self.name}' has no dtype variable '{p.dtype}'", p.span, "write a dtype")
        elif p.optional or p.role != "in":
            self.error("K0232", f"saved value '{p.name}' is optional or inout", p.span, "remove that word")
        else:
            self.saved[p.name] = value

    # ---- forms

    def same(self, p: TensorParam | ScalarParam, original: TensorParam, what: str) -> None:
        """Report a tensor of another form than that of the forward kernel's `original`."""
        pinned = {n: int(v[0]) for n, v in self.consts.items() if len(v) == 1 and type(v[0]) is int}
        if not isinstance(p, TensorParam):
            self.mismatch(p, original, what)
            return
        if p.optional or p.role == "inout":
            word = "optional" if p.optional else "inout"
            help = f"remove the {'?' if p.optional else word}"
            self.error("K0232", f"'{p.name}' cannot be {word} in a backward", p.span, help)
        shapes = [tuple(s.substitute(pinned) for s in t.shape) for t in (p, original)]
        if (shapes[0], p.star) != (shapes[1], original.star):
            self.mismatch(p, original, what)
            return
        self.dtype(p, original.dtype, original, what)

    def mismatch(self, p: TensorParam | ScalarParam, original: TensorParam | ScalarParam, what: str = "") -> None:
        form = (
            _form(original.dtype, original.shape, original.star)
            if isinstance(original, TensorParam)
            else f"the scalar {original.dtype}"
        )
        subject = f"{what} '{original.name}'".strip()
        message = f"{subject} is {form} in kernel '{self.name}'"
        self.error("K0232", message, p.span, f"declare it {p.name}: {form.removeprefix('the scalar ')}")

    def dtype(
        self, p: TensorParam | ScalarParam, dtype: str, original: TensorParam | None = None, what: str = ""
    ) -> None:
        """Take note of the dtype that `p` has, where the forward kernel has `dtype`."""
        fixed = dtype in self.dtypes and dtype not in self.own.dtype_vars  # a header has T, or one dtype for it
        if fixed and p.dtype in DTYPES and DTYPES[p.dtype] in self.forward.dtype_vars[dtype]:
            self.narrow(dtype, [DTYPES[p.dtype]])
        elif dtype != p.dtype:
            subject = f"{what} '{original.name if original else p.name}'".strip()
            choices = f" ({', '.join(map(str, self.forward.dtype_vars[dtype]))})" if dtype in self.dtypes else ""
            message = f"{subject} is {dtype}{choices} in kernel '{self.name}'"
            self.error("K0232", message, p.span, f"write {dtype} for {p.dtype}")


def _form(dtype: str, shape: tuple[Poly, ...], star: bool) -> str:
    return f"{dtype}[{', '.join(('*' if star and i == 0 else '') + str(p) for i, p in enumerate(shape))}]"


def _fits(value: Value | None, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    return value is not None and not isinstance(value, bool) and (kind == "float" or isinstance(value, int))
