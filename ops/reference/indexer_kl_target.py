"""The teacher of the indexer, as the specification writes it (section 5.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator
from dsv4c.ops.visibility import NOWHERE


def indexer_kl_target(q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scale: float, ratio: int) -> Tensor:
    """``T_tp ~ sum_h e^(z_thp - lse_th)`` (joint) or ``sum_h softmax_p(z_thp)`` (selected), p over the selected."""
    # The teacher is a constant, whatever its inputs require.
    q, entries, lse = q.detach(), entries.detach(), None if lse is None else lse.detach()
    acc = accumulator(q, entries)
    valid = ids >= 0
    picked = ids.clamp(min=0)
    gathered = entries.to(acc)[torch.arange(len(ids), device=ids.device)[:, None, None], picked]
    z = scale * torch.einsum("bthc,btkc->bthk", q.to(acc), gathered)
    z = z.masked_fill(~valid[:, :, None, :], NOWHERE)
    if lse is None:
        lse = torch.logsumexp(z.masked_fill(~valid.any(-1)[:, :, None, None], 0.0), -1)
    mass = torch.exp(z - lse[..., None]).sum(2)
    return mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
