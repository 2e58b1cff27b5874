"""The one Jinja environment of all emitters, and how templates see a list of lines.

Templates hold skeletons and statements; expressions, indexing, masks, layout and names are made in Python and
arrive as text. An undefined name in a template is an error, never an empty string.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from kgen.codegen import erf


def indent_lines(lines: Iterable[str], depth: int = 1) -> str:
    """The lines indented by `depth` steps of four spaces and joined; empty lines stay empty."""
    pad = "    " * depth
    return "\n".join(pad + line if line else "" for line in lines)


@cache
def environment() -> Environment:
    """The environment over `kgen.templates`; names are like `cuda/kernel.cu.j2`. No autoescaping: this is not HTML."""
    env = Environment(
        loader=PackageLoader("kgen.templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters["indent_lines"] = indent_lines
    env.globals["erf"] = erf
    return env


def render(template: str, **values: object) -> str:
    """The text of `template` with `values`. Raises jinja2.UndefinedError for a name that is missing."""
    return environment().get_template(template).render(**values)
