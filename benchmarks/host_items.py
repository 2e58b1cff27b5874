"""What `host_time.py` calls: each op on small tensors, with what torch and Liger have for it, and bare launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kgen import ops
from kgen.ops.functional import _loaded
from kgen.runtime.backends import driver
from kgen.runtime.backends.launch import ScalarValue, bf16_bits
from kgen.runtime.plan import ReadyCall

EPS = 1e-6
Call = Callable[[], Any]


@dataclass(frozen=True)
class Ready:
    """A call whose arguments are checked: its plan, as a caller has it who has the arguments."""

    call: ReadyCall
    tensors: list[torch.Tensor]
    scalars: list[ScalarValue]
    plan: Call


@dataclass(frozen=True)
class Item:
    """One op on its arguments.

    `kernel` is its file and name, `values` the arguments in order of the kernel's signature. `ours`, `eager` and
    `liger` take the tensors of `inputs`, which may require grad; `ours` also the backend. The latter two return None
    where there is nothing to compare with.
    """

    name: str
    kernel: tuple[str, str]
    values: tuple[Any, ...]
    inputs: tuple[torch.Tensor, ...]
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    liger: Callable[[], Callable[..., Any] | None] = lambda: None

    def plan(self, backend: str) -> Call:
        """The launch plan of this call: all that is left is to allocate outputs, write their addresses and launch."""
        return self._ready(backend).plan

    def launch(self, backend: str) -> Call:
        """The launch alone, on outputs that are there: addresses and scalars go into the memory of the arguments, and
        the driver is called. What takes more than one launch, or none of the driver's, is called as the plan does."""
        r = self._ready(backend)
        outputs = r.plan()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        tensors = [*r.tensors, *outputs]
        addresses = [t.data_ptr() for t in tensors]
        one = r.call.launch
        if not isinstance(one, driver.DeviceLaunch):
            assert one is not None  # of what has a plan

            def launched() -> tuple[torch.Tensor, ...]:
                one(tensors, r.scalars, addresses)
                return outputs

            return launched
        numbers = [
            bf16_bits(float(r.scalars[k])) if bf16 else r.scalars[k]
            for k, bf16 in zip(one.scalars, one.is_bf16, strict=True)
        ]
        told = (*(addresses[k] for k in one.tensors), *numbers)
        free, pack, start, function, index = one.free, one.pack, one.start, one.function, one.index
        stream_at, current_stream = driver.STREAM, driver.current_stream

        def driven() -> tuple[torch.Tensor, ...]:
            frame = free.pop()  # that of the plan's call
            memory, config, pointers = frame
            pack(memory, stream_at, current_stream(index), *told)
            if code := start(config, function, pointers, None):
                one.failed(frame, code)
            free.append(frame)
            return outputs

        return driven

    def _ready(self, backend: str) -> Ready:
        kernel = _loaded(*self.kernel)
        ready = kernel.prepare(*self.values, backend=backend)
        tensors = [t for i in kernel.tensor_at if (t := self.values[i]) is not None]
        scalars = [convert(self.values[i]) for i, convert, _, _ in ready.scalars]
        if ready.plan is None:
            raise ValueError(f"{self.name}: no plan of its own")
        return Ready(ready, tensors, scalars, partial(ready.plan, *tensors, *scalars, *(t.data_ptr() for t in tensors)))

    def needing_grad(self) -> tuple[torch.Tensor, ...]:
        """The inputs, those of a floating dtype as leaves that require grad."""
        return tuple(t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in self.inputs)


