"""cuBLASLt on the CPU, as far as kgen calls it: descriptions as the real one takes them, products by torch in f32."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch

TYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}
_NUMBERS = ("id", "tile", "split", "reduction", "swizzle", "custom", "stages", "inner", "cluster")


class FakeLt:
    """Functions by their names. `tiles` are the algorithms on offer, of which those in `split` split sums and those in
    `refused` fail when they are run; `calls` are the tiles that ran."""

    def __init__(self, tiles: tuple[int, ...] = (20, 29), split: tuple[int, ...] = (), refused: tuple[int, ...] = ()):
        self.tiles, self.split, self.refused = tiles, split, refused
        self.calls: list[int] = []
        self.status = 15  # CUBLAS_STATUS_NOT_SUPPORTED
        self._things: dict[int, Any] = {}
        self._names = itertools.count(1)
        for name in [n for n in dir(self) if n.startswith("_do_")]:
            setattr(self, name.removeprefix("_do_"), _function(getattr(self, name)))

    def _new(self, place: Any, thing: Any) -> int:
        place._obj.value = next(self._names)
        self._things[place._obj.value] = thing
        return 0

    @property
    def alive(self) -> int:
        """How much there is besides the handle that nobody has destroyed."""
        return sum(thing != "handle" for thing in self._things.values())

    def _do_cublasLtGetVersion(self) -> int:
        return 130100

    def _do_cublasLtCreate(self, place: Any) -> int:
        return self._new(place, "handle")

    def _do_cublasLtMatrixLayoutCreate(self, place: Any, dtype: int, rows: int, columns: int, leading: int) -> int:
        return self._new(place, (TYPES[dtype], rows, columns, leading))

    def _do_cublasLtMatmulDescCreate(self, place: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._new(place, {3: 0, 4: 0})

    def _do_cublasLtMatmulDescSetAttribute(self, desc: Any, what: int, value: Any, size: Any) -> int:
        assert size.value == 4
        self._things[desc.value][what] = value._obj.value
        return 0

    def _do_cublasLtMatmulPreferenceCreate(self, place: Any) -> int:
        return self._new(place, {})

    def _do_cublasLtMatmulPreferenceSetAttribute(self, preference: Any, what: int, value: Any, size: Any) -> int:
        self._things[preference.value][what] = value._obj.value
        return 0

    def _destroyed(self, thing: Any) -> int:
        del self._things[thing.value]
        return 0

    _do_cublasLtMatmulPreferenceDestroy = _do_cublasLtMatmulDescDestroy = _do_cublasLtMatrixLayoutDestroy = _destroyed

    def _do_cublasLtMatmulAlgoGetHeuristic(
        self, handle: Any, desc: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, most: int, found: Any, count: Any
    ) -> int:
        for i, tile in enumerate(self.tiles[:most]):
            found[i].algorithm[0], found[i].workspace, found[i].state = tile, 4, 0
        count._obj.value = min(len(self.tiles), most)
        return 0

    def _do_cublasLtMatmulAlgoConfigGetAttribute(
        self, algorithm: Any, what: int, value: Any, size: Any, written: Any
    ) -> int:
        tile = algorithm._obj[0]
        name = _NUMBERS[what]
        if size.value != (2 if name in ("inner", "cluster") else 4):
            return 7  # CUBLAS_STATUS_INVALID_VALUE
        value._obj.value = {"tile": tile, "id": 66, "split": 4 if tile in self.split else 1}.get(name, 0)
        return 0

    def _do_cublasLtMatmul(
        self, handle: Any, desc: Any, alpha: int, a: int, a_layout: Any, b: int, b_layout: Any, beta: int, c: int,
        c_layout: Any, d: int, d_layout: Any, algorithm: int, workspace: int, size: int, stream: int,
    ) -> int:  # fmt: skip
        tile = ctypes.c_uint64.from_address(algorithm).value
        if tile in self.refused:
            return self.status
        assert (size == 0 or workspace) and min(a, b, d) > 1 << 16
        self.calls.append(tile)
        transposed = self._things[desc.value]
        left, right = self._matrix(a, a_layout, transposed[3]), self._matrix(b, b_layout, transposed[4])
        out, before = self._matrix(d, d_layout, 0), self._matrix(c, c_layout, 0).float()
        scale = ctypes.c_float.from_address(beta).value
        made = ctypes.c_float.from_address(alpha).value * (left.float() @ right.float())
        out.copy_(made if scale == 0 else made + scale * before)
        return 0

    def _matrix(self, address: int, layout: Any, transposed: int) -> torch.Tensor:
        """Column-major, as the library counts."""
        dtype, rows, columns, leading = self._things[layout.value]
        size = (columns - 1) * leading + rows
        memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
        flat = torch.frombuffer(memory, dtype=dtype, count=size)
        whole = flat.as_strided((rows, columns), (1, leading))
        return whole.t() if transposed else whole


def _function(method: Any) -> Any:
    """A function of its own, as attributes such as `argtypes` are set on it."""

    def call(*args: Any) -> int:
        return method(*args)

    return call
