"""Triton backward of ``dsv4::indexer_topk``, over the selected entries only and without atomics.

dq and dw by a program per query, which gathers the selected keys.  dk by a program per tile of keys, which visits the
queries that can see them; there the gradient of the scores is wanted by entry and not by slot, so it is spread out to
[queries, P], one block of queries after the other.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc, var-annotated"
# ruff: noqa: RUF005
# A kernel is typed by Triton's compiler, which has tuples that grow in a loop and no starred expressions.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4c.ops.triton.indexer_topk import queries_at, tiles
from dsv4c.ops.triton.scatter import scatter
from dsv4c.ops.triton.sparse_attention import table, turn


@triton.jit
def _dq_kernel(
    grad_ptr, ids_ptr, q_ptr, k_ptr, w_ptr, cos_ptr, sin_ptr, dq_ptr, dw_ptr, n_tokens, n_entries, n_chosen, n_heads, scale,
    width: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, H_BLOCKS: tl.constexpr, BLOCK_C: tl.constexpr,
    N_CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, MAX_CHOSEN: tl.constexpr,
):  # fmt: skip
    """``dw_h = s sum_p g relu(z)`` and ``dq_h = s sum_p g w_h [z > 0] k_p`` of one query and BLOCK_H heads, turned back."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = heads < n_heads
    k_ptr += row // n_tokens * n_entries * width
    ids_ptr += row * n_chosen
    grad_ptr += row * n_chosen
    place = row * n_heads * width + heads[:, None] * width
    slots = tl.arange(0, MAX_CHOSEN)
    chosen = tl.load(ids_ptr + slots, mask=slots < n_chosen, other=-1)
    q, w = queries_at(
        q_ptr, w_ptr, cos_ptr, sin_ptr, row, tl.program_id(1) * BLOCK_H, n_heads, scale, width, ROPE, BLOCK_H, BLOCK_C,
        N_CHUNKS,
    )  # fmt: skip
    dq = ()
    for _ in tl.static_range(N_CHUNKS):
        dq = dq + (tl.zeros([BLOCK_H, BLOCK_C], tl.float32),)
    dw = tl.zeros([BLOCK_H], tl.float32)
    for first in range(0, tl.max(tl.where(chosen >= 0, slots + 1, 0)), BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)
        entry = tl.load(ids_ptr + slot, mask=slot < n_chosen, other=-1).to(tl.int32)
        g = tl.load(grad_ptr + slot, mask=entry >= 0, other=0.0).to(tl.float32)
        z = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        keys = ()
        for i in tl.static_range(N_CHUNKS):
            c = i * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            k = tl.load(k_ptr + entry[:, None] * width + c, mask=(entry >= 0)[:, None] & (c < width), other=0.0)
            z = tl.dot(q[i], tl.trans(k), z, input_precision="ieee")
            keys = keys + (k,)
        dw += tl.sum(tl.where(z <= 0.0, 0.0, z) * g[None, :], 1)
        dz = tl.where(z > 0.0, w[:, None] * g[None, :], 0.0).to(keys[0].dtype)
        grown = ()
        for i in tl.static_range(N_CHUNKS):
            grown = grown + (tl.dot(dz, keys[i], dq[i], input_precision="ieee"),)
        dq = grown
    tl.store(dw_ptr + row * n_heads + heads, (dw * scale).to(dw_ptr.dtype.element_ty), mask=there)
    for i in tl.static_range(N_CHUNKS):
        c = i * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        back = dq[i]
        if ROPE > 0 and (i + 1) * BLOCK_C > width - ROPE:
            back = turn(back, cos_ptr, sin_ptr, row + tl.arange(0, 1), i * BLOCK_C, width, -1.0, ROPE)
        tl.store(dq_ptr + place + c, back.to(dq_ptr.dtype.element_ty), mask=there[:, None] & (c < width))


