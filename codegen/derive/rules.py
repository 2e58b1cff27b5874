"""The derivative of each op: given z = f(a, b, ...) and the gradient g of z, what does each operand receive?

Where a derivative does not exist, torch's choice is taken: `abs` has 0 at 0, `maximum` and `minimum` give half to each
of two equal operands, and a reduction by `max` or `min` gives equal shares to all elements that attain it. Steps
(`floor`, `sign`, comparisons) have derivative 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kgen.codegen.derive.graph import Graph, Node
from kgen.dsl.dtypes import BOOL, I32

Rule = Callable[[Graph, Node, Node], tuple[Node | None, ...]]

# Ops that are constant wherever they are continuous.
STEPS = frozenset(("sign", "floor", "ceil", "round", "trunc"))


def _larger(g: Graph, z: Node, dz: Node, fn: str) -> tuple[Node, Node]:
    """Of `maximum` and `minimum`: `fn` says when an operand loses."""
    a, b = z.args
    zero = g.const(0.0, z.dtype)
    half = g.where(g.compare("eq", a, b), g.scale(0.5, dz), dz)
    return g.where(g.compare(fn, a, b), zero, half), g.where(g.compare(fn, b, a), zero, half)


def _div(g: Graph, z: Node, dz: Node) -> tuple[Node, Node]:
    da = g.freeze(g.div(dz, z.args[1]))
    return da, g.neg(g.mul(da, z))


def _pow(g: Graph, z: Node, dz: Node) -> tuple[Node | None, Node | None]:
    a, b = z.args
    zero = g.const(0.0, z.dtype)
    # a**0 is 1 for every a, and 0 * 0**-1 would be NaN.
    if b.value is not None:
        if b.value == 0:
            return None, None
        below = a if b.value == 2 else g.const(1.0, z.dtype) if b.value == 1 else g.op("pow", a, g.sub(b, _one(g, z)))
        da = g.mul(dz, g.mul(b, below))
    else:
        slope = g.mul(b, g.op("pow", a, g.sub(b, _one(g, z))))
        da = g.mul(dz, g.where(g.compare("eq", b, zero), zero, slope))
    # 0**b stays 0 for b > 0, where log(0) is -inf.
    return da, g.mul(dz, g.where(g.compare("eq", z, zero), zero, g.mul(z, g.op("log", a))))


def _one(g: Graph, z: Node) -> Node:
    return g.const(1.0, z.dtype)


def _where(g: Graph, z: Node, dz: Node) -> tuple[Node | None, ...]:
    c, zero = z.args[0], g.const(0.0, z.dtype)
    return None, g.where(c, dz, zero), g.where(c, zero, dz)


OPS: dict[str, Rule] = {
    "add": lambda g, z, dz: (dz, dz),
    "sub": lambda g, z, dz: (dz, g.neg(dz)),
    "mul": lambda g, z, dz: (g.mul(dz, z.args[1]), g.mul(dz, z.args[0])),
    "div": _div,
    "neg": lambda g, z, dz: (g.neg(dz),),
    "where": _where,
    "maximum": lambda g, z, dz: _larger(g, z, dz, "lt"),
    "minimum": lambda g, z, dz: _larger(g, z, dz, "gt"),
    "abs": lambda g, z, dz: (g.mul(dz, g.op("sign", z.args[0])),),
    "exp": lambda g, z, dz: (g.mul(dz, z),),
    "exp2": lambda g, z, dz: (g.scale(math.log(2), g.mul(dz, z)),),
    "expm1": lambda g, z, dz: (g.mul(dz, g.op("exp", z.args[0])),),
    "log": lambda g, z, dz: (g.div(dz, z.args[0]),),
    "log2": lambda g, z, dz: (g.div(g.scale(1 / math.log(2), dz), z.args[0]),),
    "log1p": lambda g, z, dz: (g.div(dz, g.add(_one(g, z), z.args[0])),),
    "sqrt": lambda g, z, dz: (g.div(g.scale(0.5, dz), z),),
    "rsqrt": lambda g, z, dz: (g.scale(-0.5, g.mul(dz, g.mul(z, g.mul(z, z)))),),
    "sigmoid": lambda g, z, dz: (g.mul(dz, g.mul(z, g.sub(_one(g, z), z))),),
    "tanh": lambda g, z, dz: (g.mul(dz, g.sub(_one(g, z), g.mul(z, z))),),
    "erf": lambda g, z, dz: (
        g.scale(2 / math.sqrt(math.pi), g.mul(dz, g.op("exp", g.neg(g.mul(z.args[0], z.args[0]))))),
    ),
    "sin": lambda g, z, dz: (g.mul(dz, g.op("cos", z.args[0])),),
    "cos": lambda g, z, dz: (g.neg(g.mul(dz, g.op("sin", z.args[0]))),),
    "pow": _pow,
}


def _sum(g: Graph, z: Node, dz: Node) -> tuple[Node]:
    return (dz,)


def _extreme(g: Graph, z: Node, dz: Node) -> tuple[Node]:
    """Equal shares for the elements that attain the maximum or minimum, as torch.amax does it."""
    hit = g.compare("eq", z.args[0], z)
    one, zero = g.const(1.0, z.dtype), g.const(0.0, z.dtype)
    count = g.reduce("sum", g.where(hit, one, zero), z.reduction[1])
    return (g.where(hit, g.div(dz, count), zero),)


def _prod(g: Graph, z: Node, dz: Node) -> tuple[Node]:
    """The product of the other elements: not `z / a`, which is 0 / 0 at a zero."""
    a, over = z.args[0], z.reduction[1]
    one, zero = g.const(1.0, z.dtype), g.const(0.0, z.dtype)
    is_zero = g.compare("eq", a, zero)
    zeros = g.reduce("sum", g.make("cast", I32, (is_zero,), I32, a.axes, g.span), over)
    rest = g.reduce("prod", g.where(is_zero, one, a), over)
    none = g.compare("eq", zeros, g.const(0, I32))
    only = g.op("and", is_zero, g.compare("eq", zeros, one_int := g.const(1, I32)), dtype=BOOL)
    assert one_int.dtype == I32
    others = g.where(none, g.div(rest, a), g.where(only, rest, zero))
    return (g.mul(dz, others),)


REDUCTIONS: dict[str, Rule] = {"sum": _sum, "max": _extreme, "min": _extreme, "prod": _prod}
