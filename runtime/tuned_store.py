"""Where results of `kgen tune` are kept: one JSON file a device, the user's and the one that comes with kgen.

The user's file is changed under a lock and replaced as a whole, so that any number of processes may tune at once. A
file that cannot be read is told in a warning and counts as empty; the next one who writes keeps it as `.bad`.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from kgen.codegen.knobs import Knobs
from kgen.codegen.schedule import ScheduleError
from kgen.dsl import ir
from kgen.dsl.errors import KgenError
from kgen.dsl.knobs import WARP
from kgen.runtime.cache import write_atomically
from kgen.runtime.installation import driver_version
from kgen.runtime.tuned_paths import file_name, shipped_path, switched_off, user_folder, user_path

__all__ = [
    "Result",
    "Subject",
    "add",
    "devices",
    "driver_of",
    "file_name",
    "knob_data",
    "load",
    "shipped_path",
    "switched_off",
    "text_of",
    "to_knobs",
    "user_folder",
    "user_path",
]

FORMAT = 1
# Raised where the emitters change so much that what was the fastest schedule need not be so any more: older results do
# not count then.
GENERATOR = 1


@dataclass(frozen=True)
class Subject:
    """What was measured: the kernel's fingerprint, the backend, the sizes that are compiled in (in order of the
    kernel's dimensions), and what is assumed of memory (`kgen.runtime.tuned.assumed`)."""

    kernel: str
    backend: str
    sizes: tuple[int, ...]
    assumed: str


