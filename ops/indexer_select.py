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

from dsv4c.ops.indexer_topk import Block, blocks, choose, pull
from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.rope import rope_


def _rotated(q: Tensor, w: Tensor, cos: Tensor, sin: Tensor, temperature: float, acc: torch.dtype) -> Iterator[Block]:
    """The blocks of the queries rotated and the weights scaled: copies, no larger than a block."""
    for t, queries, weights in blocks(q, w):
        turned = queries.to(acc, copy=True).contiguous()
        rope_(turned, cos[:, t], sin[:, t], False)
        yield t, turned, weights.to(acc) * temperature


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
        given = _rotated(q, w, cos, sin, temperature, accumulator(q, k))
        return choose(given, q, k, start, entry_end, topk, ratio)


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
        dq, dw = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, w))
        dk = torch.zeros(k.shape, dtype=accumulator(q, k), device=k.device)
        for t, dqueries, dweights in pull(_rotated(q, w, cos, sin, temperature, dk.dtype), grad, ids, k, dk, ratio):
            rope_(dqueries, cos[:, t], sin[:, t], True)
            dq[:, t], dw[:, t] = dqueries, dweights * temperature
        return dq, dk.to(k.dtype), dw


@indexer_select_backward.register_fake
def _(grad, ids, q, k, w, *_):  # type: ignore[no-untyped-def]  # schema above
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, w))
