"""Triton forward of ``dsv4::indexer_topk``: a program per query scores the entries it sees and keeps the best in registers.

Entries are scored a block at a time, heads summed on the spot; a chunk of scores is sorted and merged with the best so far,
bitonically and in registers.  No score is written but the selected ones.  Score and index are sorted as one 64-bit integer,
which makes the choice among equal scores the same every time.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel is typed by Triton's compiler.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scores(
    q_ptr, w_ptr, k_ptr, entries, seen, n_heads, width,
    BLOCK_H: tl.constexpr, H_BLOCKS: tl.constexpr, BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr,
):  # fmt: skip
    """``sum_h w_h relu(<q_h, k_p>)`` [entries] fp32, -inf where an entry is not to be seen."""
    score = tl.zeros([entries.shape[0]], tl.float32)
    for block in tl.static_range(H_BLOCKS):
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
        z = tl.zeros([entries.shape[0], BLOCK_H], tl.float32)
        for chunk in tl.static_range(N_CHUNKS):
            c = chunk * BLOCK_C + tl.arange(0, BLOCK_C)
            k_mask = seen[:, None] & (c < width)[None, :]
            k = tl.load(k_ptr + entries[:, None] * width + c[None, :], mask=k_mask, other=0.0)
            q_mask = (heads < n_heads)[:, None] & (c < width)[None, :]
            q = tl.load(q_ptr + heads[:, None] * width + c[None, :], mask=q_mask, other=0.0)
            z = tl.dot(k, tl.trans(q), z, input_precision="ieee")
        w = tl.load(w_ptr + heads, mask=heads < n_heads, other=0.0).to(tl.float32)
        # NaN has to survive the ReLU, as it does in torch: a comparison lets it pass, a maximum need not.
        score += tl.sum(tl.where(z <= 0.0, 0.0, z) * w[None, :], 1)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def _sortable(score, entries):
    """An int64 that is larger where the score is, or where the score is equal and the entry earlier; NaN above all."""
    bits = tl.where(score != score, 0x7FC00000, score.to(tl.int32, bitcast=True))
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - entries).to(tl.int64)


@triton.jit
def _topk_kernel(
    q_ptr, k_ptr, w_ptr, start_ptr, end_ptr, ids_ptr, best_ptr, n_tokens, n_entries, n_chosen, n_heads, ratio,
    width: tl.constexpr, BLOCK_H: tl.constexpr, H_BLOCKS: tl.constexpr, BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """ids [B,S,K] int64 and scores [B,S,K] fp32 of one query, best first; KEPT: a power of two of at least K."""
    row = tl.program_id(0).to(tl.int64)
    t = (row % n_tokens).to(tl.int32)
    q_ptr += row * n_heads * width
    w_ptr += row * n_heads
    k_ptr += row // n_tokens * n_entries * width
    end_ptr += row // n_tokens * n_entries
    start = tl.load(start_ptr + row).to(tl.int32)
    complete = tl.minimum(n_entries, (t + 1) // ratio)
    nth = tl.arange(0, KEPT // BLOCK_N)
    none = tl.full([KEPT], -(1 << 63), tl.int64)
    best = none
    for first in range(0, complete, KEPT):
        chunk = tl.reshape(none, [KEPT // BLOCK_N, BLOCK_N])
        for block in range(tl.cdiv(tl.minimum(complete - first, KEPT), BLOCK_N)):
            entries = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
            end = tl.load(end_ptr + entries, mask=entries < complete, other=-1).to(tl.int32)
            seen = (entries < complete) & (end <= t) & (end >= start)
            score = _scores(q_ptr, w_ptr, k_ptr, entries, seen, n_heads, width, BLOCK_H, H_BLOCKS, BLOCK_C, N_CHUNKS)
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


def tiles(n_heads: int, width: int) -> dict[str, int]:
    """Tiles of heads and channels."""
    block_h = min(64, max(16, triton.next_power_of_2(n_heads)))
    block_c = min(128, max(16, triton.next_power_of_2(width)))
    return {
        "width": width,
        "BLOCK_H": block_h,
        "H_BLOCKS": triton.cdiv(n_heads, block_h),
        "BLOCK_C": block_c,
        "N_CHUNKS": triton.cdiv(width, block_c),
    }


def indexer_topk(
    q: Tensor, k: Tensor, w: Tensor, start: Tensor, entry_end: Tensor, topk: int, ratio: int
) -> tuple[Tensor, Tensor]:
    """ids [B,S,min(K,P)] int64 and scores fp32, as :func:`dsv4c.ops.indexer_topk.indexer_topk` defines them.

    Inputs in fp32, fp16 or bf16.  Best first; among equal scores the earlier entry.
    """
    batch, n_tokens, n_heads, width = q.shape
    n_chosen = min(topk, k.shape[1])
    ids = torch.empty(batch, n_tokens, n_chosen, dtype=torch.int64, device=q.device)
    best = torch.empty(ids.shape, dtype=torch.float32, device=q.device)
    if ids.numel() == 0 or ratio == 0:
        return ids.fill_(-1), best.fill_(float("-inf"))
    dtype = torch.promote_types(q.dtype, k.dtype)
    block_n = min(BLOCK_N, max(16, triton.next_power_of_2(k.shape[1])))
    _topk_kernel[(batch * n_tokens,)](
        q.to(dtype).contiguous(), k.to(dtype).contiguous(), w.contiguous(), start.contiguous(), entry_end.contiguous(),
        ids, best, n_tokens, k.shape[1], n_chosen, n_heads, ratio, **tiles(n_heads, width), BLOCK_N=block_n,
        KEPT=max(block_n, triton.next_power_of_2(n_chosen)), num_warps=4, num_stages=1,
    )  # fmt: skip
    return ids, best


def bytes_moved(
    batch: int, n_tokens: int, n_heads: int, width: int, n_entries: int, n_chosen: int
) -> dict[str, int]:  # fmt: skip
    """What one launch with bf16 inputs loads and stores, from the tiles above.

    ``memory``: every tensor once, where what is read again (the keys and their ends, by every query) is small enough for a
    cache; ``issued``: all loads and stores, whichever level answers them.
    """
    rows, ratio = batch * n_tokens, n_tokens // n_entries
    own = rows * (n_heads * width * 2 + n_heads * 2 + 8 + n_chosen * (8 + 4))
    seen = sum(min(n_entries, (t + 1) // ratio) for t in range(n_tokens)) * batch
    return {"memory": own + batch * n_entries * (width * 2 + 8), "issued": own + seen * (width * 2 + 8)}
