"""``dsv4::indexer_topk``: the lightning indexer's scores and the entries it selects (specification, section 5).

Works through blocks of queries: the largest temporary is [B, T*Hi, P] for a block of T queries, small enough to stay in a
core's cache until the heads are summed.  The backward touches the selected entries only and adds in a fixed order, so that
it is deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.visibility import NOWHERE, complete_windows, entry_mask, query_blocks

_QUERIES = 64  # whose scores are chosen from at a time
_ROWS = 512  # of products at a time: they stay in a core's cache until they are summed


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
        acc = accumulator(q, k)
        batch, n_tokens, heads, width = q.shape
        n_chosen = min(topk, k.shape[1])
        ids = torch.full((batch, n_tokens, n_chosen), -1, dtype=torch.int64, device=q.device)
        best = torch.full(ids.shape, NOWHERE, dtype=acc, device=q.device)
        at_once = query_blocks(_QUERIES, heads, _ROWS)[0][1]
        space = torch.empty(batch * at_once * heads * k.shape[1], dtype=acc, device=q.device)
        for first, last in query_blocks(n_tokens, 1, _QUERIES):
            n = complete_windows(last, ratio, k.shape[1])
            keys, scores = k[:, :n].to(acc).mT, torch.empty(batch, last - first, n, dtype=acc, device=q.device)
            for t, end in query_blocks(last - first, heads, _ROWS):
                rows, seen = batch * (end - t), complete_windows(first + end, ratio, k.shape[1])
                dots = space[: rows * heads * seen].view(batch, (end - t) * heads, seen)
                queries, weights = q[:, first + t : first + end], w[:, first + t : first + end]
                torch.bmm(queries.to(acc).reshape(batch, -1, width), keys[:, :, :seen], out=dots).relu_()
                summed = torch.bmm(weights.to(acc).reshape(rows, 1, heads), dots.view(rows, heads, seen))
                scores[:, t:end, :seen] = summed.view(batch, end - t, seen)  # the rest is masked
            scores.masked_fill_(~entry_mask(start[:, first:last], entry_end[:, :n], first), NOWHERE)
            values, chosen = scores.topk(min(n_chosen, n), -1)
            ids[:, first:last, : chosen.shape[-1]] = torch.where(values == NOWHERE, -1, chosen)
            best[:, first:last, : chosen.shape[-1]] = values
        return ids, best


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
        acc = accumulator(q, k)
        batch, n_tokens, heads, width = q.shape
        dq, dw = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, w))
        dk = torch.zeros(k.shape, dtype=acc, device=k.device)
        for first, last in query_blocks(n_tokens, heads):
            n = complete_windows(last, ratio, k.shape[1])
            queries, keys = q[:, first:last].to(acc).reshape(batch, -1, width), k[:, :n].to(acc)
            chosen = ids[:, first:last]
            none = chosen < 0
            g = torch.zeros(batch, last - first, n + 1, dtype=acc, device=q.device)
            g.scatter_(-1, chosen.masked_fill(none, n), grad[:, first:last].to(acc).masked_fill(none, 0.0))
            g = g[:, :, :n]
            dots = torch.bmm(queries, keys.mT).relu_().view(batch, last - first, heads, n)
            weighed = torch.bmm(dots.flatten(0, 1), g.reshape(batch * (last - first), n, 1))
            dw[:, first:last] = weighed.view(batch, last - first, heads).to(w.dtype)
            dz = torch.where(dots > 0, g[:, :, None, :] * w[:, first:last, :, None].to(acc), 0.0).flatten(1, 2)
            dq[:, first:last] = torch.bmm(dz, keys).view(batch, last - first, heads, width).to(q.dtype)
            dk[:, :n] += torch.bmm(dz.mT, queries)
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
