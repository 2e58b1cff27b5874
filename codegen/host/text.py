"""A plan as text for people to read: `kgen show --stage plan`. Not a format: nothing reads it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kgen.codegen.host import plan
from kgen.dsl.host.ir import ConstArg, ScalarArg


def plan_text(p: plan.Plan) -> str:
    """Both directions, one step a line."""
    out = [f"plan {p.name}", "forward:", *_lines(p.forward, "    ")]
    out.append("    return " + ", ".join(_named(n, b) for n, b in p.outputs))
    if p.gradients:
        saved = ", ".join([*p.saved_inputs, *p.saved]) or "nothing"
        upstream = ", ".join(b for _, b in p.upstream)
        out += [f"    save {saved}", f"backward({upstream}):", *_lines(p.backward, "    ")]
        out.append("    return " + ", ".join(f"d_{n} = {b}" if b != f"d_{n}" else b for n, b in p.gradients))
    return "\n".join(out)


def _named(name: str, buffer: str) -> str:
    return name if name == buffer else f"{name} = {buffer}"


def _lines(steps: Sequence[plan.Step], indent: str) -> Iterator[str]:
    for s in steps:
        if isinstance(s, plan.Loop):
            yield f"{indent}for {s.chunk} in chunks({s.dim}):"
            yield from _lines(s.body, indent + "    ")
            if s.empty:
                yield f"{indent}if {s.dim} == 0:"
                yield from _lines(s.empty, indent + "    ")
        else:
            yield indent + step_text(s)


def step_text(s: plan.Step) -> str:
    """One step, but for a loop, on one line."""
    match s:
        case plan.Alloc():
            return f"alloc {s.buffer.name}: {s.buffer.dtype}[{', '.join(map(str, s.buffer.shape))}]"
        case plan.Free():
            return f"free {s.buffer}"
        case plan.Own():
            return f"copy {s.buffer}" + ("" if s.shared else " if the graph is kept")
        case plan.Zero():
            return f"{view_text(s.out)} = 0"
        case plan.Convert():
            return f"{view_text(s.out)} = round({view_text(s.source)})"
        case plan.Matmul():
            plus = "" if s.plus is None else f" + {view_text(s.plus)}"
            return f"{view_text(s.out)} {_sign(s)} {view_text(s.left)} @ {view_text(s.right)}{plus}{_first(s)}"
        case plan.Add():
            return f"{view_text(s.out)} {_sign(s)} {view_text(s.source)}{_first(s)}"
        case plan.Launch():
            results = f"{', '.join(map(view_text, s.results))} = " if s.results else ""
            return f"{results}{s.kernel}({', '.join(f'{n}={_argument(a)}' for n, a in s.arguments)})"
        case plan.AllReduce():
            return f"all_{s.kind}({view_text(s.out)})"
        case plan.Loop():
            return f"for {s.chunk} in chunks({s.dim}): ..."


def view_text(v: plan.View) -> str:
    """A view as the language writes it."""
    chunks = f"[{', '.join(c for _, c in v.chunks)}]" if v.chunks else ""
    return v.buffer + chunks + (".T" if v.transposed else "")


def _sign(s: plan.Matmul | plan.Add) -> str:
    return "+=" if s.accumulate else "="


def _first(s: plan.Matmul | plan.Add) -> str:
    return f"  # the first {s.first}: =" if s.first else ""


def _argument(a: plan.View | ScalarArg | ConstArg) -> str:
    if isinstance(a, plan.View):
        return view_text(a)
    return a.name if isinstance(a, ScalarArg) else str(a.value).lower() if isinstance(a.value, bool) else repr(a.value)
