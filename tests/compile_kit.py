"""A small model of everything in `kgen.nn`, for torch.compile on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from autograd_kit import randn

import kgen

WIDTH, HEADS, CLASSES = 16, 2, 12


class Model(torch.nn.Module):
    """One block of a transformer and its loss."""

    def __init__(self, rows: int = 64) -> None:
        """rows: tokens that the table of positions has; fewer than are passed, and it grows."""
        super().__init__()
        self.first = kgen.nn.RMSNorm(WIDTH, eps=1e-5)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.rope = kgen.nn.RotaryEmbedding(WIDTH // HEADS, max_position=rows)
        self.second = kgen.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.gate = kgen.nn.SwiGLU()
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.last = kgen.nn.RMSNorm(WIDTH, eps=1e-5, casting="gemma")
        self.head = torch.nn.Linear(WIDTH, CLASSES)
        self.loss = kgen.nn.CrossEntropyLoss(label_smoothing=0.1, z_loss=0.01, softcap=5.0)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(randn(*p.shape, seed=30 + i) / WIDTH**0.5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """x: `[batch, tokens, WIDTH]`; labels: `[batch, tokens]`. The loss, a scalar."""
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        q, k = self.rope(q, k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        # The width of a softmax is a constant of its kernel; here it is the number of tokens.
        x = x + (torch.softmax(q @ k.mT / 4.0, -1) @ v).transpose(1, 2).flatten(2)
        x = x + self.down(self.gate(self.up(self.second(x))))
        return self.loss(self.head(self.last(x)), labels)


def batch(rows: int, tokens: int, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """An input that requires grad, and labels of which some are left out."""
    labels = torch.randint(0, CLASSES, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    labels[0, :2] = -100
    return randn(rows, tokens, WIDTH, seed=seed).to(device).requires_grad_(), labels.to(device)


def outcome(f: Callable[..., torch.Tensor], model: Model, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """The loss by `f`, which is `model` or a compiled form of it, and the gradients of the input and all parameters."""
    loss = f(x, labels)
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]
