"""``dsv4::indexer_distillation``: ``indexer_kl`` of ``indexer_kl_target`` in one pass (specification, section 5.1).

What graph passes put in the place of the two after autograd: it returns the gradient of the scores as they do, and has none
of its own.  A block of queries goes from logits to gradient while it is in the cache; the teacher [B,S,K] is never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.indexer_kl import divergence
from dsv4c.ops.indexer_kl_target import teachers
from dsv4c.ops.precision import accumulator, no_autocast

_AT_ONCE = 1 << 15  # elements of the teacher, or up to a block more, that the tail takes from the cache


def plain(
    q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scores: Tensor, real: Tensor, scale: float, ratio: int
) -> tuple[Tensor, Tensor]:
    """The operator in plain torch, without the dispatcher around it."""
    acc = accumulator(q, entries, scores)
    loss = torch.zeros((), dtype=acc, device=q.device)
    dscores = torch.empty(scores.shape, dtype=acc, device=q.device)
    some: list[Tensor] = []  # teachers of the queries from `first` on
    first, n_tokens = 0, q.shape[1]
    with no_autocast(q):
        for last, target in teachers(q, entries, ids, lse, scale, ratio) if dscores.numel() else ():
            some.append(target)
            if last == n_tokens or sum(t.numel() for t in some) >= _AT_ONCE:
                block = slice(first, last)
                loss += divergence(torch.cat(some, 1), scores[:, block], real[:, block], dscores[:, block])
                first, some = last, []
    return loss, dscores


@torch.library.custom_op("dsv4::indexer_distillation", mutates_args=())
def indexer_distillation(
    q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scores: Tensor, real: Tensor, scale: float, ratio: int
) -> tuple[Tensor, Tensor]:
    """The distillation loss, summed over queries, and the gradient of the scores.

    ``T_tp ~ sum_h e^(scale <q_th, entry_p> - lse_th)`` over the selected entries (:mod:`dsv4c.ops.indexer_kl_target`);
    ``KL_t = sum_p T (log(T + 1e-10) - log(Y + 1e-10))``, Y the softmax of the scores (:mod:`dsv4c.ops.indexer_kl`).

    Shapes: q [B,S,H,c], entries [B,P,c], ids [B,S,K] int64 with -1 for none, lse [B,S,H] or None, scores [B,S,K] with -inf
    where there is no entry, real [B,S] bool; ratio: tokens per entry.  Returns the loss, a scalar, and dscores [B,S,K], both
    fp32 (fp64 for fp64 inputs).  A query that is not real or has no entry gives 0 to both.
    """
    return plain(q, entries, ids, lse, scores, real, scale, ratio)


@indexer_distillation.register_fake
def _(q, entries, ids, lse, scores, real, scale, ratio):  # type: ignore[no-untyped-def]  # schema above
    acc = accumulator(q, entries, scores)
    return torch.empty((), dtype=acc, device=q.device), torch.empty(scores.shape, dtype=acc, device=q.device)
