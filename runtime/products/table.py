"""Which algorithm was measured to be the fastest for a matrix product like this? One file a device, as of schedules."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kgen.runtime import tuned_paths, tuned_store
from kgen.runtime.installation import device_name
from kgen.runtime.products.cublaslt import Config, Library, Product, Unsupported, library
from kgen.runtime.products.problem import ALIGNMENT, Kind, Problem, distance

FORMAT = 1
_MOST = 4096  # problems that are remembered


@dataclass(frozen=True)
class Measured:
    """What came out of one search: of the product of `kind` and `sizes` (rows, columns, inner), the configuration of
    the fastest algorithm, empty where torch's choice stays. us, default_us: medians in microseconds of it and of torch;
    spread_us: what they vary by. driver, version: the driver's and the library's."""

    kind: Kind
    sizes: tuple[int, int, int]
    config: Config
    us: float
    default_us: float
    spread_us: float
    tried: int
    driver: str
    version: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What a newer result replaces an older one of. Those of several versions of the library lie side by side, as
        each installation of torch brings its own."""
        return self.kind, self.sizes, self.version

    def data(self) -> dict[str, Any]:
        """Plain data, for `read`."""
        return {
            **self.kind.data(), "sizes": list(self.sizes), "algorithm": dict(self.config), "us": round(self.us, 3),
            "default_us": round(self.default_us, 3), "spread_us": round(self.spread_us, 3), "tried": self.tried,
            "driver": self.driver, "cublaslt": self.version,
        }  # fmt: skip

    @staticmethod
    def read(d: Mapping[str, Any]) -> Measured:
        """What `data` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        rows, columns, inner = map(int, d["sizes"])
        config = {str(n): int(v) for n, v in d["algorithm"].items()}
        return Measured(
            Kind.read(d), (rows, columns, inner), config, float(d["us"]), float(d["default_us"]),
            float(d["spread_us"]), int(d["tried"]), str(d["driver"]), int(d["cublaslt"]),
        )  # fmt: skip


# ---- files ---------------------------------------------------------------------------------------------------------


def user_path(device: str) -> Path | None:
    """The file of the user's results on the device of this name; None where no home folder is known."""
    path = tuned_paths.user_path(device)
    return None if path is None else _beside(path)


def shipped_path(device: str) -> Path:
    """The file of the results that come with kgen; it need not exist."""
    return _beside(tuned_paths.shipped_path(device))


def _beside(schedules: Path) -> Path:
    return schedules.parent / "products" / schedules.name


def parse(data: bytes) -> list[Measured]:
    """The results in a file's bytes. Raises KeyError, TypeError or ValueError for what is none."""
    whole = json.loads(data)
    if whole["format"] != FORMAT:
        raise ValueError(f"its format is {whole['format']}, expected {FORMAT}")
    return [Measured.read(r) for r in whole["products"]]


def load(path: Path | None) -> list[Measured]:
    """The results in the file at `path`; none where there is no file, or, with a warning, where it is no such file."""
    return tuned_store.read(path, parse, "matrix products")


def text_of(device: str, results: Iterable[Measured]) -> str:
    """The text of a file of results, in an order that does not depend on when each was measured: one a line."""
    ordered = sorted(results, key=lambda r: (str(r.kind), r.sizes, r.version))
    lines = ",\n".join("  " + json.dumps(r.data()) for r in ordered)
    return json.dumps({"format": FORMAT, "device": device})[:-1] + ', "products": [\n' + lines + "\n]}\n"


def merged(old: Sequence[Measured], new: Iterable[Measured]) -> list[Measured]:
    """`old` with `new`, each in place of an older one of its kind."""
    return list({r.key: r for r in (*old, *new)}.values())


def keep(device: str, results: Sequence[Measured], path: Path | None = None) -> Path:
    """Put `results` into the user's file of `device` (or the one at `path`), each in place of an older one of its kind;
    the file. Raises KgenError where it cannot be written."""
    return tuned_store.rewrite(
        user_path(device) if path is None else path, parse, lambda old: text_of(device, merged(old, results))
    )


