"""Scores of the indexer and its choice, as the specification writes them (section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator
from dsv4c.ops.visibility import NOWHERE, entry_mask


def indexer_topk(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, entry_end: Tensor, topk: int, ratio: int
) -> tuple[Tensor, Tensor]:
    """``I_tp = sum_h w_th relu(<q_th, k_p>)``, -inf where t may not see p; the best min(K, P) of each query."""
    acc = accumulator(q, k)
    dots = torch.einsum("bthc,bpc->bthp", q.to(acc), k.to(acc)).relu()
    scores = torch.einsum("bthp,bth->btp", dots, w.to(acc))
    scores = scores.masked_fill(~entry_mask(start, entry_end, 0), NOWHERE)
    best, ids = scores.topk(min(topk, k.shape[1]), -1)
    return torch.where(best == NOWHERE, -1, ids), best
