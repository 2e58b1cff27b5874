"""`make demo`: every shipped kernel built for both backends; those that are an op of their own run at the widths of
Llama 3 8B.

On a GPU where there is one, else on the CPU's executors, it prints how far each backend is from float64, how much of
the derived error bound that is, and how far the two backends are from each other. The exit code is 1 if any is
outside its bound.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import kgen
from kgen import ops
from kgen.codegen.interpret import interpret
from kgen.codegen.tolerance import compare, error_bound
from kgen.dsl.check import Specialization
from kgen.dsl.dtypes import BF16
from kgen.runtime.kernel import Kernel
from kgen.runtime.loading import load_packaged

# Llama 3 8B: hidden size, width of the feed-forward layer, query and key heads, features a head, vocabulary.
HIDDEN, FEED, HQ, HK, HEAD, VOCAB = 4096, 14336, 32, 8, 128, 128256
GENERATED = Path("build") / "demo"


@dataclass(frozen=True)
class Case:
    """One kernel with arguments: `make(rows, rand)` gives them, `rand(*shape)` makes a bf16 tensor on the device."""

    name: str
    kernel: Kernel
    width: str
    make: Callable[[int, Callable[..., torch.Tensor]], dict[str, Any]]


def cases() -> Iterator[Case]:
    """The shipped ops that are one kernel, and an example. Arguments are named as in their signatures."""

    def packaged(file: str, name: str) -> Kernel:
        return getattr(load_packaged(f"{file}.kdsl"), name)

    example = Path(__file__).resolve().parent.parent / "examples" / "vec_add.kdsl"
    if example.exists():  # not part of an installed package
        yield Case(
            "vec_add", kgen.load(example).vec_add, f"{HIDDEN}", lambda m, r: {"a": r(m, HIDDEN), "b": r(m, HIDDEN)}
        )
    for name in ("swiglu", "geglu", "geglu_tanh"):
        yield Case(name, packaged("swiglu", name), f"{FEED}", lambda m, r: {"gate": r(m, FEED), "up": r(m, FEED)})
    for style, rounded, offset in (("gemma", False, 1.0), ("llama", True, 0.0)):
        yield Case(
            f"rms_norm {style}",
            packaged("rms_norm", "rms_norm"),
            f"{HIDDEN}",
            lambda m, r, rounded=rounded, offset=offset: {
                "x": r(m, HIDDEN), "w": r(HIDDEN), "offset": offset, "round_first": rounded,
            },
        )  # fmt: skip
    yield Case(
        "add_rms_norm",
        packaged("add_rms_norm", "add_rms_norm"),
        f"{HIDDEN}",
        lambda m, r: {"x": r(m, HIDDEN), "residual": r(m, HIDDEN), "w": r(HIDDEN)},
    )
    yield Case(
        "layer_norm",
        packaged("layer_norm", "layer_norm"),
        f"{HIDDEN}",
        lambda m, r: {"x": r(m, HIDDEN), "w": r(HIDDEN), "b": r(HIDDEN)},
    )
    for name in ("softmax", "log_softmax"):
        yield Case(name, packaged("softmax", name), f"{VOCAB}", lambda m, r: {"x": r(max(2, m // 8), VOCAB)})
    yield Case("cross_entropy", packaged("cross_entropy", "cross_entropy"), f"{VOCAB}", _labelled)
    for style, interleaved in (("halves", False), ("pairs", True)):
        yield Case(
            f"rope {style}",
            packaged("rope", "rope"),
            f"{HQ}+{HK}x{HEAD}",
            lambda m, r, interleaved=interleaved: {
                "q": r(1, m, HQ, HEAD), "k": r(1, m, HK, HEAD), "cos": r(m, HEAD), "sin": r(m, HEAD),
                "interleaved": interleaved,
            },
        )  # fmt: skip


def _labelled(rows: int, rand: Callable[..., torch.Tensor]) -> dict[str, Any]:
    logits = rand(max(2, rows // 8), VOCAB)
    return {"logits": logits, "target": logits.argmax(-1)}


def run(case: Case, device: torch.device, rows: int, table: Table) -> bool:
    """Run one case on every backend that can; add its rows to the table. False if one is outside its bound."""
    generator = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    arguments = case.make(rows, rand)
    signature = case.kernel.signature
    given = {name: v for name, v in arguments.items() if isinstance(v, torch.Tensor)}
    consts = {s.name: arguments.get(s.name, s.default) for s in signature.scalars if s.const}
    spec = Specialization(dict.fromkeys(signature.dtype_vars, BF16), consts, frozenset(given))  # type: ignore[arg-type]  # each const has a default
    scalars = {s.name: arguments[s.name] for s in signature.scalars if not s.const and s.name in arguments}
    ir = case.kernel.specialize(spec)
    exact = interpret(ir, given, scalars, precision="f64")
    bound = error_bound(ir, given, scalars)
    names = [t.name for t in signature.outputs]

    every = True
    results: dict[str, dict[str, torch.Tensor]] = {}
    for status in kgen.backends(device):
        if status.name == "reference":
            continue
        if not status.available:
            table.add_row(
                case.name, case.width, status.name, status.executor, "-", "-", "-", f"skipped: {status.reason}"
            )
            continue
        out = case.kernel(**arguments, backend=status.name)
        results[status.name] = dict(zip(names, out if isinstance(out, tuple) else (out,), strict=True))
        other = results.get("cuda") if status.name == "triton" else None
        found = [compare(results[status.name][n], exact[n], bound[n]) for n in names]
        error, allowed = max(_largest(results[status.name][n], exact[n], bound[n]) for n in names)
        between = (
            max((results["triton"][n].double() - other[n].double()).abs().max().item() for n in names) if other else 0
        )
        good = all(c.ok for c in found)
        table.add_row(
            case.name, case.width, status.name, status.executor, f"{error:.1e}",
            f"{allowed:.1e}", f"{between:.1e}" if other else "", "[green]ok[/]" if good else "[bold red]WRONG[/]",
        )  # fmt: skip
        every &= good
    return every


def _largest(actual: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> tuple[float, float]:
    """The largest distance of `actual` from float64, and what is allowed at that element."""
    error = (actual.double() - exact).abs().flatten()
    at = error.argmax()
    return error[at].item(), bound.flatten()[at].item()


def main() -> int:
    """Build, run and print. Returns the exit code."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has no width of its own
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # On a CPU every thread of the kernel is simulated, and Triton is interpreted: a few rows show the same.
    rows = 1024 if device.type == "cuda" else 2
    console.print(f"kgen {kgen.__version__} on {_describe(device)}: bf16, {rows} rows")

    from kgen.cli.build import build  # late: it brings in the whole compiler

    console.print(f"Building the shipped ops for both backends (sm_90) into {GENERATED}/")
    build([str(Path(ops.__file__).parent)], arch="sm_90", folder=GENERATED)

    table = Table(title="shipped ops against float64", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("op", "width", "backend", "executor"):
        table.add_column(column, no_wrap=True)
    for column in ("max error", "allowed", "c - t"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    good = True
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("running")
        for case in cases():
            bar.update(task, description=f"running {case.name}")
            good &= run(case, device, rows, table)
    console.print(table)
    console.print(
        "max error: largest distance from float64. allowed: the rounding error that the numerics contract leaves\n"
        "there (docs/language.md, section 4). Results in bf16 reach it: it is half a unit in their last place.\n"
        "c - t: largest distance between the CUDA and the Triton result."
    )
    console.print(f"Generated sources: {GENERATED}/<file>/<op>.cu and <op>_triton.py")
    if not good:
        console.print("[bold red]A result lies outside its bound.[/]")
    return 0 if good else 1


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the CPU (no GPU found: CUDA C runs on the host executor, Triton in its interpreter)"


if __name__ == "__main__":
    sys.exit(main())