def items(device: torch.device, rows: int, width: int) -> list[Item]:
    """The ops of the table, in bf16."""
    g = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16)

    x, y, w = randn(rows, width), randn(rows, width), randn(width)
    labels = torch.randint(width, (rows,), generator=g, device=device)
    q, k, cos, sin = randn(1, rows, 4, 64), randn(1, rows, 2, 64), randn(rows, 64), randn(rows, 64)

    def liger_rms_norm() -> Callable[..., Any]:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]  # optional

        return lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)

    def liger_swiglu() -> Callable[..., Any]:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]  # optional

        return LigerSiLUMulFunction.apply

    def liger_add_rms_norm() -> Callable[..., Any]:
        from liger_kernel.ops.fused_add_rms_norm import (  # pyright: ignore[reportMissingImports]  # optional
            LigerFusedAddRMSNormFunction,
        )

        return lambda x, y, w: LigerFusedAddRMSNormFunction.apply(x, y, w, EPS, 0.0, "llama", False)

    def liger_function(name: str) -> Callable[..., Any]:
        from liger_kernel.transformers import functional  # pyright: ignore[reportMissingImports]  # optional

        return getattr(functional, name)

    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos[:, None] + turned * sin[:, None]

    def add_rms_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x + y
        return F.rms_norm(h, w.shape, w, EPS), h

    def liger_rope() -> Callable[..., Any]:
        from liger_kernel.ops.rope import LigerRopeFunction  # pyright: ignore[reportMissingImports]  # optional

        return lambda q, k, cos, sin: LigerRopeFunction.apply(
            q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None]
        )

    return [
        Item(
            "rms_norm", ("rms_norm", "rms_norm"), (x, w, EPS, 0.0, False), (x, w),
            lambda x, w, backend: ops.rms_norm(x, w, EPS, backend=backend),
            lambda x, w: F.rms_norm(x, w.shape, w, EPS), liger_rms_norm,
        ),
        Item(
            "swiglu", ("swiglu", "swiglu"), (x, y), (x, y),
            lambda x, y, backend: ops.swiglu(x, y, backend=backend), lambda x, y: F.silu(x) * y, liger_swiglu,
        ),
        Item(
            "add_rms_norm", ("add_rms_norm", "add_rms_norm"), (x, y, w, EPS, 0.0, False), (x, y, w),
            lambda x, y, w, backend: ops.add_rms_norm(x, y, w, EPS, backend=backend), add_rms_norm,
            liger_add_rms_norm,
        ),
        Item(
            "cross_entropy", ("cross_entropy", "cross_entropy"),
            (x, labels, None, -100, 0.0, 0.0, 1.0, False, False), (x, labels),
            lambda x, t, backend: ops.cross_entropy(x, t, reduction="none", backend=backend),
            lambda x, t: F.cross_entropy(x, t, reduction="none"), lambda: liger_function("liger_cross_entropy"),
        ),
        Item(
            "rope", ("rope", "rope"), (q, k, cos, sin, None, False), (q, k, cos, sin),
            lambda q, k, cos, sin, backend: ops.rope(q, k, cos, sin, backend=backend),
            lambda q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin)), liger_rope,
        ),
        Item(
            "softmax", ("softmax", "softmax"), (x,), (x,),
            lambda x, backend: ops.softmax(x, backend=backend), lambda x: F.softmax(x, -1),
            lambda: liger_function("liger_softmax"),
        ),
    ]  # fmt: skip


# ---- bare launches -----------------------------------------------------------------------------------------------


def empty(x: torch.Tensor) -> Call:
    """An output like `x`: the least that any op does besides its launch."""
    return lambda: torch.empty_like(x)


def yardstick(device: torch.device) -> Call:
    """torch's own rms_norm of 64 x 256 elements in bf16: by how long it takes, phases of the host's clock are told
    apart."""
    x, w = (torch.ones(n, device=device, dtype=torch.bfloat16) for n in ((64, 256), 256))
    return partial(F.rms_norm, x, w.shape, w, EPS)


def bare_triton(x: torch.Tensor) -> Call:
    """A copy of `x` to memory that is there, by a kernel in Triton, launched as its users do."""
    import host_kernels  # Triton's, which need not be installed

    y, n = torch.empty_like(x), x.numel()
    launch: Any = host_kernels.copy
    return lambda: launch[(-(-n // 1024),)](y, x, n, BLOCK=1024)


def bare_cupy(x: torch.Tensor) -> Call:
    """The same by a RawKernel of CuPy on torch's current stream, given addresses."""
    import cupy  # which need not be installed

    source = """extern "C" __global__ void copy(unsigned short* y, const unsigned short* x, int n) {
        int i = blockIdx.x * 256 + threadIdx.x;
        if (i < n) y[i] = x[i];
    }"""
    kernel: Any = cupy.RawKernel(source, "copy")
    y, n = torch.empty_like(x), x.numel()
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(x.device).cuda_stream)
    small = cupy.int32(n)

    def call() -> None:
        with stream:
            kernel((-(-n // 256),), (256,), (y.data_ptr(), x.data_ptr(), small))

    return call
