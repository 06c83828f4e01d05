"""``dsv4::sinkhorn``: the mixing matrix of the residual streams (specification, section 1.1).

The CPU kernel keeps the matrices token-last, [n*n,N], so that every step is a vector operation over tokens, and works
through blocks of tokens that stay in cache.  The backward runs the normalisations again instead of storing 2*iters matrices
per token between forward and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import no_autocast

_ROWS, _COLUMNS = 0, 1  # what a normalisation makes sum to 1
_BLOCK = 1024  # tokens


def _steps(iters: int) -> list[int]:
    return [_COLUMNS, *(_ROWS, _COLUMNS) * (iters - 1)]


def _sums(like: Tensor) -> tuple[Tensor, Tensor]:
    """The [n*n,n*n] matrices that put in the place of an element of C the sum of its row, of its column.

    A product with one of them is a sum, the eps and the broadcast in one call: the calls are what a step costs here.
    """
    n = like.shape[-1]
    same, any_ = torch.eye(n, dtype=like.dtype, device=like.device), like.new_ones(n, n)
    return torch.kron(same, any_), torch.kron(any_, same)


def _start(logits: Tensor) -> Tensor:
    """softmax over rows of logits [N,n,n], token-last [n,n,N]."""
    return logits.permute(1, 2, 0).contiguous().softmax(1)


def normalised(logits: Tensor, iters: int, eps: float) -> Tensor:
    """The operator in plain torch, without the dispatcher around it."""
    n = logits.shape[-1]
    rows = logits.reshape(-1, n, n)
    out = torch.empty(rows.shape, dtype=logits.dtype, device=logits.device)
    sums = _sums(logits)
    with no_autocast(logits):
        for t in range(0, len(rows), _BLOCK):
            c = _start(rows[t : t + _BLOCK]).flatten(0, 1) + eps
            added = torch.full_like(c, eps)
            for axis in _steps(iters):
                c.div_(torch.addmm(added, sums[axis], c))
            out[t : t + _BLOCK] = c.view(n, n, -1).permute(2, 0, 1)
    return out.view(logits.shape)


def normalised_backward(grad: Tensor, logits: Tensor, iters: int, eps: float) -> Tensor:
    """The gradient in plain torch.

    For ``g = C dC``, the gradient of log C, a step ``C' = C / (s + eps)`` is ``g = g' - C' sum(g')``: no division, and no
    sum has to be kept.
    """
    n = logits.shape[-1]
    rows, grads = logits.reshape(-1, n, n), grad.reshape(-1, n, n)
    out = torch.empty(rows.shape, dtype=logits.dtype, device=logits.device)
    sums = _sums(logits)
    with no_autocast(logits):
        for t in range(0, len(rows), _BLOCK):
            softmax = _start(rows[t : t + _BLOCK]).flatten(0, 1)
            matrices = [softmax + eps]
            added = torch.full_like(softmax, eps)
            for axis in _steps(iters):
                matrices.append(matrices[-1] / torch.addmm(added, sums[axis], matrices[-1]))
            g = grads[t : t + _BLOCK].permute(1, 2, 0).contiguous().view_as(softmax) * matrices[-1]
            for axis, c in zip(reversed(_steps(iters)), reversed(matrices[1:]), strict=True):
                g.addcmul_(c, torch.mm(sums[axis], g), value=-1)
            g.div_(matrices[0]).mul_(softmax)
            g.addcmul_(softmax, torch.mm(sums[_ROWS], g), value=-1)
            out[t : t + _BLOCK] = g.view(n, n, -1).permute(2, 0, 1)
    return out.view(logits.shape)


@torch.library.custom_op("dsv4::sinkhorn", mutates_args=())
def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Alternate row and column normalisations of ``softmax(logits) + eps``.

    ``C = softmax_k(M) + eps; C /= colsum + eps;`` then iters-1 times ``C /= rowsum + eps; C /= colsum + eps``.
    logits [...,n,n] fp32 or fp64; returns the same shape and dtype.  The last step is over columns: they sum to 1.
    """
    return normalised(logits, iters, eps)


@sinkhorn.register_fake
def _(logits, iters, eps):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("dsv4::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(grad: Tensor, logits: Tensor, iters: int, eps: float) -> Tensor:
    """For ``C' = C / (s + eps)``: ``dC = (dC' - sum(dC' C')) / (s + eps)``, from the last step to the first."""
    return normalised_backward(grad, logits, iters, eps)


@sinkhorn_backward.register_fake
def _(grad, logits, iters, eps):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    logits, ctx.iters, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
    return sinkhorn_backward(grad, ctx.saved_tensors[0], ctx.iters, ctx.eps), None, None


sinkhorn.register_autograd(_backward, setup_context=_save)
