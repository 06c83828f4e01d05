"""Attention whose output is rotated back, as the specification writes it (section 3)."""

from __future__ import annotations

from torch import Tensor

from dsv4c.ops.reference.rope import rope
from dsv4c.ops.reference.sparse_attention import sparse_attention


def sparse_attention_derotated(
    q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor, entry_end: Tensor, ids: Tensor | None,
    scale: float, window: int, ratio: int, cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``o' = rope^-1(o)`` on the last channels of every head, and the log-sum-exp, which it leaves as it is."""
    out, lse = sparse_attention(q, kv, entries, sink, start, entry_end, ids, scale, window, ratio)
    return rope(out, cos, sin, True), lse