@triton.jit
def _dk_kernel(
    spread_ptr, q_ptr, k_ptr, w_ptr, cos_ptr, sin_ptr, part_ptr, first_query, n_queries, n_tokens, n_entries, n_heads, scale,
    ratio, width: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, H_BLOCKS: tl.constexpr, BLOCK_C: tl.constexpr,
    N_CHUNKS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Adds ``s sum_th g_tp w_th [z_thp > 0] q_th`` of a block of queries to one split's part [splits,B,P,c] fp32.

    ``spread``: the gradient of the scores by entry, [B,n_queries,P] fp32, 0 where an entry was not selected.
    """
    batch = tl.program_id(2).to(tl.int64)
    keys = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = keys < n_entries
    spread_ptr += batch * n_queries * n_entries
    part_ptr += (tl.program_id(1) * tl.num_programs(2) + batch) * n_entries * width
    low = tl.maximum((tl.program_id(0) * BLOCK_K + 1) * ratio - 1, first_query)
    high = first_query + n_queries
    share = tl.cdiv(tl.maximum(high - low, 0), tl.num_programs(1))
    low += tl.program_id(1) * share
    high = tl.minimum(high, low + share)
    k = ()
    dk = ()
    for i in tl.static_range(N_CHUNKS):
        c = i * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        place = keys[:, None] * width + c
        mask = there[:, None] & (c < width)
        k = k + (tl.load(k_ptr + batch * n_entries * width + place, mask=mask, other=0.0),)
        dk = dk + (tl.load(part_ptr + place, mask=mask, other=0.0),)
    for step in range(low * H_BLOCKS, high * H_BLOCKS):
        t = step // H_BLOCKS
        row = batch * n_tokens + t
        g = tl.load(spread_ptr + (t - first_query).to(tl.int64) * n_entries + keys, mask=there, other=0.0)
        queries, w = queries_at(
            q_ptr, w_ptr, cos_ptr, sin_ptr, row, step % H_BLOCKS * BLOCK_H, n_heads, scale, width, ROPE, BLOCK_H, BLOCK_C,
            N_CHUNKS,
        )  # fmt: skip
        z = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
        for i in tl.static_range(N_CHUNKS):
            z = tl.dot(k[i], tl.trans(queries[i]), z, input_precision="ieee")
        dz = tl.where(z > 0.0, g[:, None] * w[None, :], 0.0).to(queries[0].dtype)
        grown = ()
        for i in tl.static_range(N_CHUNKS):
            grown = grown + (tl.dot(dz, queries[i], dk[i], input_precision="ieee"),)
        dk = grown
    for i in tl.static_range(N_CHUNKS):
        c = i * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        tl.store(part_ptr + keys[:, None] * width + c, dk[i], mask=there[:, None] & (c < width))


QUERIES = 1024  # whose score gradients are spread out at a time
BLOCK_N = 32  # selected keys of a step
BLOCK_K = {2: 128, 4: 64}  # keys of a tile, by bytes of an element: 32 KB of them, as much again of queries


def n_splits(n_entries: int, batch: int, block_k: int) -> int:
    """Programs that share a tile of keys: together about as many as a large GPU has compute units, at most 16 a tile."""
    return max(1, min(16, 256 // (batch * triton.cdiv(n_entries, block_k))))


def _backward(
    grad: Tensor, ids: Tensor, q: Tensor, k: Tensor, w: Tensor, cos: Tensor | None, sin: Tensor | None, scale: float,
    ratio: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, n_tokens, n_heads, width = q.shape
    n_entries, n_chosen = k.shape[1], ids.shape[2]
    dq, dw = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, w))
    if ids.numel() == 0 or q.numel() == 0:
        return dq.zero_(), torch.zeros_like(k, memory_format=torch.contiguous_format), dw.zero_()
    dtype = torch.promote_types(q.dtype, k.dtype)
    queries, keys, weights = q.to(dtype).contiguous(), k.to(dtype).contiguous(), w.contiguous()
    ids, grad = ids.contiguous(), grad.float().contiguous()
    rope, angles = table(cos, sin, width, grad)
    block = tiles(n_heads, width, rope, dtype.itemsize) | {"ROPE": rope}
    _dq_kernel[(batch * n_tokens, block["H_BLOCKS"])](
        grad, ids, queries, keys, weights, *angles, dq, dw, n_tokens, n_entries, n_chosen, n_heads, scale, **block,
        BLOCK_N=BLOCK_N, MAX_CHOSEN=triton.next_power_of_2(n_chosen), num_warps=4, num_stages=2,
    )  # fmt: skip
    block_k = BLOCK_K[dtype.itemsize]
    splits = n_splits(n_entries, batch, block_k)
    part = torch.zeros(splits, batch, n_entries, width, dtype=torch.float32, device=q.device)
    for first in range(0, n_tokens, QUERIES):
        n_queries = min(QUERIES, n_tokens - first)
        spread = scatter(ids, grad, n_entries, first, n_queries)
        _dk_kernel[(triton.cdiv(n_entries, block_k), splits, batch)](
            spread, queries, keys, weights, *angles, part, first, n_queries, n_tokens, n_entries, n_heads, scale, ratio,
            **block, BLOCK_K=block_k, num_warps=8, num_stages=1,
        )  # fmt: skip
    return dq, part.sum(0).to(k.dtype), dw


def indexer_topk_backward(
    grad: Tensor, ids: Tensor, q: Tensor, k: Tensor, w: Tensor, ratio: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and w, as :func:`dsv4c.ops.indexer_topk.indexer_topk_backward` defines them.

    ids without repetition; entry p is taken to be visible from token ``ratio (p + 1) - 1`` on, the earliest there can be.
    """
    return _backward(grad, ids, q, k, w, None, None, 1.0, ratio)


def indexer_select_backward(
    grad: Tensor, ids: Tensor, q: Tensor, k: Tensor, w: Tensor, cos: Tensor, sin: Tensor, temperature: float, ratio: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of unrotated q, k and unscaled w, as :func:`dsv4c.ops.indexer_select.indexer_select_backward` has them."""
    return _backward(grad, ids, q, k, w, cos, sin, temperature, ratio)


def bytes_moved(
    batch: int, n_tokens: int, n_heads: int, width: int, n_entries: int, n_chosen: int, rotary: int = 0
) -> dict[str, int]:  # fmt: skip
    """What the backward with bf16 inputs loads and stores in memory, by part, from the tiles above.

    Keys stay in a cache; q does not, and is counted as often as a tile of keys reads it.  rotary: channels of q that turn.
    """
    rows, ratio, block_k = batch * n_tokens, n_tokens // n_entries, BLOCK_K[2]
    dq = rows * (2 * n_heads * (width + 1) * 2 + n_chosen * (8 + 4) + rotary * 4)
    blocks = triton.cdiv(n_tokens, QUERIES)
    visits = sum(n_tokens - (ratio * (first + 1) - 1) for first in range(0, n_entries, block_k))
    spread = rows * (n_chosen * (8 + 4 + 4) + n_entries * 4) + batch * visits * block_k * 4  # cleared, set; read by tile
    part = n_splits(n_entries, batch, block_k) * batch * n_entries * width * 4
    sums = (2 * blocks + 2) * part + batch * n_entries * width * 2
    return {"dq": dq, "keys": batch * visits * (n_heads * (width + 1) * 2 + rotary * 4) + spread, "sums": sums}
