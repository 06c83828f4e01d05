"""Triton forward of ``dsv4::sparse_attention``: a program per query and 64 heads; a latent tile is read once for both roles.

The channels are cut into chunks of 128, so that the 64 x 512 accumulator and the queries stay in registers and only a chunk
passes through local memory at a time.  Entries are visited in order with a mask where selection prunes little, and by id
where it prunes much (:func:`prunes_much`).
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
# ruff: noqa: RUF005
# A kernel is typed by Triton's compiler, which has tuples that grow in a loop and no starred expressions.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4c.ops.triton.scatter import scatter


@triton.jit
def rows_of(ptr, rows, seen, first_channel, width, BLOCK_C: tl.constexpr):
    """Channels first_channel.. of these rows of a [rows,c] tensor; 0 where a row is not seen or a channel not there."""
    c = first_channel + tl.arange(0, BLOCK_C)
    return tl.load(ptr + rows[:, None] * width + c[None, :], mask=seen[:, None] & (c < width)[None, :], other=0.0)


@triton.jit
def turn(x, cos_ptr, sin_ptr, rows, first_channel, width, sign, ROPE: tl.constexpr):
    """Neighbouring pairs of the last ROPE channels turned by the angles of ``rows`` (sign -1: back), others as they are.

    x [n,BLOCK_C] fp32; cos and sin [rows,ROPE/2]; rows [n] or [1].
    """
    n: tl.constexpr = x.shape[0]
    pairs: tl.constexpr = x.shape[1] // 2
    pair = first_channel // 2 + tl.arange(0, pairs) - (width - ROPE) // 2
    turned = ((pair >= 0) & (pair < ROPE // 2))[None, :]
    place = rows[:, None] * (ROPE // 2) + pair[None, :]
    cos = tl.load(cos_ptr + place, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + place, mask=turned, other=0.0) * sign
    a, b = tl.split(tl.reshape(x, [n, pairs, 2]))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), [n, 2 * pairs])


@triton.jit
def turned_operand(x, cos_ptr, sin_ptr, rows, first_channel, width, ROPE: tl.constexpr):
    """``turn`` of what enters a product, in x's dtype.

    The sum over an axis of one element adds nothing.  It keeps the compiler from moving the product's layout in front of
    the rotation, where every wave would turn all rows and not its own: 1.3 times the instructions of a whole loop.
    """
    turned = turn(x.to(tl.float32), cos_ptr, sin_ptr, rows, first_channel, width, 1.0, ROPE)
    return tl.sum(turned.to(x.dtype)[:, :, None], 2)


@triton.jit
def entries_at(
    first, t, start, end_ptr, ids_ptr, n_entries, n_chosen,
    GATHER: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Indices of a tile of entries, and which of them query t attends to.

    ``ids_ptr``: the query's ids (GATHER; ``first`` counts slots), or its row of selection bytes (MASKED), or unused.
    """
    place = first + tl.arange(0, BLOCK_N)
    if GATHER:
        entry = tl.load(ids_ptr + place, mask=place < n_chosen, other=-1).to(tl.int32)
        seen = entry >= 0
    else:
        entry, seen = place, place < n_entries
        if MASKED:
            seen = tl.load(ids_ptr + entry, mask=seen, other=0) != 0
    end = tl.load(end_ptr + entry, mask=seen, other=-1).to(tl.int32)
    return entry, seen & (end <= t) & (end >= start)


