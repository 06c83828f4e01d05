"""``dsv4::sparse_attention``: window, selected compressed entries and sink in one softmax (specification, section 3).

Works through blocks of queries: the largest temporary is [B, T*H, W+T+P] for a block of T queries, so that memory grows
with S and not with its square, and the backward recomputes the weights from the log-sum-exp instead of storing them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.visibility import NOWHERE, complete_windows, entry_mask, query_blocks, selected_mask, window_mask


def _blocks(
    q: Tensor, kv: Tensor, entries: Tensor, start: Tensor, entry_end: Tensor, ids: Tensor | None, scale: float,
    window: int, ratio: int, acc: torch.dtype,
) -> Iterator[tuple[slice, slice, int, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Per block of queries: its range, the range of its window keys, its number of entries, queries, keys and logits."""
    batch, n_tokens, heads, width = q.shape
    for first, last in query_blocks(n_tokens, heads):
        low, n = max(0, first - window + 1), complete_windows(last, ratio, entries.shape[1])
        keys = torch.cat((kv[:, low:last], entries[:, :n]), 1).to(acc)
        queries = q[:, first:last].to(acc).reshape(batch, -1, width) * scale
        rows = start[:, first:last]
        seen = entry_mask(rows, entry_end[:, :n], first)
        if ids is not None:
            seen &= selected_mask(ids[:, first:last].clamp(max=n), n)
        mask = torch.cat((window_mask(rows, first, low, last - low, window), seen), -1)
        z = torch.bmm(queries, keys.mT).view(batch, last - first, heads, -1)
        z.masked_fill_(~mask[:, :, None, :], NOWHERE)
        yield slice(first, last), slice(low, last), n, queries, keys, z


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
    with no_autocast(q):
        acc = accumulator(q, kv)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=acc, device=q.device)
        for t, _, _, _, keys, z in _blocks(q, kv, entries, start, entry_end, ids, scale, window, ratio, acc):
            peak = torch.maximum(z.amax(-1), sink.to(acc))
            weights = z.sub_(peak[..., None]).exp_()
            total = weights.sum(-1) + torch.exp(sink.to(acc) - peak)
            mixed = torch.bmm(weights.flatten(1, 2), keys).view(*total.shape, -1)
            out[:, t] = mixed.div_(total[..., None]).to(q.dtype)
            lse[:, t] = total.log_().add_(peak)
        return out, lse


@sparse_attention.register_fake
def _(q, kv, entries, sink, start, entry_end, ids, scale, window, ratio):  # type: ignore[no-untyped-def]  # schema above
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:3], dtype=accumulator(q, kv), device=q.device),
    )


@torch.library.custom_op("dsv4::sparse_attention_backward", mutates_args=())
def sparse_attention_backward(
    grad: Tensor, grad_lse: Tensor, q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor,
    entry_end: Tensor, ids: Tensor | None, out: Tensor, lse: Tensor, scale: float, window: int, ratio: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, kv, entries and sink.

    With ``w = e^(z - lse)`` and ``delta = <dO, O> - dlse``: ``dz = w (<dO, KV> - delta)``, ``dq = scale dz KV``,
    ``dKV = scale dz^T q + w^T dO`` (as key and as value), ``dsink = -sum e^(sink - lse) delta``.
    """
    with no_autocast(q):
        acc = accumulator(q, kv)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dkv = torch.zeros(kv.shape, dtype=acc, device=q.device)
        dentries = torch.zeros(entries.shape, dtype=acc, device=q.device)
        dsink = torch.zeros(sink.shape, dtype=acc, device=q.device)
        for t, s, n, queries, keys, z in _blocks(q, kv, entries, start, entry_end, ids, scale, window, ratio, acc):
            do = grad[:, t].to(acc)
            delta = (do * out[:, t].to(acc)).sum(-1) - grad_lse[:, t].to(acc)
            weights = z.sub_(lse[:, t, :, None]).exp_()
            dsink -= (torch.exp(sink.to(acc) - lse[:, t]) * delta).sum((0, 1))
            do = do.flatten(1, 2)
            dkeys = torch.bmm(weights.flatten(1, 2).mT, do)
            dz = torch.bmm(do, keys.mT).view_as(weights).sub_(delta[..., None]).mul_(weights).flatten(1, 2)
            dkeys += torch.bmm(dz.mT, queries)
            dq[:, t] = torch.bmm(dz, keys).mul_(scale).view(q[:, t].shape).to(q.dtype)
            n_window = s.stop - s.start
            dkv[:, s] += dkeys[:, :n_window]
            dentries[:, :n] += dkeys[:, n_window:]
        return dq, dkv.to(kv.dtype), dentries.to(entries.dtype), dsink.to(sink.dtype)


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
