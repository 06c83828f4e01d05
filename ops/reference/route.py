"""The router after its product, as the specification writes it (section 6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4c.ops.precision import accumulator


def route(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, real: Tensor | None, k: int, route_scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``s = sqrt(softplus(l))``; the k best of s + bias, or the given k; their s normalised to route_scale; counts."""
    wide = logits.to(accumulator(logits))
    # The plain formula underflows near -103 and its gradient is inf * 0; below -20 it is e^(l/2) (B63).
    low = wide < -20.0
    scores = torch.where(low, torch.exp(wide.clamp(max=-20.0) / 2), F.softplus(wide.clamp(min=-20.0)).sqrt())
    biased = scores.detach() if bias is None else scores.detach() + bias.detach()
    ids = biased.topk(k, -1).indices if given is None else given.long() * 1
    chosen = scores.gather(-1, ids)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * route_scale
    sent = torch.zeros_like(scores, dtype=torch.int64).scatter_add(-1, ids, torch.ones_like(ids))
    return weights, ids, scores, (sent if real is None else sent * real[:, None]).sum(0)
