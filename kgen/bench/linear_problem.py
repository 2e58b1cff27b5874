"""A cross entropy of a linear layer: operands, its float64 value with bounds, and what a call of it takes in memory.

The bounds. Inputs are exact. A logit is a sum of H products in f32, rounded to bf16 where it is stored: off by D. The
logarithm of the sum of exponentials is then off by at most log(sum of p exp(D)), and each probability by the factor of
both. A gradient of a logit is rounded once more, and a gradient of x or w is a sum over such gradients, off by what its
terms are off by and by its own roundings: in f32 while it is summed, in bf16 at each chunk of tokens, where it is
stored, and where the backward pass multiplies it. Everything is a bound of each element, from its own operands.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 2**20
BF16 = 2.0**-8
F32 = 2.0**-24
FEW = 1e2  # roundings of f32 in an element besides those of sums
LANES = 8  # terms that a matrix product adds beside each other, at least: one instruction of a GPU takes 16
WARP = 32  # threads that share a row of logits, at least
STEPS = 32  # parts in which the reference takes the tokens; a chunk that is a multiple of one has the sharper bound
BLOCK = 1 << 14  # rows of a gradient that are compared at once

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the loss, its gradient by x, its gradient by w


@dataclass(frozen=True)
class Shape:
    """Sizes: x is `[tokens, hidden]`, w `[vocab, hidden]`."""

    tokens: int
    hidden: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}x{self.vocab}"

    @property
    def row_bytes(self) -> int:
        """Of the bf16 logits of one token."""
        return 2 * self.vocab

    @property
    def gradient_bytes(self) -> int:
        """Of both gradients in bf16: what no call can do without."""
        return 2 * self.hidden * (self.tokens + self.vocab)


@dataclass
class Reference:
    """In float64, with bounds: what is right of the loss and both gradients.

    `terms` are bounds of the gradients before roundings of what is stored; `share` is the part of them, at least, that
    is the sum of the sizes of what a gradient of w adds up; `path` is the sum of the sizes that it passes through, at
    every step.
    """

    loss: torch.Tensor
    loss_bound: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor
    x_terms: torch.Tensor
    w_terms: torch.Tensor
    path: torch.Tensor
    share: float


class Problem:
    """Operands of one shape, normal values so that logits are too, bf16, every label kept."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        g = torch.Generator(device).manual_seed(0)
        self.shape, self.device = shape, device
        self.x = torch.randn(shape.tokens, shape.hidden, generator=g, device=device).bfloat16().requires_grad_()
        w = torch.randn(shape.vocab, shape.hidden, generator=g, device=device) / shape.hidden**0.5
        self.w = w.bfloat16().requires_grad_()
        self.target = torch.randint(0, shape.vocab, (shape.tokens,), generator=g, device=device)
        self._d_logits = torch.empty(shape.tokens, shape.vocab, dtype=torch.bfloat16, device=device)

    @property
    def step(self) -> int:
        """Tokens that the reference takes at once."""
        return -(-self.shape.tokens // STEPS)

    def gemms(self) -> Callable[[], None]:
        """The three matrix products that cannot be done without, in whole and into memory that is there."""
        x, w, d = self.x.detach(), self.w.detach(), self._d_logits
        _ = self.reference  # fills d
        logits, dx, dw = torch.empty_like(d), torch.empty_like(x), torch.empty_like(w)

        def call() -> None:
            torch.mm(x, w.t(), out=logits)
            torch.mm(d, w, out=dx)
            torch.mm(d.t(), x, out=dw)

        return call

    # -- what is right -------------------------------------------------------------------------------------------
    @cached_property
    def reference(self) -> Reference:
        """Some seconds on a GPU whose float64 is fast, and five times w in float64."""
        s = self.shape
        x, w = self.x.detach().double(), self.w.detach().double()
        w_size, w_norm = w.abs(), w.norm(dim=1)
        product = (s.hidden / LANES + FEW) * F32
        own = (s.vocab / WARP + FEW) * F32
        # Parts of a sum may be rounded to bf16 before they are added, each once and as their sum once.
        parts = 2 * BF16 if torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction else 0.0
        by_x, by_w = ((n / LANES + FEW) * F32 + parts for n in (s.vocab, s.tokens))
        dx, x_terms = torch.empty_like(x), torch.empty_like(x)
        dw, w_terms, path = (torch.zeros_like(w) for _ in range(3))
        losses, offs = [], []
        for c in self._steps():
            rows, t = x[c], self.target[c, None]
            z = rows @ w.t()
            d = BF16 * z.abs() + product * (rows.norm(dim=1)[:, None] * w_norm)  # Cauchy and Schwarz
            lse = z.logsumexp(1, keepdim=True)
            p = (z - lse).exp_()
            shift = (p * d.exp()).sum(1, keepdim=True).log_()
            own_loss = own * (1 + lse.abs() + z.gather(1, t).abs())
            losses.append(lse - z.gather(1, t))
            offs.append(d.gather(1, t) + shift + own_loss)
            del z
            off = d.add_(shift).expm1_().add_(own).mul_(p)
            off.scatter_add_(1, t, torch.full_like(off[:, :1], own))
            g = p.scatter_add_(1, t, torch.full_like(p[:, :1], -1.0)).div_(s.tokens)
            self._d_logits[c] = g.bfloat16()
            dx[c] = g @ w
            dw.addmm_(g.t(), rows)
            path += dw.abs()
            g.abs_()
            off.div_(s.tokens).mul_(1 + BF16).add_(g, alpha=BF16)
            x_terms[c] = torch.add(off, g.add_(off), alpha=by_x) @ w_size
            w_terms.addmm_(off.add_(g, alpha=by_w).t(), rows.abs())
        loss = torch.cat(losses).mean()
        bound = torch.cat(offs).mean() + (s.tokens / WARP + FEW) * F32 * torch.cat(losses).abs().mean()
        return Reference(loss, bound, dx, dw, x_terms.float(), w_terms.float(), path.float(), by_w)

    def _steps(self) -> Iterator[slice]:
        return (slice(i, i + self.step) for i in range(0, self.shape.tokens, self.step))

    def judge(self, got: Gradients, chunk: int | None) -> dict[str, float]:
        """How far a result is off: each gradient by its norm, and in units of the bound for chunks of so many tokens.

        Without `chunk` nothing is held against a bound. `worst` is the largest error over its bound, NaN where
        anything is NaN.
        """
        r = self.reference
        loss, dx, dw = got
        off = (loss.detach().double() - r.loss).abs()
        out = {"loss_error": float(off / r.loss.abs())}
        worst = [off / r.loss_bound] if chunk else []
        count = -(-self.shape.tokens // chunk) if chunk else 0
        for name, ref, found in (("dx", r.dx, dx), ("dw", r.dw, dw)):
            squares = torch.zeros(2, dtype=torch.float64, device=self.device)
            for i in range(0, len(ref), BLOCK):
                b = slice(i, i + BLOCK)
                off = found[b].double() - ref[b]
                squares += torch.stack([off.square().sum(), ref[b].square().sum()])
                if chunk:
                    bound = self._x_bound(b) if name == "dx" else self._w_bound(b, chunk, count)
                    worst.append((off.abs_() / bound).max())
            out[f"{name}_error"] = float((squares[0] / squares[1]).sqrt())
        if chunk:
            out["worst"] = float(torch.stack(worst).max())  # the largest of what has a NaN is NaN
        return out

    def _x_bound(self, b: slice) -> torch.Tensor:
        terms = self.reference.x_terms[b].double()
        return terms + 3 * BF16 * (self.reference.dx[b].abs() + terms)

    def _w_bound(self, b: slice, chunk: int, count: int) -> torch.Tensor:
        """With a rounding of every partial sum behind a chunk: at most those that the reference passed through."""
        r = self.reference
        terms = r.w_terms[b].double()
        size = terms / r.share  # no partial sum is larger
        if chunk % self.step == 0:
            partial = r.path[b]
        elif chunk >= self.step:  # each is one of the reference's and part of the step behind it
            partial = r.path[b] + size
        else:
            partial = count * size
        partial = BF16 * (partial + count * terms)
        return terms + partial + 3 * BF16 * (r.dw[b].abs() + terms)

    def spoil(self) -> None:
        """Leave NaN, not an earlier result, in the memory that the next call is given."""
        for t in (self.x, self.w):
            for dtype in (t.dtype, torch.float32):
                torch.full_like(t, float("nan"), dtype=dtype, requires_grad=False)

    # -- memory --------------------------------------------------------------------------------------------------
    def observe(self, call: Callable[[], Any]) -> tuple[int, int]:
        """Call it: the most bytes that were taken at a time, results counted, and the most logits (rows) at a time."""
        watch = Watch(self.shape.vocab, (self.x, self.w, self.target))
        with watch:
            peak = self.peak(call)
        return (peak if self.device.type == "cuda" else watch.peak), watch.rows

    def peak(self, call: Callable[[], Any]) -> int:
        """Call it: the most bytes of the GPU that were taken at a time, results counted; 0 elsewhere."""
        if self.device.type != "cuda":
            call()
            return 0
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


class Watch(TorchDispatchMode):
    """The rows of the largest product that has logits of `vocab` classes, and the bytes of storages that appear."""

    def __init__(self, vocab: int, given: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.vocab, self.rows, self.live, self.peak = vocab, 0, 0, 0
        self._known = weakref.WeakSet(t.untyped_storage() for t in given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and result.shape[1] == self.vocab:
            self.rows = max(self.rows, result.shape[0])
        if func.namespace == "aten":
            for t in tree_leaves(result):
                if isinstance(t, torch.Tensor) and t.device.type == "cpu":
                    self._meet(t.untyped_storage())
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._part, size)

    def _part(self, size: int) -> None:
        self.live -= size