@dataclass(frozen=True)
class Result:
    """What came out of one search.

    knobs: those of the fastest schedule as `Knobs.data` has them, but chunks by position among the tile indices; empty
    where the default stays. us, default_us: medians in microseconds of it and of the default. spread_us: what they vary
    by. tried: how many schedules were timed; complete: whether time sufficed for all that there are to try. name,
    dtypes and dims are for people, and dims (all of them) say how large the calls were.
    """

    subject: Subject
    name: str
    dtypes: Mapping[str, str]
    dims: Mapping[str, int]
    knobs: Mapping[str, Any]
    us: float
    default_us: float
    spread_us: float = 0.0
    tried: int = 0
    driver: str = ""
    skipped: Mapping[str, int] = field(default_factory=dict)
    complete: bool = True

    @property
    def words(self) -> str:
        """The knobs by the names of `schedule` statements; chunk[0] is of the first tile index."""
        out: list[str] = []
        for name, value in self.knobs.items():
            if name == "chunks":
                out += [f"chunk[{tile}]={n}" for tile, n in value.items()]
            elif name == "threads" and self.subject.backend == "triton":
                out.append(f"warps={value // WARP}")
            else:
                out.append(f"{name}={value}")
        return ", ".join(out)

    @property
    def points(self) -> int:
        """How large the calls were that were measured."""
        return prod(self.dims.values())

    @property
    def key(self) -> tuple[Any, ...]:
        """What a newer result replaces an older one of."""
        return self.subject, tuple(self.dims.values()), self.driver

    def data(self) -> dict[str, Any]:
        """Plain data, for `Result.read`."""
        s = self.subject
        return {
            "kernel": self.name, "fingerprint": s.kernel, "backend": s.backend, "dtypes": dict(self.dtypes),
            "dims": dict(self.dims), "sizes": list(s.sizes), "assumed": s.assumed, "driver": self.driver,
            "knobs": dict(self.knobs), "us": round(self.us, 3), "default_us": round(self.default_us, 3),
            "spread_us": round(self.spread_us, 3), "tried": self.tried, "skipped": dict(self.skipped),
            "complete": self.complete,
        }  # fmt: skip

    @staticmethod
    def read(d: Mapping[str, Any]) -> Result:
        """What `data` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        at = Subject(str(d["fingerprint"]), str(d["backend"]), tuple(map(int, d["sizes"])), str(d["assumed"]))
        return Result(
            at, str(d["kernel"]), dict(d["dtypes"]), dict(d["dims"]), dict(d["knobs"]), float(d["us"]),
            float(d["default_us"]), float(d["spread_us"]), int(d["tried"]), str(d["driver"]), dict(d["skipped"]),
            bool(d["complete"]),
        )  # fmt: skip


def knob_data(knobs: Knobs | None, kernel: ir.Kernel) -> dict[str, Any]:
    """`knobs` of `kernel` as a result holds them: by position, as a name of an index does not count."""
    if knobs is None:
        return {}
    out: dict[str, Any] = knobs.data()
    if knobs.chunks:
        tiles = [a.name for a in kernel.tiles]
        out["chunks"] = {str(tiles.index(axis)): n for axis, n in knobs.chunks}
    return out


def to_knobs(result: Result, kernel: ir.Kernel) -> Knobs | None:
    """The knobs of `result` for `kernel`, which it is a result of; None for the default schedule."""
    if not result.knobs:
        return None
    data = dict(result.knobs)
    try:
        chunks = data.get("chunks", {})
        data["chunks"] = {kernel.tiles[int(at)].name: n for at, n in chunks.items()}
        return Knobs.read(data, "tuned")
    except (ScheduleError, IndexError, ValueError, AttributeError):
        return None  # written by something else: the default is right too


# ---- files ---------------------------------------------------------------------------------------------------------


def devices() -> list[str]:
    """The devices that there are results of, of kernels or of matrix products, the user's or those that come with kgen,
    by the names of their files."""
    folders = [shipped_path("device").parent]
    with contextlib.suppress(RuntimeError):
        folders.append(user_folder())
    return sorted({p.stem for folder in folders for kind in ("*.json", "products/*.json") for p in folder.glob(kind)})


def load(path: Path | None, data: bytes | None = None) -> list[Result]:
    """The results in the file at `path`, or in `data`, which was read there; none where there is no file. Those of
    another generator are left out."""
    return read(path, _parsed, "schedules", data)


def _parsed(data: bytes) -> list[Result]:
    whole = json.loads(data)
    if whole["format"] != FORMAT:
        raise ValueError(f"its format is {whole['format']}, expected {FORMAT}")
    results = [Result.read(r) for r in whole["results"]]
    return results if whole["generator"] == GENERATOR else []


def text_of(device: str, results: Iterable[Result]) -> str:
    """The text of a file of results, in an order that does not depend on when each was measured: one a line."""
    ordered = sorted(results, key=lambda r: (r.name, r.subject.backend, r.subject.sizes, r.points, r.driver, repr(r)))
    lines = ",\n".join("  " + json.dumps(r.data()) for r in ordered)
    head = {"format": FORMAT, "generator": GENERATOR, "device": device}
    return json.dumps(head)[:-1] + ', "results": [\n' + lines + "\n]}\n"


def add(device: str, results: Sequence[Result], path: Path | None = None) -> Path:
    """Put `results` into the user's file of `device` (or the one at `path`), each in place of an older one of its kind;
    the file. Raises KgenError where it cannot be written."""

    def merged(old: list[Result]) -> str:
        return text_of(device, {r.key: r for r in (*old, *results)}.values())

    return rewrite(user_path(device) if path is None else path, _parsed, merged)


T = TypeVar("T")


def read(path: Path | None, parse: Callable[[bytes], list[T]], of: str, data: bytes | None = None) -> list[T]:
    """What `parse` finds in the file at `path`, or in `data`, which was read there: nothing where there is no file, or,
    with a warning, where it is no file of tuned `of`."""
    if path is None:
        return []
    try:
        return parse(path.read_bytes() if data is None else data)
    except OSError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        warnings.warn(
            f"{path} is no file of tuned {of} ({what[:120]}); it is left out, and kgen tune writes a new one",
            RuntimeWarning,
            stacklevel=3,
        )
        return []


def rewrite(where: Path | None, parse: Callable[[bytes], list[T]], text: Callable[[list[T]], str]) -> Path:
    """Replace the file at `where` by the `text` of what `parse` finds in it, under a lock; the file. One that cannot be
    parsed is kept as `.bad`. Raises KgenError where it cannot be written, or `where` is None."""
    import filelock  # only needed to write

    if where is None:
        raise KgenError("no home folder is known here; KGEN_TUNED=FOLDER names one to keep results in")
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{where}.lock"):
            old: list[T] = []
            if where.exists():
                try:
                    old = parse(where.read_bytes())
                except (ValueError, KeyError, TypeError, AttributeError):
                    with contextlib.suppress(OSError):
                        os.replace(where, f"{where}.bad")
            write_atomically(where, text(old).encode())
    except OSError as error:
        raise KgenError(f"cannot write {where}: {error.strerror or error}") from None
    return where


def driver_of(device: torch.device) -> str:
    """The version of the driver of `device`; nothing for one without."""
    return driver_version() if device.type == "cuda" else ""