# ---- what a call takes ---------------------------------------------------------------------------------------------


class Table:
    """The results that count on one device: the user's before those that come with kgen."""

    def __init__(self, user: Sequence[Measured], shipped: Sequence[Measured]) -> None:
        self._by: dict[Kind, tuple[list[Measured], list[Measured]]] = {}
        for k, results in enumerate((user, shipped)):
            for r in results:
                self._by.setdefault(r.kind, ([], []))[k].append(r)

    def __len__(self) -> int:
        return sum(len(u) + len(s) for u, s in self._by.values())

    def knows(self, kind: Kind) -> bool:
        """Whether there is any result of `kind`."""
        return kind in self._by

    def find(self, p: Problem, version: int) -> Measured | None:
        """The result that counts for `p` with the library of `version`: of the nearest sizes, and where several are as
        near, of this version before others, whose algorithms it need not offer, and the user's first. None where none
        is near."""
        best: tuple[float, bool, int] | None = None
        found: Measured | None = None
        for k, results in enumerate(self._by.get(p.kind, ())):
            for r in results:
                far = distance(r.sizes, p.sizes)
                if far is None:
                    continue
                rank = (far, r.version != version, k)
                if best is None or rank < best:
                    best, found = rank, r
        return found


def of_device(name: str) -> Table:
    """The results that count on the device of this name."""
    return Table(load(user_path(name)), load(shipped_path(name)))


class Chosen:
    """The products of one device that are not left to torch, each made when it is first asked for."""

    def __init__(self, table: Table, found: Callable[[], Library | None]) -> None:
        self._table = table
        self._library = found  # not asked before a product of a kind that is known
        self._products: dict[tuple[Any, ...], Product | None] = {}

    def multiply(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, accumulate: bool) -> bool:
        """`out = left @ right`, or `+=`, if an algorithm is known for it; whether it is. What is computed is what torch
        computes: sums in f32, one rounding."""
        key = (
            accumulate, out.dtype, left.dtype, right.dtype, out.shape, left.shape, right.shape,
            out.stride(), left.stride(), right.stride(),
        )  # fmt: skip
        try:
            product = self._products[key]
        except KeyError:
            if _capturing():
                return False
            product = self._make(out, left, right, accumulate)
            if len(self._products) >= _MOST:
                self._products.clear()
            self._products[key] = product
        if product is None or (out.data_ptr() | left.data_ptr() | right.data_ptr()) % ALIGNMENT:
            return False
        if not (_in_memory(out) and _in_memory(left) and _in_memory(right)):  # torch says so
            return False
        if product(out, left, right):
            return True
        self._products[key] = None
        return False

    def _make(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, accumulate: bool) -> Product | None:
        problem = Problem.of(out, left, right, accumulate)
        if problem is None or not self._table.knows(problem.kind):
            return None
        found = self._library()
        measured = None if found is None else self._table.find(problem, found.version)
        if found is None or measured is None or not measured.config:
            return None
        try:
            for a in found.algorithms(problem):
                if a.config == measured.config:
                    return found.product(problem, a)
        except Unsupported:
            pass
        return None  # another version of the library, which does not offer it


def _in_memory(t: torch.Tensor) -> bool:
    """Whether the storage of `t`, which has elements, was not freed. A view has an address all the same: its offset."""
    return t.untyped_storage().data_ptr() != 0


def _capturing() -> bool:
    """Whether a CUDA graph is captured now. The library is asked nothing then: to make its handle allocates, which ends
    the capture, and some versions refuse to name algorithms."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.cache
def chosen(index: int) -> Chosen | None:
    """The products of the GPU with this index that are not left to torch; None where none are, or KGEN_TUNED=0. Read
    once a process."""
    if tuned_paths.switched_off():
        return None
    table = of_device(device_name(torch.device("cuda", index)))
    return Chosen(table, lambda: library(index)) if len(table) else None


def reload() -> None:
    """Read the results anew when they are next asked for."""
    chosen.cache_clear()
