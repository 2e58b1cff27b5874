"""`kgen doctor`: what is there on this machine, what is missing, and what to install for it."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from kgen.cli.app import USAGE, out, print_json


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `status`: ok, missing (something then does not work), or note (fine as it is)."""

    name: str
    status: str
    value: str
    advice: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False) -> None:
    """Say which backends can run and compile here, and what to install for those that cannot.

    The exit code is 0 if at least the reference backend can run, else 2.

    Examples:
        kgen doctor
        kgen doctor --json
    """
    parts = [
        _python(),
        _package("torch"),
        _package("triton"),
        _cupy(),
        _nvrtc(),
        _compiler(),
        _gpu(),
        _cache(),
        _tuned(),
    ]
    backends = _backends()
    works = any(b["available"] for b in backends)
    if as_json:
        import kgen

        print_json(
            {"kgen": kgen.__version__, "parts": [asdict(p) for p in parts], "backends": backends, "works": works}
        )
    else:
        _print(parts, backends)
    if not works:
        raise typer.Exit(USAGE)


def _print(parts: list[Finding], backends: list[dict[str, object]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = out()
    marks = {"ok": "[green]ok[/green]", "missing": "[red]missing[/red]", "note": "[yellow]-[/yellow]"}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for p in parts:
        table.add_row(p.name, marks[p.status], escape(p.value))
    console.print(table)
    console.print()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for b in backends:
        state = marks["ok" if b["available"] else "missing"]
        table.add_row(f"backend {b['name']} on {b['device']}", state, escape(str(b["reason"] or b["executor"])))
    console.print(table)
    advice = [p.advice for p in parts if p.advice]
    if advice:
        console.print()
    for text in advice:
        console.print(f"* {text}", markup=False)


def _python() -> Finding:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("Python", "ok", f"{version} on {platform.system()} {platform.machine()}")
    return Finding(
        "Python", "missing", version, "kgen is made for Python 3.11, 3.12 and 3.13; make an environment with one"
    )


def _package(name: str) -> Finding:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a package that is there but broken raises anything
        return Finding(name, "missing", _first_line(error), f"{name} is missing; install it with: pip install {name}")
    return Finding(name, "ok", str(getattr(module, "__version__", "unknown version")))


def _cupy() -> Finding:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return Finding("cupy", "ok", f"{importlib.metadata.version(name)} ({name})")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding(
        "cupy", "missing", "not installed", f"CuPy is missing; install it with: pip install 'kgen[{_extra()}]'"
    )


def _nvrtc() -> Finding:
    from kgen.runtime import nvrtc

    try:
        known = nvrtc.supported_archs()
        return Finding("nvrtc", "ok", f"{nvrtc.version()}, compiles for sm_{known[0]} to sm_{known[-1]}")
    except nvrtc.CudaCompileError as error:
        return Finding(
            "nvrtc", "missing", str(error).split("; ")[-1], f"NVRTC is missing; pip install 'kgen[{_extra()}]'"
        )


def _extra() -> str:
    try:
        import torch

        return f"cuda{(torch.version.cuda or '13').split('.')[0]}"
    except Exception:  # torch may be missing or broken, which its own line tells
        return "cuda13"


def _compiler() -> Finding:
    from kgen.runtime import host_executor

    reason = host_executor.available()
    if reason is not None:
        return Finding("g++", "missing", "not found", f"{reason}; it runs generated CUDA C on CPU tensors")
    try:
        done = subprocess.run(
            [*host_executor._compiler(), "--version"], capture_output=True, text=True, check=False, timeout=20
        )
        return Finding("g++", "ok", done.stdout.split("\n")[0])
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("g++", "missing", _first_line(error), "the C++ compiler does not run")


def _gpu() -> Finding:
    try:
        import torch
    except Exception:  # told by its own line
        return Finding("GPU", "note", "unknown without torch")
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "torch sees no NVIDIA GPU or driver"
        return Finding("GPU", "note", f"none ({why}); CPU tensors run on every backend, and kgen build needs no GPU")
    from kgen.codegen.machines import too_old

    names: list[str] = []
    older: list[str] = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        names.append(f"{p.name} (sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB)")
        if why := too_old(10 * p.major + p.minor):
            older.append(f"{p.name}: {why}; calls on it run on the reference backend")
    status = "missing" if len(older) == len(names) else "ok"
    value = f"{', '.join(names)}; driver {_driver()}, torch for CUDA {torch.version.cuda}"
    return Finding("GPU", status, value, "; ".join(dict.fromkeys(older)))


def _driver() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False, timeout=20,
        )  # fmt: skip
        return done.stdout.strip().split("\n")[0] or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _cache() -> Finding:
    from kgen.runtime.cache import Cache

    advice = "set KGEN_CACHE_DIR to a folder that can be written to; until then every process compiles anew"
    cache = Cache()
    try:
        root = cache.root
        if not root.exists():
            parent = next(p for p in root.parents if p.exists())
            with tempfile.TemporaryFile(dir=parent):
                return Finding("cache", "ok", f"{root} (made when it is needed)")
        with tempfile.TemporaryFile(dir=root):
            return Finding("cache", "ok", str(root))
    except (OSError, RuntimeError) as error:
        return Finding("cache", "missing", _first_line(error), advice)


def _tuned() -> Finding:
    """Which measured schedules count for the GPU of this machine."""
    try:
        import torch

        from kgen.runtime.installation import device_name
        from kgen.runtime.tuned_store import driver_of, load, shipped_path, switched_off, user_path
    except Exception:  # told by the line of torch
        return Finding("tuned", "note", "unknown without torch")
    if switched_off():
        return Finding("tuned", "note", "switched off by KGEN_TUNED=0")
    if not torch.cuda.is_available():
        return Finding("tuned", "note", "no GPU whose schedules could have been measured")
    device = torch.device("cuda", torch.cuda.current_device())
    name, driver = device_name(device), driver_of(device)
    user, shipped = load(user_path(name)), load(shipped_path(name))
    own = [r for r in user if r.driver == driver]
    text = f"{len(own)} schedules measured here by kgen tune, {len(shipped)} for {name} come with kgen"
    if len(own) < len(user):
        return Finding(
            "tuned", "note", f"{text}; {len(user) - len(own)} are of another driver",
            f"schedules that were measured with another driver do not count with {driver}; run kgen tune again",
        )  # fmt: skip
    return Finding("tuned", "ok" if own or shipped else "note", text)


def _backends() -> list[dict[str, object]]:
    """Every backend on the CPU, and on the GPU where there is one."""
    try:
        import torch

        from kgen.runtime.registry import backends
    except Exception as error:  # without torch nothing runs
        return [
            {
                "name": n,
                "device": "cpu",
                "executor": "",
                "available": False,
                "reason": f"torch is missing ({_first_line(error)})",
            }
            for n in ("cuda", "triton", "reference")
        ]
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [status._asdict() for device in devices for status in backends(device)]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
