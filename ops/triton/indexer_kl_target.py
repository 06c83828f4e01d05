"""Triton kernel of ``dsv4::indexer_kl_target``, and of ``dsv4::indexer_distillation``, which adds a tail to it.

One program per query, head sum inside, entries gathered by id.  Of the queries' logits only a [heads, entries] tile exists
at a time.  Entries are read from the pool where their ids say; a query whose last ids are -1 stops early, so that the work
follows the causal triangle.  With the tail the row of the teacher goes from registers into loss and gradient.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel is typed by Triton's compiler.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4c.ops.indexer_distillation import plain
from dsv4c.ops.indexer_kl import GUARD
from dsv4c.ops.triton.indexer_kl import divergence


@triton.jit
def _logits(q_ptr, entry_ptr, heads, ids, width, scale, n_heads, BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr):
    """``scale <q_h, entry_id>`` [heads, ids] fp32, a chunk of channels at a time; -inf where there is no entry or head."""
    z = tl.zeros([heads.shape[0], ids.shape[0]], tl.float32)
    for chunk in tl.static_range(N_CHUNKS):
        c = chunk * BLOCK_C + tl.arange(0, BLOCK_C)
        q_mask = (heads < n_heads)[:, None] & (c < width)[None, :]
        q = tl.load(q_ptr + heads[:, None] * width + c[None, :], mask=q_mask, other=0.0)
        k_mask = (ids >= 0)[:, None] & (c < width)[None, :]
        k = tl.load(entry_ptr + ids[:, None] * width + c[None, :], mask=k_mask, other=0.0)
        z = tl.dot(q, tl.trans(k), z, input_precision="ieee")
    return tl.where((heads < n_heads)[:, None] & (ids >= 0)[None, :], z * scale, float("-inf"))


@triton.jit
def _target_kernel(
    q_ptr, entry_ptr, ids_ptr, lse_ptr, score_ptr, real_ptr, loss_ptr, out_ptr, n_tokens, n_entries, n_chosen, n_heads,
    scale, width: tl.constexpr, JOINT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    N_CHUNKS: tl.constexpr, N_BLOCKS: tl.constexpr, TAIL: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Of one query: mass of every slot, then the division by their sum, which is T; or, with TAIL, its loss and gradient."""
    row = tl.program_id(0).to(tl.int64)
    q_ptr += row * n_heads * width
    entry_ptr += row // n_tokens * n_entries * width
    ids_ptr += row * n_chosen
    slots = tl.arange(0, N_BLOCKS * BLOCK_N)
    chosen = tl.load(ids_ptr + slots, mask=slots < n_chosen, other=-1)
    n_blocks = tl.cdiv(tl.max(tl.where(chosen >= 0, slots + 1, 0)), BLOCK_N)
    nth = tl.arange(0, N_BLOCKS)
    mass = tl.zeros([N_BLOCKS, BLOCK_N], tl.float32)
    for first_head in range(0, n_heads, BLOCK_H):
        heads = first_head + tl.arange(0, BLOCK_H)
        if JOINT:
            lse = tl.load(lse_ptr + row * n_heads + heads, mask=heads < n_heads, other=0.0)
        else:
            peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            for block in range(n_blocks):
                slot = block * BLOCK_N + tl.arange(0, BLOCK_N)
                ids = tl.load(ids_ptr + slot, mask=slot < n_chosen, other=-1).to(tl.int32)
                z = _logits(q_ptr, entry_ptr, heads, ids, width, scale, n_heads, BLOCK_C, N_CHUNKS)
                higher = tl.maximum(peak, tl.max(z, 1))
                safe = tl.where(higher == float("-inf"), 0.0, higher)
                total = total * tl.exp(peak - safe) + tl.sum(tl.exp(z - safe[:, None]), 1)
                peak = higher
            lse = tl.where(total > 0, peak + tl.log(total), 0.0)
        for block in range(n_blocks):
            slot = block * BLOCK_N + tl.arange(0, BLOCK_N)
            ids = tl.load(ids_ptr + slot, mask=slot < n_chosen, other=-1).to(tl.int32)
            z = _logits(q_ptr, entry_ptr, heads, ids, width, scale, n_heads, BLOCK_C, N_CHUNKS)
            part = tl.sum(tl.exp(z - lse[:, None]), 0)
            # Registers cannot be indexed: the block's row is chosen by comparison, which costs K/256 additions a lane.
            mass += tl.where((nth == block)[:, None], part[None, :], 0.0)
    total_mass = tl.maximum(tl.sum(tl.sum(mass, 1), 0), 1.1754943508222875e-38)
    if TAIL:
        target = tl.reshape(mass / total_mass, [N_BLOCKS * BLOCK_N])
        inside = slots < n_chosen
        scores = tl.load(score_ptr + row * n_chosen + slots, mask=inside, other=float("-inf")).to(tl.float32)
        loss, grad = divergence(scores, target, tl.load(real_ptr + row) != 0, GUARD)
        tl.store(loss_ptr + row, loss)
        tl.store(out_ptr + row * n_chosen + slots, grad, mask=inside)
    else:
        slot = nth[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(out_ptr + row * n_chosen + slot, mass / total_mass, mask=slot < n_chosen)


LARGEST = 4096  # slots of a row that four waves hold in registers through the tail


def constants(n_heads: int, width: int, n_chosen: int, joint: bool, tail: bool = False) -> dict[str, Any]:
    """The kernel's compile-time arguments for these shapes; the tile of 16 entries leaves room for three waves a SIMD."""
    block_c = min(128, max(16, triton.next_power_of_2(width)))
    return {
        "width": width,
        "JOINT": joint,
        "BLOCK_H": min(64, max(16, triton.next_power_of_2(n_heads))),
        "BLOCK_N": 16,
        "BLOCK_C": block_c,
        "N_CHUNKS": triton.cdiv(width, block_c),
        "N_BLOCKS": triton.next_power_of_2(triton.cdiv(n_chosen, 16)),
        "TAIL": tail,
        "GUARD": GUARD,
    }


def _launch(
    q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scale: float, out: Tensor, tail: tuple[Tensor, ...] = ()
) -> None:  # fmt: skip
    """tail: scores, real and the losses of the rows."""
    batch, n_tokens, n_heads, width = q.shape
    dtype = torch.promote_types(q.dtype, entries.dtype)
    q, entries, ids = q.to(dtype).contiguous(), entries.to(dtype).contiguous(), ids.contiguous()
    _target_kernel[(batch * n_tokens,)](
        q, entries, ids, None if lse is None else lse.float().contiguous(),
        *((t.contiguous() for t in tail) if tail else (None, None, None)), out,
        n_tokens, entries.shape[1], ids.shape[2], n_heads, scale,
        **constants(n_heads, width, ids.shape[2], lse is not None, bool(tail)), num_warps=4, num_stages=2,
    )  # fmt: skip


def indexer_kl_target(q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scale: float, ratio: int) -> Tensor:
    """T [B,S,K] fp32, as :func:`dsv4c.ops.indexer_kl_target.indexer_kl_target` defines it; inputs in fp32, fp16 or bf16."""
    target = torch.empty(ids.shape, dtype=torch.float32, device=q.device)
    if target.numel():
        _launch(q, entries, ids, lse, scale, target)
    return target


def indexer_distillation(
    q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scores: Tensor, real: Tensor, scale: float, ratio: int
) -> tuple[Tensor, Tensor]:
    """Loss and dscores [B,S,K] fp32 (:mod:`dsv4c.ops.indexer_distillation`); in plain torch where a row does not fit."""
    if ids.shape[2] > LARGEST:
        return plain(q, entries, ids, lse, scores, real, scale, ratio)
    losses = torch.zeros(real.shape, dtype=torch.float32, device=q.device)
    dscores = torch.empty(scores.shape, dtype=torch.float32, device=q.device)
    if dscores.numel():
        _launch(q, entries, ids, lse, scale, dscores, (scores, real, losses))
    return losses.sum(), dscores


def bytes_moved(batch: int, n_tokens: int, n_heads: int, width: int, n_entries: int, n_chosen: int) -> dict[str, int]:
    """What one launch with bf16 inputs loads and stores, from the tiles above.

    ``memory``: every tensor once, where what is read again (entries, by every query) is small enough for a cache;
    ``issued``: all loads and stores, whichever level answers them, with ids of 1 .. n_chosen visible entries a query;
    ``tail``: what indexer_distillation adds to both, fp32 scores, a flag a row, and the rows' losses, written and summed.
    """
    rows = batch * n_tokens
    q, ids, lse, out = rows * n_heads * width * 2, rows * n_chosen * 8, rows * n_heads * 4, rows * n_chosen * 4
    ratio = n_tokens // n_entries
    gathered = sum(16 * triton.cdiv(min(n_chosen, (t + 1) // ratio), 16) for t in range(n_tokens)) * batch
    return {
        "memory": q + ids + lse + out + batch * n_entries * width * 2,
        "issued": q + 2 * ids + lse + out + gathered * width * 2,
        "tail": rows * n_chosen * 4 + rows * (1 + 4 * 2) + 4,
    }
