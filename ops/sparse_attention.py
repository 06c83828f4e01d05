"""``dsv4::sparse_attention``: window, selected compressed entries and sink in one softmax (specification, section 3).

Works through blocks of queries: the largest temporary is [B, T*H, W+T+P] for a block of T queries, so that memory grows
with S and not with its square, and the backward recomputes the weights from the log-sum-exp instead of storing them.  The
matrix products are torch's; masks and exponentials between them are one pass in C++ (:mod:`dsv4c.ops.cpp`).

A block multiplies its queries with all the entries before it and masks those that were not selected, until that is more
than ``PRUNES`` times as many as were: then it gathers each query's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4c.ops import cpp
from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.rope import rope_
from dsv4c.ops.visibility import complete_windows, query_blocks

ROWS = 256  # of queries times heads in a block: the logits of a block stay in cache
PRUNES = 6  # entries before a block for each one selected, at which gathering begins to pay
Table = tuple[Tensor, Tensor]  # cos and sin [B,S,r/2]


class _Block(NamedTuple):
    """Queries ``t``, their window keys ``s``, and the entries that they are multiplied with."""

    t: slice
    s: slice
    queries: Tensor  # [B,T*H,c], scaled
    keys: Tensor  # [B,N,c]: window keys, then entries unless they are gathered
    own: Tensor | None  # [B*T,K,c]: the selected entries of each query, where they are gathered
    ids: Tensor | None  # [B*T,K]: where in [B*P] they are
    z: Tensor  # [B,T,H,N'] logits, not masked
    facts: tuple[Tensor | int | None, ...]  # what the kernels need to know of the block

    def product(self, x: Tensor, heads: int) -> Tensor:
        """``<x, key>`` for x [B,T*H,c] -> [B,T,H,N']."""
        batch, rows, width = x.shape
        n_queries = rows // heads
        if self.own is None:
            return torch.bmm(x, self.keys.mT).view(batch, n_queries, heads, -1)
        z = x.new_empty(batch, n_queries, heads, self.keys.shape[1] + self.own.shape[1])
        z[..., : self.keys.shape[1]] = torch.bmm(x, self.keys.mT).view(batch, n_queries, heads, -1)
        z[..., self.keys.shape[1] :] = torch.bmm(x.view(-1, heads, width), self.own.mT).view(batch, n_queries, heads, -1)
        return z

    def mixed(self, weights: Tensor) -> Tensor:
        """``sum_i w_i key_i`` for weights [B,T,H,N'] -> [B,T,H,c]."""
        n = self.keys.shape[1]
        out = torch.bmm(weights[..., :n].flatten(1, 2), self.keys).view(*weights.shape[:3], -1)
        if self.own is not None:
            out += torch.bmm(weights[..., n:].flatten(0, 1), self.own).view(out.shape)
        return out


def _blocks(
    q: Tensor, kv: Tensor, entries: Tensor, start: Tensor, entry_end: Tensor, ids: Tensor | None, scale: float,
    window: int, ratio: int, acc: torch.dtype,
) -> Iterator[_Block]:  # fmt: skip
    batch, n_tokens, heads, width = q.shape
    start, entry_end, entries = start.contiguous(), entry_end.contiguous(), entries.to(acc)
    for first, last in query_blocks(n_tokens, heads, ROWS):
        low, n = max(0, first - window + 1), complete_windows(last, ratio, entries.shape[1])
        chosen = None if ids is None else ids[:, first:last].contiguous()
        n_chosen = 0 if chosen is None else chosen.shape[-1]
        gathers = chosen is not None and n > PRUNES * n_chosen
        keys, own, places = kv[:, low:last].to(acc), None, None
        if not gathers:
            keys = torch.cat((keys, entries[:, :n]), 1)
        elif chosen is not None:
            row = torch.arange(batch, device=q.device)[:, None, None] * entries.shape[1]
            places = (chosen.clamp(min=0) + row).flatten(0, 1)
            own = entries.flatten(0, 1)[places]
        queries = q[:, first:last].to(acc).reshape(batch, -1, width) * scale
        facts = (
            start[:, first:last].contiguous(), entry_end, chosen, batch, last - first, heads, last - low,
            n_chosen if gathers else n, entry_end.shape[1], n_chosen, first, low, window, int(gathers),
        )  # fmt: skip
        block = _Block(slice(first, last), slice(low, last), queries, keys, own, places, q, facts)
        yield block._replace(z=block.product(queries, heads))


def _turn(block: Tensor, table: Table, t: slice, inverse: bool) -> None:
    """Rotates the last channels of the block's rows where they are."""
    rope_(block, table[0][:, t], table[1][:, t], inverse)


def forward(
    q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor, entry_end: Tensor, ids: Tensor | None,
    scale: float, window: int, ratio: int, table: Table | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, rotated back by the table if there is one, and log-sum-exp."""
    with no_autocast(q):
        acc = accumulator(q, kv)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=acc, device=q.device)
        sink = sink.to(acc).contiguous()
        for block in _blocks(q, kv, entries, start, entry_end, ids, scale, window, ratio, acc):
            peak, total = (torch.empty(block.z.shape[:3], dtype=acc) for _ in range(2))
            cpp.call("attention_weights", acc, acc, block.z, sink, peak, total, *block.facts)
            mixed = block.mixed(block.z).div_(total[..., None])
            if table is not None:
                _turn(mixed, table, block.t, True)
            out[:, block.t] = mixed
            lse[:, block.t] = total.log_().add_(peak)
        return out, lse


@torch.library.custom_op("dsv4::sparse_attention", mutates_args=())
def sparse_attention(
    q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor, entry_end: Tensor, ids: Tensor | None,
    scale: float, window: int, ratio: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of every query over its window, its entries and the sink.

    ``z_i = scale <q, KV_i>``; ``lse = log(sum_i e^z_i + e^sink)``; ``o = sum_i e^(z_i - lse) KV_i``, i over the window
    tokens and the selected entries that the query may see; the latent is key and value.

    Shapes: q [B,S,H,c], kv [B,S,c], entries [B,P,c], sink [H] fp32, start [B,S] and entry_end [B,P] int64
    (:mod:`dsv4c.ops.visibility`), ids [B,S,K] int64 with -1 for none, or None for every visible entry; ratio: tokens per
    entry (0 when there are none).  Returns o [B,S,H,c] in q's dtype and lse [B,S,H] fp32 (fp64 for fp64 inputs).
    """
    return forward(q, kv, entries, sink, start, entry_end, ids, scale, window, ratio)


@sparse_attention.register_fake
def _(q, kv, entries, sink, start, entry_end, ids, scale, window, ratio):  # type: ignore[no-untyped-def]  # schema above
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:3], dtype=accumulator(q, kv), device=q.device),
    )


