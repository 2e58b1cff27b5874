"""Fill the generated parts of README.md: `python docs/render.py`, or with `--check` only say whether they are current.

A part stands between `<!-- generated: COMMAND -->` and `<!-- end -->`; it is the output of COMMAND in a code block.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: (kgen [^\n]*) -->\n).*?(<!-- end -->)", re.DOTALL)
LANGUAGES = {"cuda": "cuda", "triton": "python", "source": ""}


def render(text: str) -> str:
    """`text` with every generated part made anew."""

    def part(match: re.Match[str]) -> str:
        command = match[2].split()
        result = subprocess.run(
            [sys.executable, "-m", "kgen.cli", *command[1:]], cwd=ROOT, check=True, capture_output=True, text=True
        )
        language = LANGUAGES.get(command[command.index("--stage") + 1], "")
        return f"{match[1]}```{language}\n{result.stdout.strip()}\n```\n{match[3]}"

    return PART.sub(part, text)


def main() -> int:
    """0 where README.md is current (or was made so), 1 where `--check` finds that it is not."""
    path = ROOT / "README.md"
    old = path.read_text("utf-8")
    new = render(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    path.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
