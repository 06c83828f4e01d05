"""Triton kernel of ``dsv4::rope``: a block of rows to a program, forward and back.

A lane loads neighbouring channels and turns its own pairs (``tl.split``, ``tl.join``), so that nothing crosses lanes and
every access is 16 bytes wide.  The operator is functional and writes every channel; where a caller gives its tensor up,
:func:`rope_in_place` moves the rotated channels only, an eighth of the bytes at 64 of 512.
"""

# Kernels are written in Triton's language, which has no annotations for its values.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rope_kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr, n_rows, N_HEADS: tl.constexpr, WIDTH: tl.constexpr, SIGN: tl.constexpr,
    ROTARY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_ROTARY: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """``a, b -> a cos - b sin, a sin + b cos`` in the last ROTARY channels of rows [n_rows,WIDTH]; SIGN -1 turns back.

    COPY: the other channels too, from x to out.
    """
    first = tl.program_id(0) * BLOCK_R
    rows = first + tl.arange(0, BLOCK_R)
    channels = tl.arange(0, BLOCK_ROTARY)
    row = rows.to(tl.int64)[:, None] * WIDTH
    if COPY:
        for c in tl.static_range(0, WIDTH - ROTARY, BLOCK_ROTARY):
            plain = row + c + channels[None, :]
            kept = (rows < n_rows)[:, None] & (c + channels < WIDTH - ROTARY)[None, :]
            tl.store(out_ptr + plain, tl.load(x_ptr + plain, mask=kept), mask=kept)
    at = row + (WIDTH - ROTARY) + channels[None, :]
    mask = (rows < n_rows)[:, None] & (channels < ROTARY)[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    pairs = tl.arange(0, BLOCK_ROTARY // 2)
    # Rows of one token share their angles: a block within a token reads them once.
    tokens = first // N_HEADS + tl.arange(0, 1) if N_HEADS % BLOCK_R == 0 else rows // N_HEADS
    angle = tokens[:, None] * (ROTARY // 2) + pairs[None, :]
    there = (tokens * N_HEADS < n_rows)[:, None] & (pairs < ROTARY // 2)[None, :]
    cos = tl.load(cos_ptr + angle, mask=there, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=there, other=0.0) * SIGN
    a, b = tl.split(tl.reshape(x.to(tl.float32), [BLOCK_R, BLOCK_ROTARY // 2, 2]))
    turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), [BLOCK_R, BLOCK_ROTARY])
    tl.store(out_ptr + at, turned.to(out_ptr.dtype.element_ty), mask=mask)


def constants(n_heads: int, width: int, rotary: int, inverse: bool, copy: bool) -> dict[str, Any]:
    """The kernel's compile-time arguments; a wave of 64 lanes holds 32 rows of 64 rotated channels in 50 registers."""
    block = triton.next_power_of_2(rotary)
    return {
        "N_HEADS": n_heads,
        "WIDTH": width,
        "SIGN": -1 if inverse else 1,
        "ROTARY": rotary,
        "BLOCK_R": max(1, 2048 // block),
        "BLOCK_ROTARY": block,
        "COPY": copy,
    }


def _launch(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    n_heads, width = x.shape[2] if x.dim() == 4 else 1, x.shape[-1]
    n_rows = x.numel() // max(width, 1)
    if x.numel():
        chosen = constants(n_heads, width, 2 * cos.shape[-1], inverse, out is not x)
        grid = (triton.cdiv(n_rows, chosen["BLOCK_R"]),)
        _rope_kernel[grid](x, out, cos.float().contiguous(), sin.float().contiguous(), n_rows, **chosen, num_warps=1)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """The operator (:mod:`dsv4c.ops.rope`) on x in fp32, fp16 or bf16."""
    x = x.contiguous()
    return _launch(x, torch.empty_like(x), cos, sin, inverse)


def rope_in_place(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """The same, written into x, which is contiguous and given up by its owner."""
    assert x.is_contiguous()
    return _launch(x, x, cos, sin, inverse)


def bytes_moved(rows: int, n_heads: int, width: int, rotary: int, itemsize: int = 2, copy: bool = True) -> int:
    """What a launch loads and stores: x in and out, and the two tables once a block of rows (once a row with one head)."""
    block_r = constants(n_heads, width, rotary, False, copy)["BLOCK_R"]
    shared = block_r if n_heads % block_r == 0 else 1
    return rows * (width if copy else rotary) * itemsize * 2 + rows // shared * rotary * 4
