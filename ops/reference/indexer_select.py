"""The indexer's choice from queries that are not rotated yet, as the specification writes it (section 5)."""

from __future__ import annotations

from torch import Tensor

from dsv4c.ops.reference.indexer_topk import indexer_topk
from dsv4c.ops.reference.rope import rope


def indexer_select(
    q: Tensor, k: Tensor, w: Tensor, cos: Tensor, sin: Tensor, start: Tensor, entry_end: Tensor, temperature: float,
    topk: int, ratio: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``I_tp = s sum_h w_th relu(<rope(q_th), k_p>)``, -inf where t may not see p; the best min(K, P) of each query."""
    return indexer_topk(rope(q, cos, sin, False), k, w * temperature, start, entry_end, topk, ratio)
