"""Triton backward of ``dsv4::sparse_attention``: no atomics, so that the same inputs give the same bits.

dq by a program per query and 64 heads, which visits the keys as the forward does; dKV by a program per tile of 64 keys,
which visits the (query, head) rows that can see them.  Where there are fewer tiles of keys than a GPU has compute units, the
rows of a tile are dealt to several programs, whose fp32 sums are added in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
# ruff: noqa: RUF005
# A kernel is typed by Triton's compiler, which has tuples that grow in a loop and no starred expressions.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4c.ops.triton.scatter import scatter
from dsv4c.ops.triton.sparse_attention import (
    PLANS,
    Entries,
    entries_at,
    n_places,
    plan,
    rows_of,
    table,
    tiles,
    turn,
    turned_operand,
)


@triton.jit
def _pull(
    q, grad, dq, delta, lse, ptr, rows, seen, width, scale, BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr
):  # fmt: skip
    """dq and one tile of keys' part of it: ``dz = w (<dO, k> - delta)``, ``dq += scale dz k``."""
    z = tl.zeros([delta.shape[0], rows.shape[0]], tl.float32)
    dw = tl.zeros([delta.shape[0], rows.shape[0]], tl.float32)
    keys = ()
    for i in tl.static_range(N_CHUNKS):
        k = rows_of(ptr, rows, seen, i * BLOCK_C, width, BLOCK_C)
        z = tl.dot(q[i], tl.trans(k), z, input_precision="ieee")
        dw = tl.dot(grad[i], tl.trans(k), dw, input_precision="ieee")
        keys = keys + (k,)
    weights = tl.exp(tl.where(seen[None, :], z * scale, float("-inf")) - lse[:, None])
    dz = (weights * (dw - delta[:, None]) * scale).to(keys[0].dtype)
    grown = ()
    for i in tl.static_range(N_CHUNKS):
        grown = grown + (tl.dot(dz, keys[i], dq[i], input_precision="ieee"),)
    return grown


@triton.jit
def _dq_kernel(
    q_ptr, kv_ptr, entry_ptr, start_ptr, end_ptr, ids_ptr, cos_ptr, sin_ptr, out_ptr, lse_ptr, grad_ptr, grad_lse_ptr,
    dq_ptr, delta_ptr, n_tokens, n_entries, n_chosen, n_heads, ids_stride, scale, window, ratio,
    width: tl.constexpr, ROPE: tl.constexpr, GATHER: tl.constexpr, MASKED: tl.constexpr, MAX_CHOSEN: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr,
):  # fmt: skip
    """dq [B,S,H,c], and ``delta = <dO, O> - dlse`` [B,S,H] fp32 for the other kernel, of one query and BLOCK_H heads."""
    row = tl.program_id(0).to(tl.int64)
    t = (row % n_tokens).to(tl.int32)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = heads < n_heads
    wide = row * n_heads * width
    kv_ptr += (row - t) * width
    entry_ptr += row // n_tokens * n_entries * width
    end_ptr += row // n_tokens * n_entries
    ids_ptr += row * ids_stride
    start = tl.load(start_ptr + row).to(tl.int32)
    lse = tl.load(lse_ptr + row * n_heads + heads, mask=there, other=0.0)
    delta = -tl.load(grad_lse_ptr + row * n_heads + heads, mask=there, other=0.0)
    q = ()
    grad = ()
    dq = ()
    for i in tl.static_range(N_CHUNKS):
        q = q + (rows_of(q_ptr + wide, heads, there, i * BLOCK_C, width, BLOCK_C),)
        g = rows_of(grad_ptr + wide, heads, there, i * BLOCK_C, width, BLOCK_C)
        o = rows_of(out_ptr + wide, heads, there, i * BLOCK_C, width, BLOCK_C)
        # A rotation is orthogonal: the scalar product is the same before and after it.
        delta += tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
        if ROPE > 0 and (i + 1) * BLOCK_C > width - ROPE:
            angles = row + tl.arange(0, 1)
            g = turn(g.to(tl.float32), cos_ptr, sin_ptr, angles, i * BLOCK_C, width, 1.0, ROPE).to(g.dtype)
        grad = grad + (g,)
        dq = dq + (tl.zeros([BLOCK_H, BLOCK_C], tl.float32),)
    tl.store(delta_ptr + row * n_heads + heads, delta, mask=there)
    for s in range(tl.maximum(t - window + 1, start), t + 1, BLOCK_N):
        tokens = s + tl.arange(0, BLOCK_N)
        dq = _pull(q, grad, dq, delta, lse, kv_ptr, tokens, tokens <= t, width, scale, BLOCK_C, N_CHUNKS)
    for p in range(0, n_places(t, ids_ptr, n_entries, n_chosen, ratio, GATHER, MAX_CHOSEN), BLOCK_N):
        entry, seen = entries_at(p, t, start, end_ptr, ids_ptr, n_entries, n_chosen, GATHER, MASKED, BLOCK_N)
        dq = _pull(q, grad, dq, delta, lse, entry_ptr, entry, seen, width, scale, BLOCK_C, N_CHUNKS)
    for i in tl.static_range(N_CHUNKS):
        c = i * BLOCK_C + tl.arange(0, BLOCK_C)
        to = dq_ptr + wide + heads[:, None] * width + c[None, :]
        tl.store(to, dq[i].to(dq_ptr.dtype.element_ty), mask=there[:, None] & (c < width)[None, :])


