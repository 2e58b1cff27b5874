"""The steps of a plan as Python statements on torch tensors, for an op that is ejected.

Each is the statement that `kgen.runtime.host.walk` takes for the step. What the walk decides by the sizes of a call is
decided in the file; what it decides by dtypes is decided here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kgen.codegen.host import plan, sizing
from kgen.codegen.names import Names
from kgen.codegen.origins import cited
from kgen.codegen.program import Program
from kgen.codegen.torch_dtypes import TORCH
from kgen.codegen.triton.reserved import RESERVED
from kgen.dsl.affine import Poly
from kgen.dsl.check import TensorParam
from kgen.dsl.dtypes import DTYPES, F32, F64, DType
from kgen.dsl.host import ir
from kgen.dsl.source import Span
from kgen.runtime.ahead import Target
from kgen.runtime.eject_sizes import Sizes, literal, tuple_text
from kgen.runtime.eject_triton import HostFunction
from kgen.runtime.op_target import Called, OpTarget

KEYWORDS = ("workspace_mb", "chunk", "group", "keep_saved", "saved")
_HELPERS = ("_given", "_rank", "_chunk_rows", "_product", "_store", "_ranks", "_all_reduce")


def function_names(op: OpTarget) -> list[str]:
    """The functions of the file: forward, and backward where a gradient is wanted."""
    return [f"{op.name}_forward"] + ([f"{op.name}_backward"] if op.plan.gradients else [])


@dataclass(frozen=True)
class KernelFile:
    """A kernel as the op launches it, in one or several places: `stem` names its files, `function` is what the op's
    file calls its host function."""

    stem: str
    target: Target
    launches: tuple[Program, ...]
    host: HostFunction
    function: str

    @property
    def module(self) -> str:
        """The Python module that has the host function."""
        return f"{self.stem}_triton"


Said = list[str | None]  # the last comment


@dataclass
class Body:
    """The statements of one function. `used` are the names that they need besides their buffers."""

    lines: list[str] = field(default_factory=list)
    depth: int = 0
    frees: list[str] = field(default_factory=list)

    def add(self, *lines: str) -> None:
        """Statements at the present depth."""
        self.flush()
        self.lines += ["    " * self.depth + line if line else "" for line in lines]

    def flush(self) -> None:
        """Write down what is given back since the last statement."""
        if self.frees:
            frees, self.frees = self.frees, []
            self.add(f"del {', '.join(frees)}")


class Steps:
    """The statements of an op's steps. `helpers` are the functions of the file that they turned out to need."""

    def __init__(self, op: OpTarget, files: Sequence[tuple[Called, KernelFile]]) -> None:
        self.op, self.plan = op, op.plan
        self.files = {id(called.step): (called, file) for called, file in files}
        self.header = op.header
        self.known = {**op.compiled, **{n: v for n, v in op.spec.consts.items() if type(v) is int}}
        dims = [d for d in self.header.dims if d not in self.known]
        stars = [str(t.shape[0]) for t in self.header.tensors if t.star]
        scalars = [p.name for p in op.signature.params if not isinstance(p, TensorParam) and not p.const]
        users = {*op.program.tensors, *op.plan.buffers, *scalars, *dims, *op.chunks}
        functions = {f.function for _, f in files} | {f.module for _, f in files} | set(function_names(op))
        # What a caller writes keeps its name: tensors and scalars of the op first, then the keywords of the functions.
        inputs = {t.name for t in self.header.tensors if t.role != "out"}
        public = inputs | set(scalars) | {b for _, b in op.plan.upstream}
        free = frozenset(KEYWORDS) - public
        self.names = Names(users, RESERVED | frozenset(_HELPERS) | functions | {"torch"} | free)
        self.sizes = Sizes(self.header, self.known, dims, self.names)
        self.rows = {c: self.names.fresh(f"{self.names[c]}_rows") for c in op.chunks}
        self.leading = {d: self.names.fresh(f"{d}_shape") for d in dict.fromkeys(stars)}
        self.keywords = {n: n if n in free else self.names.fresh(n) for n in KEYWORDS}
        self.device, self.count = self.names.fresh("device"), self.names.fresh("n")
        self.scalars = scalars
        self.curved = _curved(op.plan)
        self.helpers: set[str] = set()
        self.origins = _origins(op)
        self.kept = ""  # the last copy of what was saved

    def before(self, steps: Sequence[plan.Step]) -> list[str]:
        """What stands before the first step: the group of collectives, the rows of chunks."""
        return [*self.rank_lines(steps), *self.chunk_lines(steps)]

    def rank_lines(self, steps: Sequence[plan.Step]) -> list[str]:
        name = self.keywords["group"]
        return [f"{name} = _ranks({name})"] if any(isinstance(s, plan.AllReduce) for s in flat_steps(steps)) else []

    def chunk_lines(self, steps: Sequence[plan.Step]) -> list[str]:
        """How many rows a chunk of each loop has."""
        out: list[str] = []
        for loop in steps:
            if not isinstance(loop, plan.Loop):
                continue
            if any(isinstance(s, plan.AllReduce) for s in loop.body):
                group, chunk = self.keywords["group"], self.keywords["chunk"]
                out.append(f"if {group} is not None and {chunk} is None:")
                out.append(f'    raise ValueError("{chunk} must be given, so that all ranks make the same chunks")')
            self.helpers.add("_chunk_rows")
            each = _bytes(self.plan, loop)
            if self.curved:
                whole = each.substitute({loop.chunk: Poly.sym(self.count)})
                taken = f"lambda {self.count}: {self.poly(whole)}"
            else:
                taken = self.poly(each.substitute({loop.chunk: Poly.const(1)}))
            extent = self.sizes.text(Poly.sym(loop.dim))
            budget = f"{self.keywords['workspace_mb']}, {self.keywords['chunk']}"
            sums = (s for s in loop.body if isinstance(s, plan.Matmul | plan.Add) and s.accumulate)
            adds = any(s.out.buffer in self.plan.sums for s in sums)
            most = f", most={sizing.ROUNDINGS}" if adds and self.op.capped else ""
            out.append(f"{self.rows[loop.chunk]} = _chunk_rows({extent}, {taken}, {budget}{most})")
        return out

    def poly(self, p: Poly) -> str:
        """`p`, which may mention the extent of a chunk."""
        chunks: Mapping[str, Poly] = {c: Poly.sym(name) for c, name in self.rows.items()}
        return self.sizes.text(p.substitute(dict(chunks)))

    # -- steps ---------------------------------------------------------------------------------------------------
    def body(self, steps: Sequence[plan.Step]) -> Body:
        body = Body()
        said: Said = [None]
        for s in steps:
            self._step(s, body, said)
        body.flush()
        return body

    def _step(self, s: plan.Step, body: Body, said: Said) -> None:
        span = self.origins.get(id(s))
        text = "" if span is None else cited(span)
        if text and text != said[0]:
            body.add(f"# {text}")
            said[0] = text
        match s:
            case plan.Alloc():
                shape = tuple_text(self.poly(p) for p in s.buffer.shape)
                dtype = TORCH[s.buffer.dtype]
                body.add(f"{self.names[s.buffer.name]} = torch.empty({shape}, dtype={dtype}, device={self.device})")
            case plan.Free():
                body.frees.append(self.names[s.buffer])
            case plan.Own():
                name = self.names[s.buffer]
                copy = f"{name} = {name}.clone()"
                if s.shared:
                    body.add(copy)
                else:
                    header = [] if body.lines[-1:] == [self.kept] else [f"if {self.keywords['keep_saved']}:"]
                    self.kept = f"    {copy}"
                    body.add(*header, self.kept)
            case plan.Zero():
                body.add(f"{self._view(s.out)}.zero_()")
            case plan.Convert():
                body.add(self._copy(s.out, s.source))
            case plan.Matmul():
                self._first(body, s.first, s.accumulate, lambda add: self._matmul(s, add))
            case plan.Add():
                add = f"{self._view(s.out)}.add_({self._view(s.source)})"
                self._first(body, s.first, s.accumulate, lambda a: add if a else self._copy(s.out, s.source))
            case plan.Launch():
                body.add(*self._launch(s))
            case plan.AllReduce():
                self.helpers.add("_all_reduce")
                body.add(f'_all_reduce({self._view(s.out)}, "{s.kind}", {self.keywords["group"]})')
            case plan.Loop():
                self._loop(s, body, said)

    def _loop(self, s: plan.Loop, body: Body, said: Said) -> None:
        start, rows, extent = self.names[s.chunk], self.rows[s.chunk], self.sizes.text(Poly.sym(s.dim))
        body.add(f"for {start} in range(0, {extent}, {rows}):")
        body.depth += 1
        body.add(f"{self.count} = min({rows}, {extent} - {start})")
        for inner in s.body:
            self._step(inner, body, said)
        body.flush()
        body.depth -= 1
        if s.empty:
            body.add(f"if {extent} == 0:")
            body.depth += 1
            for inner in s.empty:
                self._step(inner, body, said)
            body.depth -= 1
        said[0] = None

    def _first(self, body: Body, first: str | None, accumulate: bool, text: Callable[[bool], str]) -> None:
        """A statement that adds, or stores where nothing is there to be added to."""
        if accumulate and first:
            body.add(f"if {self.names[first]} == 0:", f"    {text(False)}", "else:", f"    {text(True)}")
        else:
            body.add(text(accumulate))

    def _view(self, v: plan.View) -> str:
        _, shape = self.op.buffer(v.buffer)
        slices: list[str] = [":"] * len(shape)
        for axis, chunk in v.chunks:
            slices[axis] = f"{self.names[chunk]} : {self.names[chunk]} + {self.count}"
        for axis, p in enumerate(shape):
            for chunk in p.symbols & self.op.chunks.keys():
                slices[axis] = f":{self.poly(p.substitute({chunk: Poly.sym(self.count)}))}"
        while slices and slices[-1] == ":":
            slices.pop()
        text = self.names[v.buffer] + (f"[{', '.join(slices)}]" if slices else "")
        return f"{text}.t()" if v.transposed else text

    def _dtype(self, v: plan.View) -> DType:
        return self.op.buffer(v.buffer)[0]

    def _copy(self, out: plan.View, source: plan.View) -> str:
        if self._dtype(source) == F64 and self._dtype(out).bits < 32:
            self.helpers.add("_store")
            return f"_store({self._view(out)}, {self._view(source)})"
        return f"{self._view(out)}.copy_({self._view(source)})"

    def _matmul(self, s: plan.Matmul, accumulate: bool) -> str:
        out, left, right = (self._view(v) for v in (s.out, s.left, s.right))
        plus = None if s.plus is None else self._view(s.plus)
        if self._dtype(s.out) == self._dtype(s.left):
            if accumulate:
                return f"{out}.addmm_({left}, {right})"
            return f"torch.mm({left}, {right}, out={out})" if plus is None else (
                f"torch.addmm({plus}, {left}, {right}, out={out})"
            )  # fmt: skip
        self.helpers.add("_product")
        if self._dtype(s.left) == F64 and self._dtype(s.out).bits < 32:
            self.helpers.add("_store")
        more = (f", plus={plus}" if plus is not None else "") + (", accumulate=True" if accumulate else "")
        return f"_product({out}, {left}, {right}{more})"

    def _launch(self, s: plan.Launch) -> list[str]:
        called, file = self.files[id(s)]
        given = dict(s.arguments)
        arguments = [self._view(called.views[t.name]) for t in called.target.kernel.tensors]
        for p in called.target.kernel.scalars:
            value = self.op.scalar(given.get(p.name))
            if value is not None:
                text = self.names[value] if isinstance(value, str) else literal(self.typed(value, p.dtype.name))
                arguments.append(f"{file.host.names[p.name]}={text}")
        return listed(f"{file.function}(", arguments, ")")

    @staticmethod
    def typed(value: int | float | bool, dtype: str) -> int | float | bool:
        return float(value) if DTYPES.get(dtype, F32).kind == "float" else value


