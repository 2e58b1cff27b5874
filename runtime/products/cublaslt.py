"""cuBLASLt, the library below `torch.mm`, where an algorithm can be named. It is loaded already: torch brings it.

cuBLASLt counts in columns: a row-major matrix is its transpose there, so the factors change places. Of algorithms, only
those count that sum in f32 in one piece: with a sum that is split, partial sums may be rounded to 16 bits.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kgen.runtime.errors import BackendError
from kgen.runtime.products.problem import Problem

# From cublasLt.h and library_types.h: enumerations are part of the interface and keep their values.
_F32_SUMS = 68  # CUBLAS_COMPUTE_32F
_TYPES = {"f32": 0, "f16": 2, "bf16": 14}  # CUDA_R_*
_TRANSA, _TRANSB = 3, 4  # CUBLASLT_MATMUL_DESC_*
_MAX_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
# CUBLASLT_ALGO_CONFIG_*: what an algorithm is, and with how many bytes each is told.
_CONFIG = {"id": (0, 4), "tile": (1, 4), "split": (2, 4), "reduction": (3, 4), "swizzle": (4, 4), "custom": (5, 4),
           "stages": (6, 4), "inner": (7, 2), "cluster": (8, 2)}  # fmt: skip
WORKSPACE = 1 << 20  # bytes; algorithms that take no more do not split sums
MOST = 16  # algorithms to ask for
_SUCCESS = 0
_REFUSED = (7, 8, 15)  # CUBLAS_STATUS_INVALID_VALUE, ARCH_MISMATCH, NOT_SUPPORTED: said before anything is launched

Config = Mapping[str, int]


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]  # fmt: skip


@dataclass(frozen=True)
class Algorithm:
    """One that the library knows for a problem: its configuration, the bytes of workspace that it takes, and the
    library's own form of it."""

    config: Config
    workspace: int
    opaque: Any


class Unsupported(Exception):
    """The library refused; the message has its status."""


