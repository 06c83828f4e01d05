"""Triton forward of ``dsv4::indexer_topk``: a program per query scores the entries it sees and keeps the best in registers.

Entries are scored a block at a time, heads summed on the spot; a chunk of scores is sorted and merged with the best so far,
bitonically and in registers.  No score is written but the selected ones.  Score and index are sorted as one 64-bit integer,
which makes the choice among equal scores the same every time.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
# ruff: noqa: RUF005
# A kernel is typed by Triton's compiler, which has tuples that grow in a loop and no starred expressions.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4c.ops.triton.sparse_attention import rows_of, table, turned_operand


@triton.jit
def queries_at(
    q_ptr, w_ptr, cos_ptr, sin_ptr, row, first_head, n_heads, scale, width: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of a query, by chunk of channels, the last ROPE of them rotated, and their scaled weights in fp32."""
    heads = first_head + tl.arange(0, BLOCK_H)
    q = ()
    for i in tl.static_range(N_CHUNKS):
        x = rows_of(q_ptr + row * n_heads * width, heads, heads < n_heads, i * BLOCK_C, width, BLOCK_C)
        if ROPE > 0 and (i + 1) * BLOCK_C > width - ROPE:
            x = turned_operand(x, cos_ptr, sin_ptr, row + tl.arange(0, 1), i * BLOCK_C, width, ROPE)
        q = q + (x,)
    return q, tl.load(w_ptr + row * n_heads + heads, mask=heads < n_heads, other=0.0).to(tl.float32) * scale


@triton.jit
def _scores(
    q, w, k_ptr, entries, seen, width, H_BLOCKS: tl.constexpr, BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr
):  # fmt: skip
    """``sum_h w_h relu(<q_h, k_p>)`` [entries] fp32, -inf where an entry is not to be seen."""
    score = tl.zeros([entries.shape[0]], tl.float32)
    for block in tl.static_range(H_BLOCKS):
        z = tl.zeros([entries.shape[0], w[block].shape[0]], tl.float32)
        for i in tl.static_range(N_CHUNKS):
            k = rows_of(k_ptr, entries, seen, i * BLOCK_C, width, BLOCK_C)
            z = tl.dot(k, tl.trans(q[block][i]), z, input_precision="ieee")
        # NaN has to survive the ReLU, as it does in torch: a comparison lets it pass, a maximum need not.
        score += tl.sum(tl.where(z <= 0.0, 0.0, z) * w[block][None, :], 1)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def _sortable(score, entries):
    """An int64 that is larger where the score is, or where the score is equal and the entry earlier; NaN above all."""
    bits = tl.where(score != score, 0x7FC00000, score.to(tl.int32, bitcast=True))
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - entries).to(tl.int64)