def listed(begin: str, items: Sequence[str], end: str) -> list[str]:
    """`begin` items `end` on one line, or on one each where that would be long."""
    comma = "," if len(items) == 1 and begin == "(" else ""
    line = f"{begin}{', '.join(items)}{comma}{end}"
    if len(line) <= 100:
        return [line]
    return [begin, *(f"    {item}," for item in items), end]


def _bytes(p: plan.Plan, loop: plan.Loop) -> Poly:
    """What a chunk takes of the buffers that grow with it."""
    total = Poly.const(0)
    for b in sizing.grown(p, loop):
        own = Poly.const(b.dtype.itemsize)
        for d in b.shape:
            own = own * d
        total = total + own
    return total


def _curved(p: plan.Plan) -> bool:
    """Whether the memory of some chunk does not grow in proportion to its rows."""
    several = ((_bytes(p, loop), loop.chunk) for loop in sizing.loops(p))
    return any(b.coefficient(c) is None or b.substitute({c: Poly.const(0)}) != Poly.const(0) for b, c in several)


def flat_steps(steps: Sequence[plan.Step]) -> Iterator[plan.Step]:
    for s in steps:
        yield s
        if isinstance(s, plan.Loop):
            yield from flat_steps(s.body)


def words_of(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", text)


# ---- lines of the source -------------------------------------------------------------------------------------------


def _origins(op: OpTarget) -> dict[int, Span]:
    """The statement that each step of the plan comes from, by the step's id. Both are in the same order."""
    found: dict[int, Span] = {}
    _match(op.plan.forward, op.program.forward, found)
    _match(op.plan.backward, op.program.backward, found)
    return found


def _match(steps: Sequence[plan.Step], statements: Sequence[ir.Stmt], found: dict[int, Span]) -> None:
    at = 0
    for s in steps:
        k = next((k for k in range(at, len(statements)) if _comes_from(s, statements[k])), None)
        if k is None:
            continue
        found[id(s)] = statements[k].span
        statement = statements[k]
        if isinstance(s, plan.Loop) and isinstance(statement, ir.Loop):
            _match(s.body, statement.body, found)
        at = k if isinstance(s, plan.Convert | plan.AllReduce) else k + 1


def _comes_from(s: plan.Step, statement: ir.Stmt) -> bool:
    match s, statement:
        case plan.Loop(), ir.Loop():
            return s.chunk == statement.chunk
        case plan.Launch(), ir.Launch():
            results = [r.tensor for r in statement.results]
            return s.kernel == statement.kernel and [r.buffer for r in s.results] == results
        case (plan.Matmul(), ir.Product()) | (plan.Add(), ir.Sum()):
            return s.out.buffer.rstrip("_") in (statement.target.tensor, f"{statement.target.tensor}_sum")
        case (plan.Convert() | plan.AllReduce(), ir.Convert() | ir.AllReduce()):
            # A collective may change its source in place.
            return s.out.buffer in (statement.target.tensor, statement.source.tensor)
        case _:
            return False