def backward(
    grad: Tensor, grad_lse: Tensor, q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor,
    entry_end: Tensor, ids: Tensor | None, out: Tensor, lse: Tensor, scale: float, window: int, ratio: int,
    table: Table | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, kv, entries and sink; with a table, ``grad`` and ``out`` are of the output that was rotated back.

    A rotation is orthogonal: ``delta`` is the same on both sides of it.
    """
    with no_autocast(q):
        acc = accumulator(q, kv)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dkv = torch.zeros(kv.shape, dtype=acc, device=q.device)
        dentries = torch.zeros(entries.shape, dtype=acc, device=q.device)
        dsink = torch.zeros(sink.shape, dtype=acc, device=q.device)
        heads, sink = q.shape[2], sink.to(acc)
        for block in _blocks(q, kv, entries, start, entry_end, ids, scale, window, ratio, acc):
            # What is rotated in place is a copy: the gradient is the caller's.
            do, log_sum = grad[:, block.t].to(acc, copy=table is not None).contiguous(), lse[:, block.t].contiguous()
            delta = torch.linalg.vecdot(do, out[:, block.t].to(acc)).sub_(grad_lse[:, block.t])
            if table is not None:
                _turn(do, table, block.t, False)
            dsink -= torch.exp(sink - log_sum).mul_(delta).sum((0, 1))
            do = do.flatten(1, 2)
            weights, dz = block.z, block.product(do, heads)
            cpp.call("attention_weights_backward", acc, acc, weights, dz, log_sum, delta, *block.facts)
            dq[:, block.t] = block.mixed(dz).mul_(scale)
            n, n_window = block.keys.shape[1], block.s.stop - block.s.start
            dkeys = torch.bmm(weights[..., :n].flatten(1, 2).mT, do)
            dkeys.baddbmm_(dz[..., :n].flatten(1, 2).mT, block.queries)
            dkv[:, block.s] += dkeys[:, :n_window]
            dentries[:, : n - n_window] += dkeys[:, n_window:]
            if block.ids is not None:
                rows, width = (-1, heads, q.shape[-1]), q.shape[-1]
                down = torch.bmm(weights[..., n:].flatten(0, 1).mT, do.reshape(rows))
                down.baddbmm_(dz[..., n:].flatten(0, 1).mT, block.queries.view(rows))
                dentries.view(-1, width).index_add_(0, block.ids.flatten(), down.flatten(0, 1))
        return dq, dkv.to(kv.dtype), dentries.to(entries.dtype), dsink.to(sink.dtype)


@torch.library.custom_op("dsv4::sparse_attention_backward", mutates_args=())
def sparse_attention_backward(
    grad: Tensor, grad_lse: Tensor, q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor,
    entry_end: Tensor, ids: Tensor | None, out: Tensor, lse: Tensor, scale: float, window: int, ratio: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, kv, entries and sink.

    With ``w = e^(z - lse)`` and ``delta = <dO, O> - dlse``: ``dz = w (<dO, KV> - delta)``, ``dq = scale dz KV``,
    ``dKV = scale dz^T q + w^T dO`` (as key and as value), ``dsink = -sum e^(sink - lse) delta``.
    """
    return backward(grad, grad_lse, q, kv, entries, sink, start, entry_end, ids, out, lse, scale, window, ratio)


@sparse_attention_backward.register_fake
def _(grad, grad_lse, q, kv, entries, sink, *_):  # type: ignore[no-untyped-def]  # schema above
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, kv, entries, sink))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    *tensors, ctx.scale, ctx.window, ctx.ratio = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad, grad_lse):  # type: ignore[no-untyped-def]  # autograd context
    *inputs, out, lse = ctx.saved_tensors
    grads = sparse_attention_backward(grad, grad_lse, *inputs, out, lse, ctx.scale, ctx.window, ctx.ratio)
    return (*grads, None, None, None, None, None, None)


sparse_attention.register_autograd(_backward, setup_context=_save)
