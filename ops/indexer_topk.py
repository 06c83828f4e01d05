"""``dsv4::indexer_topk``: the lightning indexer's scores and the entries it selects (specification, section 5).

Works through blocks of queries: the largest temporary is [B, T*Hi, P] for a block of T queries, small enough to stay in a
core's cache until the heads are summed.  The backward touches the selected entries only and adds in a fixed order, so that
it is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.visibility import NOWHERE, complete_windows, entry_mask, query_blocks

QUERIES = 64  # whose scores are chosen from at a time
ROWS = 512  # of products at a time: they stay in a core's cache until they are summed

Block = tuple[slice, Tensor, Tensor]
"""Which queries, themselves [B,T,Hi,ci], and their head weights [B,T,Hi]."""


def blocks(q: Tensor, w: Tensor) -> Iterator[Block]:
    for first, last in query_blocks(q.shape[1], 1, QUERIES):
        yield slice(first, last), q[:, first:last], w[:, first:last]


def choose(
    given: Iterable[Block], q: Tensor, k: Tensor, start: Tensor, entry_end: Tensor, topk: int, ratio: int
) -> tuple[Tensor, Tensor]:
    """ids and scores of the best entries of every query, a block at a time; q gives sizes and dtype only."""
    acc, (batch, n_tokens, heads, _) = accumulator(q, k), q.shape
    n_chosen = min(topk, k.shape[1])
    ids = torch.full((batch, n_tokens, n_chosen), -1, dtype=torch.int64, device=q.device)
    best = torch.full(ids.shape, NOWHERE, dtype=acc, device=q.device)
    at_once = query_blocks(QUERIES, heads, ROWS)[0][1]
    space = torch.empty(batch * at_once * heads * k.shape[1], dtype=acc, device=q.device)
    for t, queries, weights in given:
        n = complete_windows(t.stop, ratio, k.shape[1])
        keys, scores = k[:, :n].to(acc).mT, torch.empty(*queries.shape[:2], n, dtype=acc, device=q.device)
        for first, last in query_blocks(queries.shape[1], heads, ROWS):
            rows, seen = batch * (last - first), complete_windows(t.start + last, ratio, k.shape[1])
            dots = space[: rows * heads * seen].view(batch, (last - first) * heads, seen)
            torch.bmm(queries[:, first:last].to(acc).flatten(1, 2), keys[:, :, :seen], out=dots).relu_()
            summed = torch.bmm(weights[:, first:last].to(acc).reshape(rows, 1, heads), dots.view(rows, heads, seen))
            scores[:, first:last, :seen] = summed.view(batch, last - first, seen)  # the rest is masked
        scores.masked_fill_(~entry_mask(start[:, t], entry_end[:, :n], t.start), NOWHERE)
        values, chosen = scores.topk(min(n_chosen, n), -1)
        ids[:, t, : chosen.shape[-1]] = torch.where(values == NOWHERE, -1, chosen)
        best[:, t, : chosen.shape[-1]] = values
    return ids, best


def pull(
    given: Iterable[Block], grad: Tensor, ids: Tensor, k: Tensor, dk: Tensor, ratio: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each block the gradients of its queries and weights, in dk's dtype; those of the entries are added to dk."""
    acc = dk.dtype
    for t, queries, weights in given:
        heads = queries.shape[2]
        dq, dw = (torch.empty(x.shape, dtype=acc, device=x.device) for x in (queries, weights))
        for first, last in query_blocks(queries.shape[1], heads):
            own = slice(t.start + first, t.start + last)
            n, rows = complete_windows(own.stop, ratio, k.shape[1]), queries[:, first:last].to(acc).flatten(1, 2)
            keys, none = k[:, :n].to(acc), ids[:, own] < 0
            g = torch.zeros(*none.shape[:2], n + 1, dtype=acc, device=k.device)
            g.scatter_(-1, ids[:, own].masked_fill(none, n), grad[:, own].to(acc).masked_fill(none, 0.0))
            g = g[:, :, :n]
            dots = torch.bmm(rows, keys.mT).relu_().unflatten(1, (-1, heads))
            dw[:, first:last] = torch.bmm(dots.flatten(0, 1), g.flatten(0, 1)[..., None]).view(*none.shape[:2], heads)
            factors = weights[:, first:last, :, None].to(acc)
            dz = torch.where(dots > 0, g[:, :, None] * factors, 0.0).flatten(1, 2)
            dq[:, first:last] = torch.bmm(dz, keys).unflatten(1, (-1, heads))
            dk[:, :n] += torch.bmm(dz.mT, rows)
        yield t, dq, dw


@torch.library.custom_op("dsv4::indexer_topk", mutates_args=())
def indexer_topk(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, entry_end: Tensor, topk: int, ratio: int
) -> tuple[Tensor, Tensor]:
    """The best K visible entries of every query.

    ``I_tp = sum_h w_th relu(<q_th, k_p>)`` in fp32, both temperature factors already in w; -inf where t may not see p.

    Shapes: q [B,S,Hi,ci], k [B,P,ci], w [B,S,Hi], start [B,S] and entry_end [B,P] int64
    (:mod:`dsv4c.ops.visibility`); ratio: tokens per entry.  Returns ids [B,S,min(K,P)] int64 with -1 for none, and their
    scores in fp32 (fp64 for fp64 inputs) with -inf for none.  The order among equal scores is not defined.
    """
    with no_autocast(q):
        return choose(blocks(q, w), q, k, start, entry_end, topk, ratio)


@indexer_topk.register_fake
def _(q, k, w, start, entry_end, topk, ratio):  # type: ignore[no-untyped-def]  # schema above
    shape = (*q.shape[:2], min(topk, k.shape[1]))
    return (
        torch.empty(shape, dtype=torch.int64, device=q.device),
        torch.empty(shape, dtype=accumulator(q, k), device=q.device),
    )


@torch.library.custom_op("dsv4::indexer_topk_backward", mutates_args=())
def indexer_topk_backward(
    grad: Tensor, ids: Tensor, q: Tensor, k: Tensor, w: Tensor, ratio: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and w from those of the selected scores.

    With ``z = <q_th, k_p>`` and g the gradient of a selected score: ``dw = sum_p g relu(z)``, ``dz = g w [z > 0]``,
    ``dq = dz k``, ``dk = dz^T q``.
    """
    with no_autocast(q):
        dq, dw = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, w))
        dk = torch.zeros(k.shape, dtype=accumulator(q, k), device=k.device)
        for t, dqueries, dweights in pull(blocks(q, w), grad, ids, k, dk, ratio):
            dq[:, t], dw[:, t] = dqueries, dweights
        return dq, dk.to(k.dtype), dw


@indexer_topk_backward.register_fake
def _(grad, ids, q, k, w, ratio):  # type: ignore[no-untyped-def]  # schema above
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, w))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    q, k, w, _, _, _, ctx.ratio = inputs
    ctx.save_for_backward(output[0], q, k, w)
    ctx.mark_non_differentiable(output[0])


def _backward(ctx, _grad_ids, grad):  # type: ignore[no-untyped-def]  # autograd context
    return (*indexer_topk_backward(grad, *ctx.saved_tensors, ctx.ratio), None, None, None, None)


indexer_topk.register_autograd(_backward, setup_context=_save)
