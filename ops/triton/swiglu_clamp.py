"""Triton kernels of ``dsv4::swiglu_clamp``: one pass over the rows forward, one back."""

# Kernels are written in Triton's language, which has no annotations for its values.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, out_ptr, width, limit,
    CLAMP: tl.constexpr, WEIGHED: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A block of channels of one row: ``w silu(min(g, limit)) clamp(u, -limit, limit)``."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = i < width
    g = tl.load(x_ptr + row * 2 * width + i, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(x_ptr + row * 2 * width + width + i, mask=mask, other=0.0).to(tl.float32)
    if CLAMP:  # by comparison: a minimum would turn NaN into the limit
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    hidden = g * tl.sigmoid(g) * u
    if WEIGHED:
        hidden *= tl.load(weight_ptr + row)
    tl.store(out_ptr + row * width + i, hidden.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, width, limit,
    CLAMP: tl.constexpr, WEIGHED: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """One row, a block of channels at a time, so that the weight's gradient is one sum in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row) if WEIGHED else 1.0
    total = tl.zeros([BLOCK_I], tl.float32)
    for first in range(0, width, BLOCK_I):
        i = first + tl.arange(0, BLOCK_I)
        mask = i < width
        at = row * 2 * width + i
        dy = tl.load(grad_ptr + row * width + i, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(x_ptr + at + width, mask=mask, other=0.0).to(tl.float32)
        over = g > limit
        beyond = (u > limit) | (u < -limit)
        if CLAMP:
            g = tl.where(over, limit, g)
            u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        gate = tl.sigmoid(g)
        silu = g * gate
        total += dy * silu * u
        dy *= weight
        dg = dy * u * (gate + silu * (1.0 - gate))
        du = dy * silu
        if CLAMP:
            dg = tl.where(over, 0.0, dg)
            du = tl.where(beyond, 0.0, du)
        tl.store(dx_ptr + at, dg.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + at + width, du.to(dx_ptr.dtype.element_ty), mask=mask)
    if WEIGHED:
        tl.store(dweight_ptr + row, tl.sum(total, 0))


def constants(width: int, limit: float, weighed: bool) -> dict[str, Any]:
    """The compile-time arguments of both kernels; a lane of four waves holds 8 neighbouring channels."""
    return {"CLAMP": limit > 0, "WEIGHED": weighed, "BLOCK_I": min(2048, triton.next_power_of_2(width))}


def swiglu_clamp(gate_up: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """The operator (:mod:`dsv4c.ops.swiglu_clamp`) on gate_up in fp32, fp16 or bf16."""
    n, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((n, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        chosen = constants(width, limit, weight is not None)
        _forward_kernel[(n, triton.cdiv(width, chosen["BLOCK_I"]))](
            gate_up.contiguous(), None if weight is None else weight.contiguous(), out, width, limit, **chosen, num_warps=4
        )
    return out


def swiglu_clamp_backward(grad: Tensor, gate_up: Tensor, weight: Tensor | None, limit: float) -> tuple[Tensor, Tensor]:
    """The gradients of gate_up and, if there is one, of the weight."""
    n, width = len(gate_up), gate_up.shape[1] // 2
    dx = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    dweight = torch.zeros(0 if weight is None else n, dtype=torch.float32, device=gate_up.device)
    if dx.numel():
        _backward_kernel[(n,)](
            grad.contiguous(), gate_up.contiguous(), None if weight is None else weight.contiguous(), dx, dweight, width,
            limit, **constants(width, limit, weight is not None), num_warps=4,
        )  # fmt: skip
    return dx, dweight


def bytes_moved(n: int, width: int, itemsize: int = 2) -> dict[str, int]:
    """What a launch loads and stores, with a weight."""
    return {"forward": n * width * itemsize * 3 + n * 4, "backward": n * width * itemsize * 5 + n * 8}
