"""Triton kernel of ``dsv4::hadamard``: the butterflies of a block of rows, forward and back.

Each step splits the last axis in two, adds and subtracts, and joins the halves again in front: after log2(n) steps every
axis of length 2 has been transformed and the order is the first one again.  n log2(n) additions where a product with the
matrix takes n^2.
"""

# Kernels are written in Triton's language, which has no annotations for its values.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4c.ops.hadamard import check_width


@triton.jit
def _hadamard_kernel(x_ptr, out_ptr, n_rows, scale, N: tl.constexpr, STEPS: tl.constexpr, BLOCK_R: tl.constexpr):
    """x [n_rows,N] times the Sylvester matrix times scale."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = rows.to(tl.int64)[:, None] * N + tl.arange(0, N)[None, :]
    mask = (rows < n_rows)[:, None]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(STEPS):
        a, b = tl.split(tl.reshape(x, [BLOCK_R, N // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [BLOCK_R, N])
    tl.store(out_ptr + at, (x * scale).to(out_ptr.dtype.element_ty), mask=mask)


def constants(n: int) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    return {"N": n, "STEPS": n.bit_length() - 1, "BLOCK_R": max(1, 2048 // n)}


def hadamard(x: Tensor) -> Tensor:
    """The operator (:mod:`dsv4c.ops.hadamard`) on x in fp32, fp16 or bf16."""
    n = x.shape[-1]
    check_width(n)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        chosen, n_rows = constants(n), x.numel() // n
        grid = (triton.cdiv(n_rows, chosen["BLOCK_R"]),)
        _hadamard_kernel[grid](x.contiguous(), out, n_rows, n**-0.5, **chosen, num_warps=4)
    return out


def bytes_moved(rows: int, n: int, itemsize: int = 2) -> int:
    """What a launch loads and stores."""
    return 2 * rows * n * itemsize
