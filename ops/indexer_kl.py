"""``dsv4::indexer_kl``: how far the indexer's choice is from its teacher (specification, section 5.1).

The forward forms the loss and its gradient in the same pass over the scores, so that the student's softmax is neither stored
nor formed again; the backward multiplies by the incoming scalar.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator
from dsv4c.ops.visibility import NOWHERE

GUARD = 1e-10  # inside both logarithms
_BLOCK = 65536  # elements of a block of rows that stays in cache


def divergence(target: Tensor, scores: Tensor, real: Tensor, dscores: Tensor) -> Tensor:
    """Loss of some queries, summed; their gradient is written to dscores, whose dtype is what is computed in.

    target, scores and dscores [...,K], real [...]; see :func:`indexer_kl`.
    """
    none = scores == NOWHERE
    dead = none.all(-1, keepdim=True).logical_or_(~real[..., None])
    y = scores.to(dscores.dtype).softmax(-1).masked_fill_(dead, 0.0)
    t = target.to(dscores.dtype).masked_fill(none.logical_or_(dead), 0.0)
    guarded = y + GUARD
    loss = ((t + GUARD).div_(guarded).log_().mul_(t)).sum()
    pulled = t.mul_(y).div_(guarded)
    dscores.copy_(y.mul_(pulled.sum(-1, keepdim=True)).sub_(pulled))
    return loss


def plain(target: Tensor, scores: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The operator in plain torch, without the dispatcher around it."""
    acc = accumulator(target, scores)
    dscores = torch.empty(scores.shape, dtype=acc, device=scores.device)
    n, width = real.numel(), scores.shape[-1]
    all_rows = target.reshape(n, width), scores.reshape(n, width), real.reshape(n), dscores.view(n, width)
    loss = torch.zeros((), dtype=acc, device=scores.device)
    step = max(1, _BLOCK // max(width, 1))
    for first in range(0, n if width else 0, step):
        loss += divergence(*(x[first : first + step] for x in all_rows))
    return loss, dscores


@torch.library.custom_op("dsv4::indexer_kl", mutates_args=())
def indexer_kl(target: Tensor, scores: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The distillation loss, summed over queries, and its gradient.

    ``Y = softmax(I)`` over the entries that there are; ``KL_t = sum_p T (log(T + 1e-10) - log(Y + 1e-10))``;
    ``dKL/dI = Y sum_p r - r`` with ``r = T Y / (Y + 1e-10)``.  The teacher is a constant and gets no gradient.

    Shapes: target [...,K], scores [...,K] with -inf where there is no entry, real [...] bool.  Returns the loss, a scalar,
    and dscores [...,K], both fp32 (fp64 for fp64 inputs).  A query that is not real or has no entry gives 0 to both.
    """
    return plain(target, scores, real)


@indexer_kl.register_fake
def _(target, scores, real):  # type: ignore[no-untyped-def]  # schema above
    acc = accumulator(target, scores)
    return torch.empty((), dtype=acc, device=scores.device), torch.empty(scores.shape, dtype=acc, device=scores.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    ctx.dtype = inputs[1].dtype
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx, grad, _dscores):  # type: ignore[no-untyped-def]  # autograd context
    return None, (grad * ctx.saved_tensors[0]).to(ctx.dtype), None


indexer_kl.register_autograd(_backward, setup_context=_save)