@triton.jit
def _topk_kernel(
    q_ptr, k_ptr, w_ptr, cos_ptr, sin_ptr, start_ptr, end_ptr, ids_ptr, best_ptr, n_tokens, n_entries, n_chosen, n_heads,
    scale, ratio, width: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, H_BLOCKS: tl.constexpr,
    BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """ids [B,S,K] int64 and scores [B,S,K] fp32 of one query, best first; KEPT: a power of two of at least K."""
    row = tl.program_id(0).to(tl.int64)
    t = (row % n_tokens).to(tl.int32)
    k_ptr += row // n_tokens * n_entries * width
    end_ptr += row // n_tokens * n_entries
    start = tl.load(start_ptr + row).to(tl.int32)
    complete = tl.minimum(n_entries, (t + 1) // ratio)
    nth = tl.arange(0, KEPT // BLOCK_N)
    q = ()
    w = ()
    for i in tl.static_range(H_BLOCKS):
        queries, weights = queries_at(
            q_ptr, w_ptr, cos_ptr, sin_ptr, row, i * BLOCK_H, n_heads, scale, width, ROPE, BLOCK_H, BLOCK_C, N_CHUNKS
        )  # fmt: skip
        q = q + (queries,)
        w = w + (weights,)
    none = tl.full([KEPT], -(1 << 63), tl.int64)
    best = none
    for first in range(0, complete, KEPT):
        chunk = tl.reshape(none, [KEPT // BLOCK_N, BLOCK_N])
        for block in range(tl.cdiv(tl.minimum(complete - first, KEPT), BLOCK_N)):
            entries = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
            end = tl.load(end_ptr + entries, mask=entries < complete, other=-1).to(tl.int32)
            seen = (entries < complete) & (end <= t) & (end >= start)
            score = _scores(q, w, k_ptr, entries, seen, width, H_BLOCKS, BLOCK_C, N_CHUNKS)
            # Registers cannot be indexed: the block's row is chosen by comparison.
            chunk = tl.where((nth == block)[:, None], _sortable(score, entries)[None, :], chunk)
        ascending = tl.sort(tl.reshape(chunk, [KEPT]))
        # The larger of a falling and a rising sequence, element by element, holds the best of both and is bitonic.
        best = tl.bitonic_merge(tl.maximum(best, ascending), descending=True)
    ordered = (best >> 32).to(tl.int32)
    score = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    found = (best != none) & (score != float("-inf"))
    entry = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    slot = tl.arange(0, KEPT)
    tl.store(ids_ptr + row * n_chosen + slot, tl.where(found, entry, -1), mask=slot < n_chosen)
    tl.store(best_ptr + row * n_chosen + slot, tl.where(found, score, float("-inf")), mask=slot < n_chosen)


BLOCK_N = 64  # entries scored at a time


def tiles(n_heads: int, width: int, rotary: int, itemsize: int) -> dict[str, int]:
    """Tiles of heads and channels.

    Smaller ones in 16 bits if some channels turn, so that few others go through the rotation; in fp32 they would spill.
    """
    block_h = min(64, max(16, triton.next_power_of_2(n_heads)))
    block_c = min(64 if rotary and itemsize == 2 else 128, max(16, triton.next_power_of_2(width)))
    return {
        "width": width,
        "BLOCK_H": block_h,
        "H_BLOCKS": triton.cdiv(n_heads, block_h),
        "BLOCK_C": block_c,
        "N_CHUNKS": triton.cdiv(width, block_c),
    }


def _select(
    q: Tensor, k: Tensor, w: Tensor, cos: Tensor | None, sin: Tensor | None, start: Tensor, entry_end: Tensor,
    scale: float, topk: int, ratio: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, n_tokens, n_heads, width = q.shape
    n_chosen = min(topk, k.shape[1])
    ids = torch.empty(batch, n_tokens, n_chosen, dtype=torch.int64, device=q.device)
    best = torch.empty(ids.shape, dtype=torch.float32, device=q.device)
    if ids.numel() == 0 or ratio == 0:
        return ids.fill_(-1), best.fill_(float("-inf"))
    dtype = torch.promote_types(q.dtype, k.dtype)
    rope, angles = table(cos, sin, width, best)
    block_n = min(BLOCK_N, max(16, triton.next_power_of_2(k.shape[1])))
    _topk_kernel[(batch * n_tokens,)](
        q.to(dtype).contiguous(), k.to(dtype).contiguous(), w.contiguous(), *angles, start.contiguous(),
        entry_end.contiguous(), ids, best, n_tokens, k.shape[1], n_chosen, n_heads, scale, ratio,
        **tiles(n_heads, width, rope, dtype.itemsize), ROPE=rope, BLOCK_N=block_n,
        KEPT=max(block_n, triton.next_power_of_2(n_chosen)), num_warps=4, num_stages=1,
    )  # fmt: skip
    return ids, best


def indexer_topk(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, entry_end: Tensor, topk: int, ratio: int
) -> tuple[Tensor, Tensor]:
    """ids [B,S,min(K,P)] int64 and scores fp32, as :func:`dsv4c.ops.indexer_topk.indexer_topk` defines them.

    Inputs in fp32, fp16 or bf16.  Best first; among equal scores the earlier entry.
    """
    return _select(q, k, w, None, None, start, entry_end, 1.0, topk, ratio)


def indexer_select(
    q: Tensor, k: Tensor, w: Tensor, cos: Tensor, sin: Tensor, start: Tensor, entry_end: Tensor, temperature: float,
    topk: int, ratio: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same of queries that are rotated on the way, as :func:`dsv4c.ops.indexer_select.indexer_select` defines it.

    A rotated query enters the products in its own dtype; a scaled weight is fp32.
    """
    return _select(q, k, w, cos, sin, start, entry_end, temperature, topk, ratio)


def bytes_moved(
    batch: int, n_tokens: int, n_heads: int, width: int, n_entries: int, n_chosen: int, rotary: int = 0
) -> dict[str, int]:  # fmt: skip
    """What one launch with bf16 inputs loads and stores, from the tiles above; rotary: channels of q that it rotates.

    ``memory``: every tensor once, where what is read again (the keys and their ends, by every query) is small enough for a
    cache; ``issued``: all loads and stores, whichever level answers them.
    """
    rows, ratio = batch * n_tokens, n_tokens // n_entries
    own = rows * (n_heads * width * 2 + n_heads * 2 + rotary * 4 + 8 + n_chosen * (8 + 4))
    seen = sum(min(n_entries, (t + 1) // ratio) for t in range(n_tokens)) * batch
    return {"memory": own + batch * n_entries * (width * 2 + 8), "issued": own + seen * (width * 2 + 8)}
