"""``dsv4::indexer_distillation``: ``indexer_kl`` of ``indexer_kl_target`` in one pass (specification, section 5.1).

What graph passes put in the place of the two after autograd: it returns the gradient of the scores as they do, and has none
of its own.  A block of queries goes from logits to gradient while it is in the cache; the teacher [B,S,K] is never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.indexer_kl import divergence
from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.visibility import NOWHERE, complete_windows, query_blocks, selected_mask


def teacher(q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scale: float) -> Tensor:
    """T [B,T,K] of a block of queries, of which none chose an entry behind these; in the entries' dtype.

    See :func:`dsv4c.ops.indexer_kl_target.indexer_kl_target`.
    """
    (batch, n_queries, heads, width), n = q.shape, entries.shape[1]
    if n == 0:
        return torch.zeros(ids.shape, dtype=entries.dtype, device=q.device)
    queries = q.to(entries.dtype).reshape(batch, -1, width) * scale
    z = torch.bmm(queries, entries.mT).view(batch, n_queries, heads, n)
    z.masked_fill_(~selected_mask(ids.clamp(max=n), n)[:, :, None, :], NOWHERE)
    # A row without entries has no finite logit; zero in place of its -inf maximum keeps NaN out.
    full = z.logsumexp(-1).nan_to_num_(neginf=0.0) if lse is None else lse.to(z.dtype)
    mass = z.sub_(full[..., None]).exp_().sum(2)
    mass /= mass.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return mass.gather(-1, ids.clamp(0, n - 1)).masked_fill_(ids < 0, 0.0)


def plain(
    q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scores: Tensor, real: Tensor, scale: float, ratio: int
) -> tuple[Tensor, Tensor]:
    """The operator in plain torch, without the dispatcher around it."""
    acc = accumulator(q, entries, scores)
    loss = torch.zeros((), dtype=acc, device=q.device)
    dscores = torch.empty(scores.shape, dtype=acc, device=q.device)
    n_tokens, heads = q.shape[1:3]
    pool = entries.to(accumulator(q, entries))
    with no_autocast(q):
        for first, last in query_blocks(n_tokens, heads) if dscores.numel() else ():
            block = slice(first, last)
            visible = pool[:, : complete_windows(last, ratio, pool.shape[1])]
            target = teacher(q[:, block], visible, ids[:, block], None if lse is None else lse[:, block], scale)
            loss += divergence(target, scores[:, block], real[:, block], dscores[:, block])
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
