"""Writes docs/errors.md from the tables of error codes: `python docs/make_errors.py`. A test checks it."""

from __future__ import annotations

from pathlib import Path

from kgen.codegen.derive import DERIVE_CODES
from kgen.dsl.check import check_module
from kgen.dsl.check.codes import CHECKER_CODES
from kgen.dsl.check.products import PRODUCT_CODES
from kgen.dsl.check.unused import WARNING_CODES
from kgen.dsl.codes import IMPORT_CODES, PARSER_CODES, Code
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.host.codes import HOST_CODES
from kgen.dsl.parser import parse_text
from kgen.dsl.proofs.codes import PROOF_CODES

PAGE = Path(__file__).with_name("errors.md")

_HEAD = """# Errors

Every mistake in a `.kdsl` file has a code. For each code this page has the smallest file that earns it and the same
file corrected. Codes with W are warnings: `kgen check` prints them, and nothing is refused for them. It prints all
mistakes of all files at once:

```
{example}
```

This page is made by `docs/make_errors.py` from the tables that the tests run."""

_SECTIONS = (
    ("Spelling and grammar", PARSER_CODES),
    ("Imports", IMPORT_CODES),
    ("Names, types and index sets", CHECKER_CODES),
    ("Bounds, races and in-place updates", PROOF_CODES),
    ("Derivation", DERIVE_CODES),
    ("Host programs", HOST_CODES),
    ("Warnings", (*WARNING_CODES, *PRODUCT_CODES)),
)
_WIDTH = 120


def page() -> str:
    """The whole page."""
    parts = [_HEAD.format(example=_example())]
    for title, codes in _SECTIONS:
        parts.append(f"## {title}")
        parts += [_entry(code) for code in sorted(codes, key=lambda c: c.code)]
    return "\n\n".join(parts) + "\n"


def _example() -> str:
    """What the terminal shows for one mistake."""
    diagnostics = Diagnostics()
    wrong = next(c.wrong for c in CHECKER_CODES if c.code == "K0203")
    check_module(parse_text(wrong, "norm.kdsl"), diagnostics)
    return diagnostics.items[0].render()


def _entry(code: Code) -> str:
    return f"### {code.code}: {code.title}\n\nWrong:\n\n{_block(code.wrong)}\n\nRight:\n\n{_block(code.right)}"


def _block(text: str) -> str:
    return "\n".join(["```", *map(_cut, text.rstrip("\n").split("\n")), "```"])


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 4].rstrip()} ..."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
