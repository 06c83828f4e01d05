"""The distillation loss of the indexer, as the specification writes it (section 5.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator
from dsv4c.ops.visibility import NOWHERE


def indexer_kl(target: Tensor, scores: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_t sum_p T (log(T + 1e-10) - log(Y + 1e-10))``, Y the softmax of the scores; and its gradient, as a constant."""
    acc = accumulator(target, scores)
    none = scores == NOWHERE
    empty = none.all(-1, keepdim=True)
    skipped = none | ~real[..., None]
    # A softmax over nothing but -inf is NaN, forward and backward: such a row takes zeros.
    y = scores.to(acc).masked_fill(empty, 0.0).softmax(-1)
    t = target.detach().to(acc).masked_fill(skipped, 0.0)
    loss = (t * (torch.log(t + 1e-10) - torch.log(y + 1e-10))).masked_fill(skipped, 0.0).sum()
    pulled = (t * y / (y + 1e-10)).detach()
    dscores = (y.detach() * pulled.sum(-1, keepdim=True) - pulled).masked_fill(empty | ~real[..., None], 0.0)
    return loss, dscores
