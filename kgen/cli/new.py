"""`kgen new`: a file to start from."""

from __future__ import annotations

import keyword
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kgen.cli.app import UsageError, out
from kgen.dsl.diagnostics import DslError
from kgen.dsl.errors import KgenError


class Kind(StrEnum):
    """Starting points."""

    elementwise = "elementwise"
    row = "row"


_ELEMENTWISE = '''"""What {name} computes, and where the formula comes from."""

kernel {name}(x: T[*M, N], scale: f32 = 1.0) -> (y: T[*M, N]):
    example M = 4096, N = 4096  # typical sizes, for kgen build, show and diff
    parallel m in M, n in N  # every element on its own: spread all of them over programs
    y[m, n] = scale * x[m, n]  # computed in f32, rounded once to T
'''

_ROW = '''"""What {name} computes, and where the formula comes from."""

kernel {name}(x: T[*M, N], w: W[N]?, eps: f32 = 1e-6) -> (y: T[*M, N]):
    example M = 16384, N = 4096  # typical sizes, for kgen build, show and diff
    parallel m in M  # rows are spread over programs
    tile n in N  # a program holds its row whole, so it may reduce over n
    c = x[m, n] - mean(x[m, n], n)
    h = c * rsqrt(mean(c * c, n) + eps)
    if w:  # an optional tensor: settled when a variant is compiled
        y[m, n] = h * w[n]
    else:
        y[m, n] = h
'''


def new(
    name: Annotated[str, typer.Argument(help="Name of the kernel; the file is NAME.kdsl.", show_default=False)],
    kind: Annotated[
        Kind, typer.Option("--kind", help="elementwise: no reduction. row: reductions over the last dimension.")
    ] = Kind.elementwise,
) -> None:
    """Write NAME.kdsl, a small commented kernel to start from.

    Examples:
        kgen new scale
        kgen new my_norm --kind row
    """
    from kgen.dsl.parser import parse_text

    path = Path(name if name.endswith(".kdsl") else f"{name}.kdsl")
    kernel = path.stem
    if not kernel.isidentifier() or not kernel.isascii():
        raise UsageError(f"'{kernel}' cannot name a kernel: use letters, digits and _, and begin with a letter")
    if keyword.iskeyword(kernel):
        raise UsageError(f"'{kernel}' could not be written after a dot in Python; take another name")
    text = (_ROW if kind is Kind.row else _ELEMENTWISE).format(name=kernel)
    try:
        parse_text(text, str(path))
    except DslError:
        raise UsageError(f"'{kernel}' is a word of the language; take another name") from None
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already and is left as it is; take another name") from None
    except OSError as error:
        raise KgenError(f"cannot write {path}: {error.strerror or error}") from None
    console = out()
    console.print(f"wrote {path}. Next:", markup=False)
    console.print(f"  kgen check {path}", markup=False)
    console.print(f"  kgen show {path} --stage cuda,triton", markup=False)
    console.print(f"  kgen diff {path}", markup=False)
    console.print(f"and from Python: kgen.load({str(path)!r}).{kernel}(...)", markup=False)
