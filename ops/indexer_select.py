"""``dsv4::indexer_select``: the indexer's choice from queries that are not rotated yet (specification, section 5).

What graph passes put in the place of ``rope``, a scaling of the weights and ``indexer_topk`` in a joint graph, forward and
backward; it has no autograd formula.  A block of queries is rotated in cache and used there: neither the rotated queries
[B,S,Hi,ci] nor the scores [B,S,P] are written.  There is no Hadamard transform: the same one of q and of k changes no
product, ``<Hq, Hk> = <q, k>``, and the pass that puts this operator in removes both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.rope import rope_
from dsv4c.ops.visibility import NOWHERE, complete_windows, entry_mask, query_blocks

QUERIES = 64  # that are rotated, and whose scores are chosen from, at a time
ROWS = 512  # of products at a time: they stay in a core's cache until they are summed


def _rotated(q: Tensor, cos: Tensor, sin: Tensor, acc: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Which queries, and a copy of them that is rotated [B,T,Hi,ci]."""
    for first, last in query_blocks(q.shape[1], 1, QUERIES):
        t = slice(first, last)
        queries = q[:, t].to(acc, copy=True).contiguous()
        rope_(queries, cos[:, t], sin[:, t], False)
        yield t, queries


@torch.library.custom_op("dsv4::indexer_select", mutates_args=())
def indexer_select(
    q: Tensor, k: Tensor, w: Tensor, cos: Tensor, sin: Tensor, start: Tensor, entry_end: Tensor, temperature: float,
    topk: int, ratio: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``indexer_topk(rope(q, cos, sin, False), k, w * temperature, start, entry_end, topk, ratio)``: ids and scores.

    Shapes: q [B,S,Hi,ci], cos and sin [B,S,r/2] fp32, w [B,S,Hi]; the others and what is returned as in
    :func:`dsv4c.ops.indexer_topk.indexer_topk`.  q and k without Hadamard transforms, which would cancel.
    """
    with no_autocast(q):
        acc, batch, heads = accumulator(q, k), q.shape[0], q.shape[2]
        ids = torch.full((*q.shape[:2], min(topk, k.shape[1])), -1, dtype=torch.int64, device=q.device)
        best = torch.full(ids.shape, NOWHERE, dtype=acc, device=q.device)
        for t, queries in _rotated(q, cos, sin, acc):
            n = complete_windows(t.stop, ratio, k.shape[1])
            keys, weights = k[:, :n].to(acc).mT, w[:, t].to(acc) * temperature
            scores = torch.empty(*queries.shape[:2], n, dtype=acc, device=q.device)
            for first, last in query_blocks(queries.shape[1], heads, ROWS):
                seen = complete_windows(t.start + last, ratio, k.shape[1])  # the rest is masked
                rows = batch * (last - first)
                dots = torch.bmm(queries[:, first:last].flatten(1, 2), keys[:, :, :seen]).relu_().view(rows, heads, seen)
                summed = torch.bmm(weights[:, first:last].reshape(rows, 1, heads), dots)
                scores[:, first:last, :seen] = summed.view(batch, last - first, seen)
            scores.masked_fill_(~entry_mask(start[:, t], entry_end[:, :n], t.start), NOWHERE)
            values, chosen = scores.topk(min(ids.shape[2], n), -1)
            ids[:, t, : chosen.shape[-1]] = torch.where(values == NOWHERE, -1, chosen)
            best[:, t, : chosen.shape[-1]] = values
        return ids, best


@indexer_select.register_fake
def _(q, k, w, cos, sin, start, entry_end, temperature, topk, ratio):  # type: ignore[no-untyped-def]  # schema above
    shape = (*q.shape[:2], min(topk, k.shape[1]))
    return (
        torch.empty(shape, dtype=torch.int64, device=q.device),
        torch.empty(shape, dtype=accumulator(q, k), device=q.device),
    )


@torch.library.custom_op("dsv4::indexer_select_backward", mutates_args=())
def indexer_select_backward(
    grad: Tensor, ids: Tensor, q: Tensor, k: Tensor, w: Tensor, cos: Tensor, sin: Tensor, temperature: float, ratio: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and w, which are not rotated and not scaled, from those of the selected scores; deterministic.

    With ``q' = rope(q)``, ``z = <q'_th, k_p>``, g the gradient of a selected score and s the temperature:
    ``dw = s sum_p g relu(z)``, ``dz = s g w [z > 0]``, ``dq = rope^-1(dz k)``, ``dk = dz^T q'``.
    """
    with no_autocast(q):
        acc, heads = accumulator(q, k), q.shape[2]
        dq, dw = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, w))
        dk = torch.zeros(k.shape, dtype=acc, device=k.device)
        for t, queries in _rotated(q, cos, sin, acc):
            dqueries = torch.empty_like(queries)
            for first, last in query_blocks(queries.shape[1], heads):
                own = slice(t.start + first, t.start + last)
                n, rotated = complete_windows(own.stop, ratio, k.shape[1]), queries[:, first:last].flatten(1, 2)
                keys, weights, chosen = k[:, :n].to(acc), w[:, own].to(acc) * temperature, ids[:, own]
                none = chosen < 0
                g = torch.zeros(*chosen.shape[:2], n + 1, dtype=acc, device=q.device)
                g.scatter_(-1, chosen.masked_fill(none, n), grad[:, own].to(acc).masked_fill(none, 0.0))
                g = g[:, :, :n]
                dots = torch.bmm(rotated, keys.mT).relu_().unflatten(1, (-1, heads))
                weighed = torch.bmm(dots.flatten(0, 1), g.flatten(0, 1)[..., None])
                dw[:, own] = weighed.view(*chosen.shape[:2], heads).mul_(temperature)
                dz = torch.where(dots > 0, g[:, :, None] * weights[..., None], 0.0).flatten(1, 2)
                dqueries[:, first:last] = torch.bmm(dz, keys).unflatten(1, (-1, heads))
                dk[:, :n] += torch.bmm(dz.mT, rotated)
            rope_(dqueries, cos[:, t], sin[:, t], True)
            dq[:, t] = dqueries
        return dq, dk.to(k.dtype), dw


@indexer_select_backward.register_fake
def _(grad, ids, q, k, w, *_):  # type: ignore[no-untyped-def]  # schema above
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, w))
