"""The documentation says what is true: generated parts are current, examples check, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kgen
from kgen.dsl.check import check_module
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.parser import parse_text

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def test_generated_parts_of_the_readme_are_current() -> None:
    result = subprocess.run([sys.executable, str(ROOT / "docs" / "render.py"), "--check"], cwd=ROOT, check=False)
    assert result.returncode == 0, "run: python docs/render.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_whole_kernels_in_the_docs_check() -> None:
    blocks = [
        b
        for page in PAGES
        if page.name != "errors.md"
        for b in re.findall(r"```\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ]
    kernels = [b for b in blocks if re.search(r"^kernel ", b, re.MULTILINE) and "error[" not in b]
    assert kernels
    for text in kernels:
        diagnostics = Diagnostics()
        check_module(parse_text(text, "docs.kdsl"), diagnostics)
        assert not diagnostics.items, "\n".join(d.render() for d in diagnostics.items)


def _rows_of_mistakes() -> list[list[str]]:
    """The cells of the rows of docs/known-failures.md."""
    text = (ROOT / "docs" / "known-failures.md").read_text("utf-8")
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return [r for r in rows if r[0] != "kind of mistake"]


def test_tests_named_in_the_docs_exist() -> None:
    named = [n for row in _rows_of_mistakes() for n in re.findall(r"`(test_\w+\.py)::(\w+)`", row[2])]
    assert len(named) > 50
    for file, function in named:
        text = (ROOT / "tests" / file).read_text("utf-8")
        assert re.search(rf"^def {function}\(", text, re.MULTILINE), f"{file}::{function}"


def test_every_mistake_made_on_purpose_is_in_the_docs() -> None:
    """In the row that names the tests which see it."""
    from test_call_mutations import BREAKS as OF_CALLS  # imports many tests, and so do the next
    from test_linear_mutations import BREAKS as OF_LINEAR
    from test_mutations import BREAKS

    made = [(name, [s.test for s in b.seen]) for of in (BREAKS, OF_CALLS) for name, b in of.items()]
    made += [(name, [b.test]) for name, b in OF_LINEAR.items()]
    rows = _rows_of_mistakes()
    listed = [name for row in rows for name in re.findall(r"\*([^*]+)\*", row[3])]
    assert set(listed) == {name for name, _ in made} and len(dict(made)) == len(made)
    for name, seen in made:
        tests = " ".join(row[2] for row in rows if f"*{name}*" in row[3])
        for test in seen:
            assert f"`{test.__module__}.py::{test.__name__}`" in tests, (name, test.__name__)


def test_the_op_of_the_language_page_is_an_example_that_is_right() -> None:
    path = ROOT / "examples" / "mlp.kdsl"
    text = path.read_text("utf-8")
    assert text[text.index("kernel ") :] in (ROOT / "docs" / "language.md").read_text("utf-8")
    g = torch.Generator().manual_seed(1)
    x, up, down, d_y = (torch.randn(shape, generator=g) for shape in ((10, 6), (16, 6), (6, 16), (10, 6)))
    given = [t.clone().requires_grad_() for t in (x, up, down)]
    exact = [t.double().requires_grad_() for t in (x, up, down)]
    y = kgen.load(path).mlp(*given, chunk=4)
    formula = torch.nn.functional.silu(exact[0] @ exact[1].T) @ exact[2].T
    found = [y, *torch.autograd.grad(y, given, d_y)]
    for a, b in zip(found, [formula, *torch.autograd.grad(formula, exact, d_y.double())], strict=True):
        # At most 16 + 6 + 10 terms of a few units, each rounded some ten times on its way.
        assert (a - b).detach().abs().max() <= 320 * 2**-24 * max(1.0, float(b.detach().abs().max()))
