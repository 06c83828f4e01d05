"""``dsv4::indexer_select``: the indexer's choice from queries that are not rotated yet (specification, section 5).

What graph passes put in the place of ``rope``, a scaling of the weights and ``indexer_topk`` in a joint graph, forward and
backward; it has no autograd formula.  A block of queries is rotated in cache and used there: neither the rotated queries
[B,S,Hi,ci] nor the scores [B,S,P] are written.  There is no Hadamard transform: the same one of q and of k changes no
product, ``<Hq, Hk> = <q, k>``, and the pass that puts this operator in removes both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.rope import rope_
from dsv4c.ops.visibility import NOWHERE, complete_windows, entry_mask, query_blocks


class _Block(NamedTuple):
    """Queries ``t`` and the entries that can be complete before the last of them."""

    t: slice
    queries: Tensor  # [B,T*Hi,ci], rotated
    keys: Tensor  # [B,N,ci]
    weights: Tensor  # [B,T,Hi], scaled
    dots: Tensor  # [B,T,Hi,N]: relu(<q, k>)


def _blocks(
    q: Tensor, k: Tensor, w: Tensor, cos: Tensor, sin: Tensor, temperature: float, ratio: int, acc: torch.dtype
) -> Iterator[_Block]:
    batch, n_tokens, heads, _ = q.shape
    for first, last in query_blocks(n_tokens, heads):
        t, keys = slice(first, last), k[:, : complete_windows(last, ratio, k.shape[1])].to(acc)
        rotated = q[:, t].to(acc, copy=True).contiguous()
        rope_(rotated, cos[:, t], sin[:, t], False)
        queries = rotated.flatten(1, 2)
        dots = torch.bmm(queries, keys.mT).relu_().view(batch, last - first, heads, keys.shape[1])
        yield _Block(t, queries, keys, w[:, t].to(acc) * temperature, dots)


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
        acc = accumulator(q, k)
        ids = torch.full((*q.shape[:2], min(topk, k.shape[1])), -1, dtype=torch.int64, device=q.device)
        best = torch.full(ids.shape, NOWHERE, dtype=acc, device=q.device)
        for block in _blocks(q, k, w, cos, sin, temperature, ratio, acc):
            n = block.keys.shape[1]
            scores = torch.matmul(block.weights[:, :, None], block.dots).squeeze(2)
            scores.masked_fill_(~entry_mask(start[:, block.t], entry_end[:, :n], block.t.start), NOWHERE)
            values, chosen = scores.topk(min(ids.shape[2], n), -1)
            ids[:, block.t, : chosen.shape[-1]] = torch.where(values == NOWHERE, -1, chosen)
            best[:, block.t, : chosen.shape[-1]] = values
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
        acc = accumulator(q, k)
        dq, dw = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, w))
        dk = torch.zeros(k.shape, dtype=acc, device=k.device)
        for block in _blocks(q, k, w, cos, sin, temperature, ratio, acc):
            n, chosen = block.keys.shape[1], ids[:, block.t]
            none = chosen < 0
            g = torch.zeros(*chosen.shape[:2], n + 1, dtype=acc, device=q.device)
            g.scatter_(-1, chosen.masked_fill(none, n), grad[:, block.t].to(acc).masked_fill(none, 0.0))
            g = g[:, :, :n]
            dw[:, block.t] = torch.matmul(block.dots, g[..., None]).squeeze(-1).mul_(temperature)
            dz = torch.where(block.dots > 0, g[:, :, None] * block.weights[..., None], 0.0).flatten(1, 2)
            dqueries = torch.bmm(dz, block.keys).unflatten(1, (-1, q.shape[2]))
            rope_(dqueries, cos[:, block.t], sin[:, block.t], True)
            dq[:, block.t] = dqueries
            dk[:, :n] += torch.bmm(dz.mT, block.queries)
        return dq, dk.to(k.dtype), dw


@indexer_select_backward.register_fake
def _(grad, ids, q, k, w, *_):  # type: ignore[no-untyped-def]  # schema above
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, w))