@triton.jit
def n_places(
    t, ids_ptr, n_entries, n_chosen, ratio, GATHER: tl.constexpr, MAX_CHOSEN: tl.constexpr
):  # fmt: skip
    """How many slots (GATHER) or entries have to be visited: none after the last id, none that cannot be complete at t."""
    if GATHER:
        slot = tl.arange(0, MAX_CHOSEN)
        ids = tl.load(ids_ptr + slot, mask=slot < n_chosen, other=-1)
        return tl.max(tl.where(ids >= 0, slot + 1, 0))
    return tl.minimum(n_entries, (t + 1) // ratio)


@triton.jit
def _attend(q, mixed, peak, total, ptr, rows, seen, width, scale, BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr):
    """One tile of keys into the running softmax: new (mixed values by chunk, peak, total)."""
    z = tl.zeros([peak.shape[0], rows.shape[0]], tl.float32)
    keys = ()
    for i in tl.static_range(N_CHUNKS):
        k = rows_of(ptr, rows, seen, i * BLOCK_C, width, BLOCK_C)
        z = tl.dot(q[i], tl.trans(k), z, input_precision="ieee")
        keys = keys + (k,)
    z = tl.where(seen[None, :], z * scale, float("-inf"))
    higher = tl.maximum(peak, tl.max(z, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(peak - safe)
    weights = tl.exp(z - safe[:, None])
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(keys[0].dtype)
    grown = ()
    for i in tl.static_range(N_CHUNKS):
        grown = grown + (tl.dot(weights, keys[i], mixed[i] * shrink[:, None], input_precision="ieee"),)
    return grown, higher, total


@triton.jit
def _forward_kernel(
    q_ptr, kv_ptr, entry_ptr, sink_ptr, start_ptr, end_ptr, ids_ptr, cos_ptr, sin_ptr, out_ptr, lse_ptr,
    n_tokens, n_entries, n_chosen, n_heads, ids_stride, scale, window, ratio,
    width: tl.constexpr, ROPE: tl.constexpr, GATHER: tl.constexpr, MASKED: tl.constexpr, MAX_CHOSEN: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, N_CHUNKS: tl.constexpr,
):  # fmt: skip
    """o [B,S,H,c] and lse [B,S,H] of one query and BLOCK_H heads."""
    row = tl.program_id(0).to(tl.int64)
    t = (row % n_tokens).to(tl.int32)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = heads < n_heads
    q_ptr += row * n_heads * width
    out_ptr += row * n_heads * width
    kv_ptr += (row - t) * width
    entry_ptr += row // n_tokens * n_entries * width
    end_ptr += row // n_tokens * n_entries
    ids_ptr += row * ids_stride
    start = tl.load(start_ptr + row).to(tl.int32)
    q = ()
    mixed = ()
    for i in tl.static_range(N_CHUNKS):
        q = q + (rows_of(q_ptr, heads, there, i * BLOCK_C, width, BLOCK_C),)
        mixed = mixed + (tl.zeros([BLOCK_H, BLOCK_C], tl.float32),)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for s in range(tl.maximum(t - window + 1, start), t + 1, BLOCK_N):
        tokens = s + tl.arange(0, BLOCK_N)
        mixed, peak, total = _attend(
            q, mixed, peak, total, kv_ptr, tokens, tokens <= t, width, scale, BLOCK_C, N_CHUNKS
        )  # fmt: skip
    for p in range(0, n_places(t, ids_ptr, n_entries, n_chosen, ratio, GATHER, MAX_CHOSEN), BLOCK_N):
        entry, seen = entries_at(p, t, start, end_ptr, ids_ptr, n_entries, n_chosen, GATHER, MASKED, BLOCK_N)
        mixed, peak, total = _attend(q, mixed, peak, total, entry_ptr, entry, seen, width, scale, BLOCK_C, N_CHUNKS)
    sink = tl.load(sink_ptr + heads, mask=there, other=float("-inf")).to(tl.float32)
    # The window holds the query itself, so that peak is finite, also where a sink is -inf.
    highest = tl.maximum(peak, sink)
    total = total * tl.exp(peak - highest) + tl.exp(sink - highest)
    share = tl.exp(peak - highest) / total
    tl.store(lse_ptr + row * n_heads + heads, highest + tl.log(total), mask=there)
    for i in tl.static_range(N_CHUNKS):
        c = i * BLOCK_C + tl.arange(0, BLOCK_C)
        out = mixed[i] * share[:, None]
        if ROPE > 0 and (i + 1) * BLOCK_C > width - ROPE:
            out = turn(out, cos_ptr, sin_ptr, row + tl.arange(0, 1), i * BLOCK_C, width, -1.0, ROPE)
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + heads[:, None] * width + c[None, :], out, mask=there[:, None] & (c < width)[None, :])


def prunes_much(n_entries: int, n_chosen: int) -> bool:
    """Whether fewer than half of the entries can be selected: below that a causal query sees at most 1.3 times as many."""
    return n_entries > 2 * n_chosen


class Plan(NamedTuple):
    """Heads of a query's program, keys of a tile of the backward, and waves and pipeline stages of the three kernels."""

    heads: int
    keys: int
    num_warps: int
    forward: int
    dq: int
    dkv: int


# By backend and bytes of an element: what compiles without a spill at c = 512. A lane of an AMD GPU has 512 registers and
# 4 waves fill them; a thread of an NVIDIA GPU has 255.
PLANS = {
    ("hip", 2): Plan(heads=64, keys=64, num_warps=4, forward=2, dq=2, dkv=1),
    ("hip", 4): Plan(heads=32, keys=32, num_warps=4, forward=1, dq=1, dkv=1),
    ("cuda", 2): Plan(heads=64, keys=64, num_warps=8, forward=2, dq=2, dkv=2),
    ("cuda", 4): Plan(heads=32, keys=32, num_warps=8, forward=1, dq=1, dkv=1),
}


def plan(dtype: torch.dtype) -> Plan:
    """The plan for inputs of this dtype on the GPUs that this torch is built for."""
    return PLANS["hip" if torch.version.hip else "cuda", dtype.itemsize]


def tiles(n_heads: int, width: int, most_heads: int) -> dict[str, int]:
    """Tiles of heads, keys and channels."""
    block_c = min(128, max(16, triton.next_power_of_2(width)))
    return {
        "width": width,
        "BLOCK_H": min(most_heads, max(16, triton.next_power_of_2(n_heads))),
        "BLOCK_N": 16,
        "BLOCK_C": block_c,
        "N_CHUNKS": triton.cdiv(width, block_c),
    }


class Entries:
    """How a kernel finds the entries of a query: by id, by a byte per entry, or all of them.

    ``pointer`` and ``stride``: of the query's ids or bytes; ``constants``: the compile-time arguments that say so.
    """

    def __init__(self, ids: Tensor | None, n_entries: int, ratio: int, unused: Tensor) -> None:
        self.count, self.ratio = (n_entries, ratio) if ratio else (0, 1)
        self.n_chosen = 0 if ids is None else ids.shape[2]
        self.gather = ids is not None and prunes_much(n_entries, self.n_chosen)
        if ids is None:
            self.pointer = unused
        else:
            self.pointer = ids.contiguous() if self.gather else scatter(ids.contiguous(), None, n_entries)
        self.stride = 0 if ids is None else self.pointer.shape[2]
        self.constants: dict[str, Any] = {
            "GATHER": self.gather,
            "MASKED": ids is not None and not self.gather,
            "MAX_CHOSEN": triton.next_power_of_2(max(1, self.n_chosen)) if self.gather else 1,
        }


def table(cos: Tensor | None, sin: Tensor | None, width: int, unused: Tensor) -> tuple[int, tuple[Tensor, Tensor]]:
    """How many of ``width`` channels turn, and cos and sin as a kernel reads them, or something in their place."""
    if cos is None or sin is None:
        return 0, (unused, unused)
    assert width % 2 == 0, "a pair begins at an even channel"
    return 2 * cos.shape[-1], (cos.float().contiguous(), sin.float().contiguous())


def sparse_attention(
    q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor, entry_end: Tensor, ids: Tensor | None,
    scale: float, window: int, ratio: int, cos: Tensor | None = None, sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B,S,H,c] and lse [B,S,H] fp32, as :func:`dsv4c.ops.sparse_attention.sparse_attention` defines them.

    Inputs in fp32, fp16 or bf16; ids without repetition.  With cos and sin [B,S,r/2] fp32 the last r channels of o are
    rotated back in the same pass: ``rope(o, cos, sin, inverse=True)``, rounded once.
    """
    batch, n_tokens, n_heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    dtype = torch.promote_types(torch.promote_types(q.dtype, kv.dtype), entries.dtype)
    latent, pool = kv.to(dtype).contiguous(), entries.to(dtype).contiguous()
    queries, start = q.to(dtype).contiguous(), start.contiguous()
    where = Entries(ids, entries.shape[1], ratio, start)
    chosen = plan(dtype)
    block = tiles(n_heads, width, chosen.heads)
    rope, angles = table(cos, sin, width, sink)
    _forward_kernel[(batch * n_tokens, triton.cdiv(n_heads, block["BLOCK_H"]))](
        queries, latent, pool, sink.contiguous(), start, entry_end.contiguous(), where.pointer, *angles, out, lse,
        n_tokens, where.count, where.n_chosen, n_heads, where.stride, scale, window, where.ratio,
        ROPE=rope, **where.constants, **block,
        num_warps=chosen.num_warps, num_stages=chosen.forward,
    )  # fmt: skip
    return out, lse


sparse_attention_derotated = sparse_attention  # with the operator's last two arguments


def bytes_moved(
    batch: int, n_tokens: int, n_heads: int, width: int, n_entries: int, n_chosen: int, window: int, rotary: int = 0
) -> dict[str, int]:  # fmt: skip
    """What the forward with bf16 inputs loads and stores, from the tiles above; rotary: channels that it rotates back.

    ``memory``: every tensor once, where what is read again (latent and entries, by every query) is small enough for a cache;
    ``issued``: all loads and stores, whichever level answers them.
    """
    rows, ratio, by_id = batch * n_tokens, n_tokens // n_entries, prunes_much(n_entries, n_chosen)
    own = rows * (2 * n_heads * width * 2 + n_heads * 4 + rotary * 4 + 8)
    found = rows * n_chosen * 8 + (0 if by_id else 2 * rows * n_entries + rows * n_chosen)  # ids; bytes cleared, set, read
    latent = batch * ((n_tokens + n_entries) * width * 2 + n_entries * 8)
    seen = 0
    for t in range(n_tokens):
        entries = (t + 1) // ratio
        seen += 16 * (triton.cdiv(min(window, t + 1), 16) + triton.cdiv(min(entries, n_chosen) if by_id else entries, 16))
    return {"memory": own + found + latent, "issued": own + found + batch * seen * width * 2}