@triton.jit
def _dkv_kernel(
    q_ptr, key_ptr, start_ptr, end_ptr, stop_ptr, chosen_ptr, cos_ptr, sin_ptr, lse_ptr, grad_ptr, delta_ptr, part_ptr,
    n_tokens, n_keys, n_heads, chosen_stride, scale, window, width: tl.constexpr, ROPE: tl.constexpr,
    ONE_QUERY: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr,
):  # fmt: skip
    """One split's part [splits,B,N,c] fp32 of the gradient of a tile of keys, tokens (WINDOW) or entries, in both roles.

    A row is a (query, head) pair: q, dO and lse are read as [S*H, ...].  ONE_QUERY: a step's rows are of one query.
    """
    batch = tl.program_id(2).to(tl.int64)
    keys = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = keys < n_keys
    first_row = batch * n_tokens * n_heads
    if WINDOW:
        end = keys
        first = tl.program_id(0) * BLOCK_K
        stop = tl.minimum(n_tokens, first + BLOCK_K - 1 + window)
    else:
        end = tl.load(end_ptr + batch * n_keys + keys, mask=there, other=n_tokens).to(tl.int32)
        first = tl.min(end)
        stops = tl.load(stop_ptr + batch * n_keys + keys, mask=there, other=0).to(tl.int32)
        stop = tl.max(tl.where(end < n_tokens, stops, 0))
    share = tl.cdiv(tl.cdiv(tl.maximum(stop - first, 0) * n_heads, tl.num_programs(1)), BLOCK_R) * BLOCK_R
    low = first * n_heads + tl.program_id(1) * share
    high = tl.minimum(low + share, stop * n_heads)
    k = ()
    grown = ()
    for i in tl.static_range(N_CHUNKS):
        k = k + (rows_of(key_ptr + batch * n_keys * width, keys, there, i * BLOCK_C, width, BLOCK_C),)
        grown = grown + (tl.zeros([BLOCK_K, BLOCK_C], tl.float32),)
    nth = tl.arange(0, BLOCK_R)
    for r in range(low, high, BLOCK_R):
        inside = r + nth < high
        t = (r + nth) // n_heads
        base = first_row + r
        lse = tl.load(lse_ptr + base + nth, mask=inside, other=0.0)
        delta = tl.load(delta_ptr + base + nth, mask=inside, other=0.0)
        start = tl.load(start_ptr + batch * n_tokens + t, mask=inside, other=n_tokens).to(tl.int32)
        seen = (end[:, None] <= t[None, :]) & (end[:, None] >= start[None, :]) & (there[:, None] & inside[None, :])
        if WINDOW:
            seen = seen & (end[:, None] > (t - window)[None, :])
        if MASKED:
            at = (batch * n_tokens + t)[None, :] * chosen_stride + keys[:, None]
            seen = seen & (tl.load(chosen_ptr + at, mask=seen, other=0) != 0)
        z = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
        dw = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
        queries = ()
        grads = ()
        for i in tl.static_range(N_CHUNKS):
            q = rows_of(q_ptr + base * width, nth, inside, i * BLOCK_C, width, BLOCK_C)
            g = rows_of(grad_ptr + base * width, nth, inside, i * BLOCK_C, width, BLOCK_C)
            if ROPE > 0 and (i + 1) * BLOCK_C > width - ROPE:
                queried = r // n_heads + tl.arange(0, 1) if ONE_QUERY else tl.minimum(t, n_tokens - 1)
                angles = batch * n_tokens + queried
                g = turned_operand(g, cos_ptr, sin_ptr, angles, i * BLOCK_C, width, ROPE)
            z = tl.dot(k[i], tl.trans(q), z, input_precision="ieee")
            dw = tl.dot(k[i], tl.trans(g), dw, input_precision="ieee")
            queries = queries + (q,)
            grads = grads + (g,)
        weights = tl.exp(tl.where(seen, z * scale, float("-inf")) - lse[None, :])
        dz = (weights * (dw - delta[None, :]) * scale).to(queries[0].dtype)
        weights = weights.to(queries[0].dtype)
        more = ()
        for i in tl.static_range(N_CHUNKS):
            part = tl.dot(weights, grads[i], grown[i], input_precision="ieee")
            more = more + (tl.dot(dz, queries[i], part, input_precision="ieee"),)
        grown = more
    part_ptr += (tl.program_id(1) * tl.num_programs(2) + batch) * n_keys * width
    for i in tl.static_range(N_CHUNKS):
        c = i * BLOCK_C + tl.arange(0, BLOCK_C)
        to = part_ptr + keys[:, None] * width + c[None, :]
        tl.store(to, grown[i], mask=there[:, None] & (c < width)[None, :])


