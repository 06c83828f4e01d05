"""``dsv4::indexer_kl_target``: what the indexer is taught (specification, section 5.1).

Works through blocks of queries with the head sum inside: no [B,H,S,K] and no [B,S,K,c] tensor exists.  It has no gradient:
the teacher is a constant of the distillation, also where its inputs require one, so that the loss cannot reach what the
teacher was made of.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.visibility import NOWHERE, complete_windows, query_blocks, selected_mask

_ROWS = 512  # of logits at a time: they stay in a core's cache until they are summed


def teachers(
    q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scale: float, ratio: int
) -> Iterator[tuple[int, Tensor]]:
    """Of one block of queries after the other its end, and its T [B,T,K]."""
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


@torch.library.custom_op("dsv4::indexer_kl_target", mutates_args=())
def indexer_kl_target(q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scale: float, ratio: int) -> Tensor:
    """The attention that the main heads pay to the selected entries, summed over heads and normalised over entries.

    ``z_thp = scale <q_th, entry_p>``; with lse (the joint softmax over window, entries and sink, target B):
    ``T_tp ~ sum_h e^(z_thp - lse_th)``; without (target A): ``T_tp ~ sum_h softmax_p(z_thp)``, p over the selected.

    Shapes: q [B,S,H,c], entries [B,P,c], ids [B,S,K] int64 with -1 for none, lse [B,S,H] or None; ratio: tokens per entry.
    Returns T [B,S,K] fp32 (fp64 for fp64 inputs): rows sum to 1, a row without entries is zero.
    """
    with no_autocast(q):
        target = torch.empty(ids.shape, dtype=accumulator(q, entries), device=q.device)
        first = 0
        for last, block in teachers(q, entries, ids, lse, scale, ratio):
            target[:, first:last] = block
            first = last
        return target


@indexer_kl_target.register_fake
def _(q, entries, ids, lse, scale, ratio):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(ids.shape, dtype=accumulator(q, entries), device=q.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    ctx.mark_non_differentiable(output)


def _backward(ctx, _grad):  # type: ignore[no-untyped-def]  # autograd context
    return None, None, None, None, None, None


indexer_kl_target.register_autograd(_backward, setup_context=_save)
