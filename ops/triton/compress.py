"""Triton kernels of ``dsv4::compress``: an entry and a block of channels to a program, every slot read once.

The slots of an entry, up to 128 of them, stay in registers between the maximum, the weights and the sum.  In the backward a
program walks through several entries, so that the gradient of ape leaves it as one part, to be added up in a fixed order.
"""

# Kernels are written in Triton's language, which has no annotations for its values.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4c.ops.compress import plain, plain_backward


@triton.jit
def _slots(
    value_ptr, logit_ptr, ape_ptr, first, has_previous, c, width, OVERLAP: tl.constexpr, RATIO: tl.constexpr,
    BLOCK_J: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """Values and logits [WINDOWS * BLOCK_J, C] of the slots of one entry, where they lie, and which of them there are.

    With overlap slots 0..J-1 are the window before and the first half of the channels, J..2J-1 its own and the second.
    """
    slot = tl.arange(0, WINDOWS * BLOCK_J)
    j = slot % BLOCK_J
    previous = slot < BLOCK_J if OVERLAP else slot < 0
    half = width // WINDOWS
    token = first + j - tl.where(previous, RATIO, 0)
    channel = c[None, :] + tl.where(previous, 0, width - half)[:, None]
    at = token.to(tl.int64)[:, None] * width + channel
    mask = ((j < RATIO) & ((previous == 0) | has_previous))[:, None] & (c < half)[None, :]
    v = tl.load(value_ptr + at, mask=mask, other=0.0).to(tl.float32)
    ape = tl.load(ape_ptr + j[:, None] * width + channel, mask=(j < RATIO)[:, None] & (c < half)[None, :], other=0.0)
    e = tl.load(logit_ptr + at, mask=mask, other=float("-inf")).to(tl.float32) + ape
    return v, e, at, mask


@triton.jit
def _weights(e):
    """The softmax over slots; a channel that is not there has no slot and takes zero for its peak."""
    peak = tl.max(e, 0)
    mass = tl.exp(e - tl.where(peak == float("-inf"), 0.0, peak)[None, :])
    total = tl.sum(mass, 0)
    return mass / tl.where(total == 0.0, 1.0, total)[None, :]


@triton.jit
def _forward_kernel(
    value_ptr, logit_ptr, ape_ptr, end_ptr, previous_ptr, out_ptr, n_tokens, n_entries, width,
    OVERLAP: tl.constexpr, RATIO: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """``entry = sum_slots softmax_slots(logits + ape) values``; zero for an entry that is not there."""
    entry = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    end = tl.load(end_ptr + entry)
    exists = end < n_tokens
    first = entry // n_entries * n_tokens + tl.where(exists, end - RATIO + 1, 0)
    has_previous = tl.load(previous_ptr + entry) != 0
    v, e, _, _ = _slots(
        value_ptr, logit_ptr, ape_ptr, first, has_previous & exists, c, width, OVERLAP, RATIO, BLOCK_J, WINDOWS
    )
    out = tl.sum(_weights(e) * v, 0)
    half = width // WINDOWS
    tl.store(out_ptr + entry * half + c, tl.where(exists, out, 0.0), mask=c < half)


@triton.jit
def _backward_kernel(
    grad_ptr, value_ptr, logit_ptr, ape_ptr, end_ptr, previous_ptr, out_ptr, dvalue_ptr, dlogit_ptr, part_ptr, n_tokens,
    n_entries, n_all, entries_each, width,
    OVERLAP: tl.constexpr, RATIO: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """``da_j = s_j G``, ``de_j = s_j (a_j - entry) G`` and a part of ``dape = sum de``."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    half = width // WINDOWS
    dape = tl.zeros([WINDOWS * BLOCK_J, BLOCK_C], tl.float32)
    start = tl.program_id(0) * entries_each
    for entry in range(start, tl.minimum(start + entries_each, n_all)):
        end = tl.load(end_ptr + entry)
        exists = end < n_tokens
        first = (entry // n_entries).to(tl.int64) * n_tokens + tl.where(exists, end - RATIO + 1, 0)
        has_previous = tl.load(previous_ptr + entry) != 0
        v, e, at, mask = _slots(
            value_ptr, logit_ptr, ape_ptr, first, has_previous & exists, c, width, OVERLAP, RATIO, BLOCK_J, WINDOWS
        )
        inside = (c < half) & exists
        grad = tl.load(grad_ptr + entry * half + c, mask=inside, other=0.0)
        out = tl.load(out_ptr + entry * half + c, mask=inside, other=0.0)
        da = _weights(e) * grad[None, :]
        de = tl.where(mask & exists, da * (v - out[None, :]), 0.0)
        tl.store(dvalue_ptr + at, da.to(dvalue_ptr.dtype.element_ty), mask=mask & exists)
        tl.store(dlogit_ptr + at, de.to(dlogit_ptr.dtype.element_ty), mask=mask & exists)
        dape += de
    slot = tl.arange(0, WINDOWS * BLOCK_J)
    j = slot % BLOCK_J
    shift = tl.where(slot < BLOCK_J, 0, width - half) if OVERLAP else tl.zeros_like(slot)
    to = tl.program_id(0) * RATIO * width + j[:, None] * width + c[None, :] + shift[:, None]
    tl.store(part_ptr + to, dape, mask=(j < RATIO)[:, None] & (c < half)[None, :])


WARPS = 4 if torch.version.hip else 8  # of 64 and 32 lanes


def constants(ratio: int, width: int, overlap: bool) -> dict[str, Any]:
    """The compile-time arguments of both kernels: 16 slots and channels to each of 256 lanes."""
    windows, block_j = 2 if overlap else 1, triton.next_power_of_2(ratio)
    half = triton.next_power_of_2(width // windows)
    block_c = min(half, max(16, min(256, 4096 // (windows * block_j))))
    return {"OVERLAP": overlap, "RATIO": ratio, "BLOCK_J": block_j, "BLOCK_C": block_c, "WINDOWS": windows}


PARTS = 64  # of the gradient of ape, added up in a fixed order


def fits(values: Tensor, logits: Tensor, ape: Tensor) -> bool:
    """Whether the kernels take these: windows whose slots fit into registers, and no fp64."""
    return ape.shape[0] <= 128 and torch.float64 not in (values.dtype, logits.dtype)


def compress(
    values: Tensor, logits: Tensor, ape: Tensor, entry_end: Tensor, has_previous: Tensor, overlap: bool
) -> Tensor:  # fmt: skip
    """The operator (:mod:`dsv4c.ops.compress`); in plain torch where a window does not fit."""
    if not fits(values, logits, ape):
        return plain(values, logits, ape, entry_end, has_previous, overlap)
    (ratio, width), n_tokens = ape.shape, values.shape[1]
    chosen = constants(ratio, width, overlap)
    half = width // chosen["WINDOWS"]
    out = torch.empty((*entry_end.shape, half), dtype=torch.float32, device=values.device)
    if out.numel():
        _forward_kernel[(entry_end.numel(), triton.cdiv(half, chosen["BLOCK_C"]))](
            values.contiguous(), logits.contiguous(), ape.float().contiguous(), entry_end.contiguous(),
            has_previous.contiguous(), out, n_tokens, entry_end.shape[1], width, **chosen, num_warps=WARPS,
        )  # fmt: skip
    return out


def compress_backward(
    grad: Tensor, values: Tensor, logits: Tensor, ape: Tensor, entry_end: Tensor, has_previous: Tensor, out: Tensor,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of values, logits and ape; tokens in no entry get zeros."""
    if not fits(values, logits, ape):
        return plain_backward(grad, values, logits, ape, entry_end, has_previous, out, overlap)
    (ratio, width), n_tokens, n_all = ape.shape, values.shape[1], entry_end.numel()
    dvalues, dlogits = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (values, logits))
    chosen = constants(ratio, width, overlap)
    each = max(1, triton.cdiv(n_all, PARTS))
    parts = torch.zeros((triton.cdiv(n_all, each), ratio, width), dtype=torch.float32, device=ape.device)
    if n_all:
        _backward_kernel[(len(parts), triton.cdiv(width // chosen["WINDOWS"], chosen["BLOCK_C"]))](
            grad.float().contiguous(), values.contiguous(), logits.contiguous(), ape.float().contiguous(),
            entry_end.contiguous(), has_previous.contiguous(), out.contiguous(), dvalues, dlogits, parts, n_tokens,
            entry_end.shape[1], n_all, each, width, **chosen, num_warps=WARPS,
        )  # fmt: skip
    return dvalues, dlogits, parts.sum(0)


def bytes_moved(n_tokens: int, ratio: int, width: int, overlap: bool, itemsize: int = 4) -> dict[str, int]:
    """What the launches load and store for one document; ape, which a cache holds, once."""
    entries, half = n_tokens // ratio, width // 2 if overlap else width
    inputs, outputs, ape = 2 * n_tokens * width * itemsize, entries * half * 4, ratio * width * 4
    parts = 2 * min(PARTS, entries) * ape
    return {"forward": inputs + outputs + ape, "backward": 3 * inputs + 2 * outputs + ape + parts}
