"""A derived backward as text to paste beside its kernel, where it is the hand-written one and can be edited."""

from __future__ import annotations

from kgen.codegen.derive.pair import Derived
from kgen.codegen.derive.text import number, tensor_text
from kgen.codegen.origins import without_places
from kgen.dsl import ir
from kgen.dsl.check import ScalarParam, Signature
from kgen.dsl.format import format_source
from kgen.dsl.printing import expr_text


def pasted(derived: Derived, kernel: ir.Kernel, signature: Signature) -> str:
    """`derived.backward` as the backward of `kernel`, whose header is `signature`, for calls of its specialisation.

    Its dtypes are concrete. Const parameters that differ from their defaults, and dtype variables that nothing in the
    header settles, stand in brackets; an optional tensor that is there is a parameter even where it is not read.
    """
    header = {t.name for t in derived.backward.tensors} | {s.name for s in derived.backward.scalars}
    gradients = {**derived.cotangents, **derived.gradients}
    shown = {p.name for p in (*signature.params, *signature.outputs) if {p.name, gradients.get(p.name)} & header}
    missing = [t for t in kernel.tensors if t.optional and t.name not in shown]
    settled = {p.dtype for p in (*signature.params, *signature.outputs) if p.name in shown}
    settled |= {p.dtype for p in signature.tensors if any(t.name == p.name for t in missing)}
    limits = [f"{var}: {dtype}" for var, dtype in kernel.dtypes if var not in settled]
    defaults = {p.name: p.default for p in signature.params if isinstance(p, ScalarParam)}
    limits += [f"{n}: {expr_text(number(v))}" for n, v in kernel.consts if repr(v) != repr(defaults[n])]
    old = f"kernel {derived.backward.name}("
    assert derived.backward_text.startswith(old)
    new = f"backward {kernel.name}{'[' + ', '.join(limits) + ']' if limits else ''}("
    new += "".join(f"{tensor_text(t)}, " for t in missing)
    return format_source(new + without_places(derived.backward_text.removeprefix(old)))
