"""The doubly stochastic mixing matrix, as the specification writes it (section 1.1)."""

from __future__ import annotations

from torch import Tensor


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """softmax over rows, + eps, a column normalisation, then iters-1 times (rows, columns)."""
    c = logits.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c
