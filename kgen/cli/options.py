"""The options that say what a kernel is compiled for: sizes, dtypes, constants, optional tensors, architectures."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli.app import UsageError

if TYPE_CHECKING:
    from kgen.dsl import ast
    from kgen.runtime.ahead import Choices

_PANEL = "What it is compiled for"
DimOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dim", metavar="N=4096", rich_help_panel=_PANEL, help="Size of a dimension; else the kernel's example."
    ),
]
DtypeOption = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="[T=]bf16", rich_help_panel=_PANEL, help="Dtype of one or all dtype variables."),
]
ConstOption = Annotated[
    list[str] | None,
    typer.Option("--const", metavar="flag=true", rich_help_panel=_PANEL, help="Value of a const parameter."),
]
WithOption = Annotated[
    list[str] | None,
    typer.Option(
        "--with", metavar="w", rich_help_panel=_PANEL, help="An optional tensor that is present (the default)."
    ),
]
WithoutOption = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="w", rich_help_panel=_PANEL, help="An optional tensor that is absent."),
]

GradientsOption = Annotated[
    str,
    typer.Option(
        "--gradients",
        metavar="x,w",
        rich_help_panel=_PANEL,
        help="Of an op: whose gradients; all, none, or names.",
    ),
]


def wanted_gradients(text: str) -> tuple[str, ...] | None:
    """The parameters that `--gradients` names, None for all that have a gradient. Raises UsageError for none at all."""
    if text == "all":
        return None
    if text == "none":
        return ()
    names = tuple(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    if not names:
        raise UsageError("--gradients: name parameters, as in --gradients x,w, or write all or none")
    return names


def choices(
    dim: list[str] | None,
    dtype: list[str] | None,
    const: list[str] | None,
    present: list[str] | None,
    absent: list[str] | None,
) -> Choices:
    """The options as `Choices`. Raises UsageError for text that is not of the form shown in the help."""
    from kgen.runtime.ahead import Choices

    dims: dict[str, int] = {}
    for name, text in _pairs("--dim", "N=4096", dim):
        try:
            dims[name] = int(text.replace("_", ""))
        except ValueError:
            raise UsageError(f"--dim {name}={text}: a size is a whole number, such as --dim {name}=4096") from None
        if dims[name] < 0:
            raise UsageError(f"--dim {name}={text}: a size cannot be negative")
    everywhere: str | None = None
    dtypes: dict[str, str] = {}
    for text in _items(dtype):
        var, equals, name = text.partition("=")
        before = dtypes.get(var.strip(), name.strip()) if equals else everywhere or text
        if before != (name.strip() if equals else text):
            raise UsageError(
                f"--dtype {before},{name.strip() if equals else text}: one kernel is compiled for one dtype; name "
                f"one, or one for each dtype variable, as in --dtype T=bf16,W=f32"
            )
        if equals:
            dtypes[var.strip()] = name.strip()
        else:
            everywhere = text
    with_, without = frozenset(_items(present)), frozenset(_items(absent))
    if both := with_ & without:
        raise UsageError(f"'{min(both)}' is given to both --with and --without")
    return Choices(dims, everywhere, dtypes, dict(_pairs("--const", "flag=true", const)), with_, without)


def refuse_unknown(chosen: Choices, kernels: Iterable[ast.Kernel]) -> None:
    """Raise UsageError for a name in the options that none of `kernels` has."""
    from kgen.dsl.check import signature_of
    from kgen.dsl.diagnostics import Diagnostics
    from kgen.dsl.dtypes import DTYPES
    from kgen.runtime.ahead import unknown_names

    kernels = list(kernels)
    unknown = unknown_names(chosen, [signature_of(k, Diagnostics()) for k in kernels])
    for option, name, there in unknown:
        what = {"--dim": "dimension", "--dtype": "dtype variable", "--const": "const parameter"}.get(
            option, "optional tensor"
        )
        close = difflib.get_close_matches(name, there, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"there is {', '.join(there)}" if there else "there is none"
        which = kernels[0].name if len(kernels) == 1 else f"none of {len(kernels)} kernels"
        raise UsageError(f"{option} {name}: {which} has {'no' if len(kernels) == 1 else 'a'} {what} '{name}'; {hint}")
    for name in (chosen.dtype, *chosen.dtypes.values()):
        if name is not None and name not in DTYPES:
            raise UsageError(f"--dtype: there is no dtype '{name}'; they are {', '.join(DTYPES)}")


def architectures(text: str) -> list[str]:
    """`sm_90,sm_80` as a list. Raises UsageError for anything that is not so written, and for what is too old."""
    from kgen.codegen.machines import too_old

    out: dict[str, None] = {}
    for item in text.replace(" ", "").split(","):
        written = re.fullmatch(r"sm_(\d{2,3})[af]?", item)
        if written is None:
            raise UsageError(f"--arch: '{item}' is not an architecture; write sm_90, or several as sm_90,sm_80")
        if why := too_old(int(written[1])):
            raise UsageError(f"--arch: {why}")
        out[item] = None
    return list(out)


def _items(given: list[str] | None) -> list[str]:
    """Repeated options and commas alike."""
    return [part.strip() for text in given or () for part in text.split(",") if part.strip()]


def _pairs(option: str, form: str, given: list[str] | None) -> list[tuple[str, str]]:
    out: dict[str, str] = {}
    for text in _items(given):
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"{option} {text}: write it as {option} {form}")
        if out.setdefault(name, value) != value:
            raise UsageError(f"{option} {name}={value}: {name} is {out[name]} already, and it has one value")
    return list(out.items())
