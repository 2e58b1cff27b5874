"""Fill the generated parts of the pages: `python docs/render.py`, or with `--check` only say whether they are current.

A part stands between `<!-- generated: COMMAND -->` and `<!-- end -->`; it is the output of COMMAND in a code block. Of
`kgen bench --read RESULT` it is the output as it stands, and a sentence as long as there is no such result.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: (kgen [^\n]*) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = ("README.md", "docs/gpu-bars.md")
NO_RUN = "No run on a GPU is recorded yet."
LANGUAGES = {"cuda": "cuda", "triton": "python", "source": ""}


def render(text: str) -> str:
    """`text` with every generated part made anew."""

    def part(match: re.Match[str]) -> str:
        command = match[2].split()
        plain = command[1] == "bench"
        if plain and not (ROOT / command[command.index("--read") + 1]).exists():
            return f"{match[1]}{NO_RUN}\n{match[3]}"
        result = subprocess.run(
            [sys.executable, "-m", "kgen.cli", *command[1:]], cwd=ROOT, check=True, capture_output=True, text=True
        )
        if plain:
            return f"{match[1]}{result.stdout.strip()}\n{match[3]}"
        language = LANGUAGES.get(command[command.index("--stage") + 1], "")
        return f"{match[1]}```{language}\n{result.stdout.strip()}\n```\n{match[3]}"

    return PART.sub(part, text)


def main() -> int:
    """0 where the pages are current (or were made so), 1 where `--check` finds that one is not."""
    stale = False
    for page in PAGES:
        path = ROOT / page
        old = path.read_text("utf-8")
        new = render(old)
        if old != new:
            stale = True
            if "--check" not in sys.argv[1:]:
                path.write_text(new, "utf-8")
    return int(stale and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