BLOCK_R = 16  # (query, head) rows of a step


def n_splits(n_keys: int, batch: int, block_k: int) -> int:
    """Programs that share a tile of keys: together about as many as a large GPU has compute units, at most 16 a tile."""
    return max(1, min(16, 256 // (batch * triton.cdiv(n_keys, block_k))))


def sparse_attention_backward(
    grad: Tensor, grad_lse: Tensor, q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor,
    entry_end: Tensor, ids: Tensor | None, out: Tensor, lse: Tensor, scale: float, window: int, ratio: int,
    cos: Tensor | None = None, sin: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, kv, entries and sink, as :func:`dsv4c.ops.sparse_attention.sparse_attention_backward` defines them.

    With cos and sin, ``out`` is the output that was rotated back and ``grad`` its gradient; the rotation is undone here.
    """
    batch, n_tokens, n_heads, width = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if dq.numel() == 0:
        dkv, dentries, dsink = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (kv, entries, sink))
        return dq, dkv, dentries, dsink
    dtype = torch.promote_types(torch.promote_types(q.dtype, kv.dtype), entries.dtype)
    queries, latent, pool, grad = (x.to(dtype).contiguous() for x in (q, kv, entries, grad))
    start, entry_end = start.contiguous(), entry_end.contiguous()
    where = Entries(ids, entries.shape[1], ratio, start)
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
    (rope, angles), used = table(cos, sin, width, sink), plan(dtype)
    block = tiles(n_heads, width, used.heads)
    _dq_kernel[(batch * n_tokens, triton.cdiv(n_heads, block["BLOCK_H"]))](
        queries, latent, pool, start, entry_end, where.pointer, *angles, out.contiguous(), lse, grad,
        grad_lse.contiguous(), dq, delta, n_tokens, where.count, where.n_chosen, n_heads, where.stride, scale, window,
        where.ratio, ROPE=rope, **where.constants, **block,
        num_warps=used.num_warps, num_stages=used.dq,
    )  # fmt: skip

    def pulled(keys: Tensor, chosen: Tensor | None, in_window: bool) -> Tensor:
        splits = n_splits(keys.shape[1], batch, used.keys)
        part = torch.empty(splits, *keys.shape, dtype=torch.float32, device=q.device)
        # The documents of a row stand in order: the queries that may see an entry end where a later document starts.
        stop = start if in_window else torch.searchsorted(start, entry_end, right=True)
        _dkv_kernel[(triton.cdiv(keys.shape[1], used.keys), splits, batch)](
            queries, keys, start, start if in_window else entry_end, stop, start if chosen is None else chosen, *angles, lse,
            grad, delta, part, n_tokens, keys.shape[1], n_heads, 0 if chosen is None else chosen.shape[2], scale, window,
            width=width, ROPE=rope, ONE_QUERY=n_heads % BLOCK_R == 0, WINDOW=in_window, MASKED=chosen is not None,
            BLOCK_K=used.keys, BLOCK_R=BLOCK_R, BLOCK_C=block["BLOCK_C"], N_CHUNKS=block["N_CHUNKS"],
            num_warps=used.num_warps, num_stages=used.dkv,
        )  # fmt: skip
        return part.sum(0)

    dkv = pulled(latent, None, True).to(kv.dtype)
    if where.count:
        chosen = where.pointer if ids is None or not where.gather else scatter(ids.contiguous(), None, where.count)
        dentries = pulled(pool, None if ids is None else chosen, False).to(entries.dtype)
    else:
        dentries = torch.zeros(entries.shape, dtype=entries.dtype, device=entries.device)
    dsink = -(torch.exp(sink.float() - lse) * delta).sum((0, 1))
    return dq, dkv, dentries, dsink.to(sink.dtype)


sparse_attention_derotated_backward = sparse_attention_backward  # with the operator's last two arguments


def bytes_moved(
    batch: int, n_tokens: int, n_heads: int, width: int, n_entries: int, n_chosen: int, window: int, rotary: int = 0
) -> dict[str, int]:  # fmt: skip
    """What the backward with bf16 inputs loads and stores in memory, by part, from the tiles above.

    Keys and masks stay in a cache; q and dO together do not, and are counted as often as a tile of keys reads them.
    rotary: channels of the output that were rotated back.
    """
    rows, ratio = batch * n_tokens, n_tokens // n_entries
    wide, block_k = rows * n_heads * width * 2, PLANS["hip", 2].keys
    # q, dO, O, dq; lse, dlse, delta; ids, bytes; angles
    dq = 4 * wide + rows * (n_heads * 4 * 3 + n_chosen * 8 + n_entries * 2 + rotary * 4)
    queries_by_tile = (
        sum(min(n_tokens, first + block_k - 1 + window) - first for first in range(0, n_tokens, block_k)),
        sum(n_tokens - (ratio * (first + 1) - 1) for first in range(0, n_entries, block_k)),
    )
    window_keys, entry_keys = (batch * n * (n_heads * (2 * width * 2 + 8) + rotary * 4) for n in queries_by_tile)
    sums = sum(
        2 * n_splits(n, batch, block_k) * batch * n * width * 4 + batch * n * width * 2 for n in (n_tokens, n_entries)
    )
    return {"dq": dq, "window keys": window_keys, "entry keys": entry_keys, "sums": sums}
