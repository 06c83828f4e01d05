"""``dsv4::sinkhorn``: the mixing matrix of the residual streams (specification, section 1.1).

The kernel keeps the n x n matrices token-last, so that every step is a vector operation over tokens, and the backward runs
the normalisations again instead of storing 2*iters matrices per token between forward and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COLUMNS, _ROWS = 0, 1  # axis of the [n,n,N] matrix that a normalisation sums over


def _start(logits: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """softmax over rows and softmax + eps, token-last [n,n,N]."""
    n = logits.shape[-1]
    c = logits.reshape(-1, n, n).permute(1, 2, 0).contiguous().softmax(_ROWS)
    return c, c + eps


def _finish(c: Tensor, logits: Tensor) -> Tensor:
    """[n,n,N] as a contiguous tensor of logits' shape."""
    return c.permute(2, 0, 1).clone(memory_format=torch.contiguous_format).view(logits.shape)


def _axes(iters: int) -> list[int]:
    return [_COLUMNS, *(_ROWS, _COLUMNS) * (iters - 1)]


@torch.library.custom_op("dsv4::sinkhorn", mutates_args=())
def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Alternate row and column normalisations of ``softmax(logits) + eps``.

    ``C = softmax_k(M) + eps; C /= colsum + eps;`` then iters-1 times ``C /= rowsum + eps; C /= colsum + eps``.
    logits [...,n,n] fp32 or fp64; returns the same shape and dtype.  The last step is over columns: they sum to 1.
    """
    _, c = _start(logits, eps)
    for axis in _axes(iters):
        c.div_(c.sum(axis, keepdim=True).add_(eps))
    return _finish(c, logits)


@sinkhorn.register_fake
def _(logits, iters, eps):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("dsv4::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(grad: Tensor, logits: Tensor, iters: int, eps: float) -> Tensor:
    """For ``C' = C / (s + eps)``: ``dC = (dC' - sum(dC' C')) / (s + eps)``, from the last step to the first."""
    softmax, c = _start(logits, eps)
    steps: list[tuple[int, Tensor, Tensor]] = []
    for axis in _axes(iters):
        total = c.sum(axis, keepdim=True).add_(eps)
        c = c / total
        steps.append((axis, total, c))
    # A copy in every case: one matrix alone is contiguous as it is, and the steps below write into g.
    g = grad.reshape(-1, *softmax.shape[:2]).permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
    for axis, total, c in reversed(steps):
        g = g.sub_((g * c).sum(axis, keepdim=True)).div_(total)
    g = softmax * (g - (g * softmax).sum(_ROWS, keepdim=True))
    return _finish(g, logits)


@sinkhorn_backward.register_fake
def _(grad, logits, iters, eps):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    logits, ctx.iters, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
    return sinkhorn_backward(grad, ctx.saved_tensors[0], ctx.iters, ctx.eps), None, None


sinkhorn.register_autograd(_backward, setup_context=_save)
