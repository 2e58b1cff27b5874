"""Programs that leave where every store would put back what is there: which can, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import cuda_kit
import pytest
import torch
import triton_kit
from cuda_kit import call

from kgen.codegen.idle import idle
from kgen.codegen.normalize import normalize
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Leave
from kgen.dsl import ir

FLAT = """
kernel k(g: inout T[*M, N], s: f32[]):
    parallel m in M, n in N
    g[m, n] = where(s[] == 1.0, g[m, n], g[m, n] * s[])
"""
NEGATED = """
kernel k(g: inout T[*M, N], s: f32[]):
    parallel m in M, n in N
    if_not = s[] != 1.0
    g[m, n] = where(if_not, g[m, n] * s[], g[m, n])
"""
ROWS = """
kernel k(g: inout T[*M, N], s: f32[]):
    parallel m in M
    tile n in N
    top = max(g[m, n], n)
    g[m, n] = where(s[] == 1.0, g[m, n], g[m, n] * s[] + 0.0 * top)
"""
LEFT = {"flat": FLAT, "negated": NEGATED, "rows": ROWS}
STAY = {
    "a row's own factor": """
kernel k(g: inout T[*M, N], s: f32[*M]):
    parallel m in M, n in N
    g[m, n] = where(s[m] == 1.0, g[m, n], g[m, n] * s[m])
""",
    "another element": """
kernel k(g: inout T[*M, N], s: f32[]):
    parallel m in M
    tile n in N
    g[m, n] = where(s[] == 1.0, g[m, N - 1 - n], g[m, n] * s[])
""",
    "another tensor": """
kernel k(g: T[*M, N], s: f32[]) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = where(s[] == 1.0, g[m, n], g[m, n] * s[])
""",
    "another store": """
kernel k(g: inout T[*M, N], s: f32[]) -> (y: T[*M, N]):
    parallel m in M, n in N
    g[m, n] = where(s[] == 1.0, g[m, n], g[m, n] * s[])
    y[m, n] = s[]
""",
}


def given(factor: float, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    g = torch.randn(3, 40, generator=torch.Generator().manual_seed(5)).to(dtype)
    g[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    return {"g": g, "s": torch.tensor(factor)}


@pytest.mark.parametrize("kit", [cuda_kit, triton_kit])
@pytest.mark.parametrize("factor", [1.0, 0.5, float("nan"), 0.0])
@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_values(text: str, factor: float, kit: Any) -> None:
    c = call(text, "k", **given(factor))
    if text is ROWS:
        c.tensors["g"][0, :3] = 1.0  # 0 times an infinite maximum is NaN
    got = kit.run(c)["g"]
    expected = c.tensors["g"] if factor == 1.0 else (c.tensors["g"].float() * factor).to(torch.bfloat16)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    if factor == 1.0:
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_nothing_is_loaded_before(text: str, backend: str) -> None:
    where, _ = cuda_kit.prepare(call(text, "k", **given(1.0)))
    steps = schedule_kernel(where.kernel, where.variant, backend).steps
    at = next(i for i, step in enumerate(steps) if isinstance(step, Leave))
    loads = [e.tensor for step in steps[:at] for s in step.body for e in ir.walk(s.value) if isinstance(e, ir.Load)]
    assert loads == ["s"]
    source = (cuda_kit.compiled if backend == "cuda" else triton_kit.emitted)(call(text, "k", **given(1.0))).source
    body = source[source.rindex("k(") :]
    assert "return" in body and body.index("return") < body.index("g_mn")


@pytest.mark.parametrize("text", STAY.values(), ids=STAY)
def test_others_stay(text: str) -> None:
    s = torch.ones(3) if "f32[*M]" in text else torch.tensor(1.0)
    where, _ = cuda_kit.prepare(call(text, "k", g=torch.randn(3, 40), s=s))
    assert idle(normalize(where.kernel, where.variant)) is None
