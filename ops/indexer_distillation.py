"""``dsv4::indexer_distillation``: ``indexer_kl`` of ``indexer_kl_target`` in one pass (specification, section 5.1).

What graph passes put in the place of the two after autograd: it returns the gradient of the scores as they do, and has none
of its own.  A block of queries goes from logits to gradient while it is in the cache; the teacher [B,S,K] is never written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4c.ops.indexer_kl import divergence
from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.visibility import NOWHERE, complete_windows, query_blocks, selected_mask

_ROWS = 512  # of logits at a time: they stay in a core's cache until they are summed
_AT_ONCE = 1 << 15  # elements of the teacher, or up to a block more, that the tail takes from the cache


def teachers(
    q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scale: float, ratio: int
) -> Iterator[tuple[int, Tensor]]:
    """Of one block of queries after the other its end, and its T [B,T,K] (:mod:`dsv4c.ops.indexer_kl_target`)."""
    acc = accumulator(q, entries)
    batch, n_tokens, heads, width = q.shape
    blocks = query_blocks(n_tokens, heads, _ROWS)
    space = torch.empty(batch * blocks[0][1] * heads * entries.shape[1] if blocks else 0, dtype=acc, device=q.device)
    for first, last in blocks:
        chosen, n = ids[:, first:last], complete_windows(last, ratio, entries.shape[1])
        if n == 0:
            yield last, torch.zeros(chosen.shape, dtype=acc, device=q.device)
            continue
        queries, keys = q[:, first:last].to(acc).reshape(batch, -1, width), entries[:, :n].to(acc).mT
        z = space[: batch * (last - first) * heads * n].view(batch, -1, n)
        torch.baddbmm(z, queries, keys, beta=0, alpha=scale, out=z)
        z = z.view(batch, last - first, heads, n)
        if lse is None:
            z.masked_fill_(~selected_mask(chosen.clamp(max=n), n)[:, :, None, :], NOWHERE)
            # A row without entries has no finite logit; zero in place of its -inf maximum keeps NaN out.
            full = z.logsumexp(-1).nan_to_num_(neginf=0.0)
        else:
            full = lse[:, first:last].to(acc)
        # The mass of an entry that was not selected may be infinite: it is not looked at.
        mass = z.sub_(full[..., None]).exp_().sum(2)
        picked = mass.gather(-1, chosen.clamp(0, n - 1)).masked_fill_((chosen < 0) | (chosen >= n), 0.0)
        picked /= picked.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        yield last, picked


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
