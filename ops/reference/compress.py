"""Gated pooling of windows of tokens, as the specification writes it (section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator
from dsv4c.ops.visibility import NOWHERE


def compress(
    values: Tensor, logits: Tensor, ape: Tensor, entry_end: Tensor, has_previous: Tensor, overlap: bool
) -> Tensor:  # fmt: skip
    """``entry_p = sum_slots softmax_slots(logits + ape) values``; an entry that is not there is zero."""
    values, logits = (t.to(accumulator(values, logits)) for t in (values, logits))
    (ratio, width), n_tokens = ape.shape, values.shape[1]
    c = width // 2 if overlap else width
    row = torch.arange(len(values), device=values.device)[:, None, None]
    exists = (entry_end < n_tokens)[:, :, None]
    current = torch.where(exists, entry_end[:, :, None] - ratio + 1 + torch.arange(ratio, device=values.device), 0)
    v, e = values[..., width - c :][row, current], logits[..., width - c :][row, current] + ape[:, width - c :]
    if overlap:
        before = (current - ratio).clamp(min=0)
        missing = ~has_previous[:, :, None, None]
        v_before = values[..., :c][row, before].masked_fill(missing, 0.0)
        e_before = (logits[..., :c][row, before] + ape[:, :c]).masked_fill(missing, NOWHERE)
        v, e = torch.cat((v_before, v), 2), torch.cat((e_before, e), 2)
    return (e.softmax(2) * v).sum(2).masked_fill(~exists, 0.0)
