"""The distillation of the indexer from teacher to loss, as the specification writes it (section 5.1)."""

from __future__ import annotations

from torch import Tensor

from dsv4c.ops.reference.indexer_kl import indexer_kl
from dsv4c.ops.reference.indexer_kl_target import indexer_kl_target


def indexer_distillation(
    q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scores: Tensor, real: Tensor, scale: float, ratio: int
) -> tuple[Tensor, Tensor]:
    """``sum_t KL(T_t || softmax(I_t))`` with the teacher T of q and entries; and its gradient, as a constant."""
    return indexer_kl(indexer_kl_target(q, entries, ids, lse, scale, ratio), scores, real)
