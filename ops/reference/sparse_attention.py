"""Attention over window and compressed entries, as the specification writes it (section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator
from dsv4c.ops.visibility import NOWHERE, entry_mask, selected_mask, window_mask


def sparse_attention(
    q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor, entry_end: Tensor, ids: Tensor | None,
    scale: float, window: int, ratio: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``z_i = scale <q, KV_i>``; ``lse = log(sum_i e^z_i + e^sink)``; ``o = sum_i e^(z_i - lse) KV_i``."""
    acc = accumulator(q, kv)
    keys = torch.cat((kv, entries), 1).to(acc)
    z = scale * torch.einsum("bthc,bnc->bthn", q.to(acc), keys)
    seen = entry_mask(start, entry_end, 0)
    if ids is not None:
        seen = seen & selected_mask(ids, entries.shape[1])
    mask = torch.cat((window_mask(start, 0, 0, kv.shape[1], window), seen), -1)
    z = z.masked_fill(~mask[:, :, None, :], NOWHERE)
    joint = torch.cat((z, sink.to(acc)[:, None].expand(*z.shape[:-1], 1)), -1)
    lse = torch.logsumexp(joint, -1)
    out = torch.einsum("bthn,bnc->bthc", torch.exp(z - lse[..., None]), keys)
    return out.to(q.dtype), lse