class Description:
    """What the library is told of a product and of its three matrices, for as long as this object lasts."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        self._made: list[tuple[str, ctypes.c_void_p]] = []
        weakref.finalize(self, _destroy, functions, self._made).atexit = False

    def made(self, what: str, *args: Any) -> ctypes.c_void_p:
        """A new `what`, such as a MatrixLayout. Raises Unsupported."""
        handle = ctypes.c_void_p()
        name = f"cublasLt{what}Create"
        _check(name, getattr(self._functions, name)(ctypes.byref(handle), *args))
        self._made.append((f"cublasLt{what}Destroy", handle))
        return handle

    @property
    def parts(self) -> tuple[ctypes.c_void_p, ...]:
        """Everything, in the order in which it was made."""
        return tuple(handle for _, handle in self._made)


def _destroy(functions: Any, made: list[tuple[str, ctypes.c_void_p]]) -> None:
    for name, handle in made:
        getattr(functions, name)(handle)


def _check(name: str, code: int) -> None:
    if code != _SUCCESS:
        raise Unsupported(f"{name} returned {code}")


class Library:
    """The functions of cuBLASLt on one device, which is current while it is made. Raises AttributeError where a
    function is missing, Unsupported where there is no handle."""

    def __init__(self, functions: Any) -> None:
        pointer = ctypes.c_void_p
        self._lt = functions
        functions.cublasLtMatmul.argtypes = [pointer] * 14 + [ctypes.c_size_t, pointer]
        functions.cublasLtMatrixLayoutCreate.argtypes = [
            pointer, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64,
        ]  # fmt: skip
        functions.cublasLtMatmulAlgoGetHeuristic.argtypes = [pointer] * 7 + [ctypes.c_int, pointer, pointer]
        self._handle = pointer()
        self._do("cublasLtCreate", ctypes.byref(self._handle))
        self.version = int(functions.cublasLtGetVersion())

    def _do(self, name: str, *args: Any) -> None:
        _check(name, getattr(self._lt, name)(*args))

    def _described(self, p: Problem) -> Description:
        """Of `p`: the product, and the layouts of its first and second factor and of its result, as the library counts.
        Raises Unsupported."""
        described = Description(self._lt)
        product = described.made("MatmulDesc", _F32_SUMS, _TYPES["f32"])
        left_t, right_t = p.kind.transposed
        for what, transposed in ((_TRANSA, right_t), (_TRANSB, left_t)):
            value = ctypes.c_int(int(transposed))
            self._do("cublasLtMatmulDescSetAttribute", product, what, ctypes.byref(value), ctypes.c_size_t(4))
        left, right, out = p.leading
        a = (p.inner, p.columns) if right_t else (p.columns, p.inner)
        b = (p.rows, p.inner) if left_t else (p.inner, p.rows)
        described.made("MatrixLayout", _TYPES[p.kind.dtype], *a, right)
        described.made("MatrixLayout", _TYPES[p.kind.dtype], *b, left)
        described.made("MatrixLayout", _TYPES[p.kind.out], p.columns, p.rows, out)
        return described

    def algorithms(self, p: Problem) -> list[Algorithm]:
        """Those that the library offers for `p` without splitting sums, from what it thinks the fastest on. Raises
        Unsupported."""
        described = self._described(p)
        product, a, b, c = described.parts
        preference, most = described.made("MatmulPreference"), ctypes.c_size_t(WORKSPACE)
        found, count = (_Heuristic * MOST)(), ctypes.c_int()
        self._do(
            "cublasLtMatmulPreferenceSetAttribute",
            preference, _MAX_WORKSPACE, ctypes.byref(most), ctypes.c_size_t(8),
        )  # fmt: skip
        self._do(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle, product, a, b, c, c, preference, MOST, found, ctypes.byref(count),
        )  # fmt: skip
        out = [Algorithm(self._config(h), h.workspace, h.algorithm) for h in found[: count.value] if not h.state]
        return [a for a in out if a.config.get("split", 1) <= 1]

    def _config(self, h: _Heuristic) -> Config:
        out: dict[str, int] = {}
        for name, (number, size) in _CONFIG.items():
            value, written = ctypes.c_uint32(0), ctypes.c_size_t()
            code = self._lt.cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.byref(h.algorithm), number, ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written)
            )
            if code == _SUCCESS:
                out[name] = value.value
        return out

    def product(self, p: Problem, algorithm: Algorithm) -> Product:
        """`p` by `algorithm`, ready to run. Raises Unsupported."""
        return Product(self._lt.cublasLtMatmul, self._handle, self._described(p), p.kind.accumulate, algorithm)


class Product:
    """A product of matrices of one problem by one algorithm: `product(out, left, right)` on the current stream."""

    def __init__(
        self,
        function: Any,
        handle: ctypes.c_void_p,
        described: Description,
        accumulate: bool,
        algorithm: Algorithm,
    ) -> None:
        self._function, self._handle = function, handle
        self._described = described
        self._product, self._a, self._b, self._c = described.parts
        self._workspace = algorithm.workspace
        self._numbers = ctypes.c_float(1.0), ctypes.c_float(1.0 if accumulate else 0.0)
        self._alpha, self._beta = (ctypes.addressof(n) for n in self._numbers)
        self._opaque = algorithm.opaque  # the memory that the address below is of
        self._algorithm = ctypes.addressof(algorithm.opaque)

    def __call__(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether the library took it; where it did not, `out` is as it was. The matrices are those of the problem, on
        the current device, and aligned to `problem.ALIGNMENT` bytes. Raises BackendError for a failure behind which
        nobody knows what `out` is."""
        # A workspace of its own: calls on several streams, or recorded in a graph, do not share one.
        size = self._workspace
        workspace = torch.empty(size, dtype=torch.uint8, device=out.device) if size else None
        result = out.data_ptr()
        code = self._function(
            self._handle, self._product, self._alpha, right.data_ptr(), self._a, left.data_ptr(), self._b, self._beta,
            result, self._c, result, self._c, self._algorithm, None if workspace is None else workspace.data_ptr(),
            size, torch.cuda.current_stream(out.device).cuda_stream,
        )  # fmt: skip
        if code not in (_SUCCESS, *_REFUSED):
            raise BackendError(f"cublasLtMatmul failed with status {code}")
        return code == _SUCCESS


@cache
def library(index: int) -> Library | None:
    """That of the GPU with this index; None where there is none of torch's version. Raises what torch does for a device
    without memory."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        with torch.cuda.device(index):
            torch.empty(1, device="cuda")  # so that there is a context
            return Library(ctypes.CDLL(f"libcublasLt.so.{major}"))
    except (OSError, AttributeError, Unsupported):
        return None
