"""Triton kernels of ``dsv4::hc_post`` for n = 4: one token to a program, the streams mixed by numbers held in scalars.

Forward and backward read and write every stream once.
"""

# Kernels are written in Triton's language, which has no annotations for its values and grows tuples.
# mypy: disable-error-code="no-untyped-def, assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4c.ops.hyper_connection import plain_post, plain_post_backward


@triton.jit
def _scalars(ptr, COUNT: tl.constexpr):
    x = ()
    for i in tl.static_range(COUNT):
        x = x + (tl.load(ptr + i).to(tl.float32),)
    return x


@triton.jit
def load_streams(ptr, d, mask, WIDTH: tl.constexpr):
    """The four streams of a token at channels d, in fp32."""
    x = ()
    for j in tl.static_range(4):
        x = x + (tl.load(ptr + j * WIDTH + d, mask=mask, other=0.0).to(tl.float32),)
    return x


@triton.jit
def sum_four(a, b, c, d):
    """The sums of four vectors [N] as one vector [4]: one exchange between waves where four sums take four."""
    return tl.sum(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], 4]), 0)


@triton.jit
def _forward_kernel(y_ptr, x_ptr, post_ptr, comb_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """``X'_k = post_k y + sum_j comb_jk X_j``."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < WIDTH
    post, comb = _scalars(post_ptr + token * 4, 4), _scalars(comb_ptr + token * 16, 16)
    y = tl.load(y_ptr + token * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    x = load_streams(x_ptr + token * 4 * WIDTH, d, mask, WIDTH)
    for k in tl.static_range(4):
        mixed = post[k] * y + comb[k] * x[0] + comb[4 + k] * x[1] + comb[8 + k] * x[2] + comb[12 + k] * x[3]
        tl.store(out_ptr + (token * 4 + k) * WIDTH + d, mixed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, y_ptr, x_ptr, post_ptr, comb_ptr, dy_ptr, dx_ptr, dpost_ptr, dcomb_ptr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``dy = sum_k post_k g_k``, ``dX_j = sum_k comb_jk g_k``, ``dpost_k = <y, g_k>``, ``dcomb_jk = <X_j, g_k>``."""
    token = tl.program_id(0).to(tl.int64)
    post, comb = _scalars(post_ptr + token * 4, 4), _scalars(comb_ptr + token * 16, 16)
    dpost = tl.zeros([4], tl.float32)
    dcomb = (dpost, dpost, dpost, dpost)
    for first in range(0, WIDTH, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        mask = d < WIDTH
        g = load_streams(grad_ptr + token * 4 * WIDTH, d, mask, WIDTH)
        y = tl.load(y_ptr + token * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
        dy = post[0] * g[0] + post[1] * g[1] + post[2] * g[2] + post[3] * g[3]
        tl.store(dy_ptr + token * WIDTH + d, dy.to(dy_ptr.dtype.element_ty), mask=mask)
        dpost += sum_four(y * g[0], y * g[1], y * g[2], y * g[3])
        grown = ()
        for j in tl.static_range(4):
            at = (token * 4 + j) * WIDTH + d
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            dx = comb[4 * j] * g[0] + comb[4 * j + 1] * g[1] + comb[4 * j + 2] * g[2] + comb[4 * j + 3] * g[3]
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            grown = grown + (dcomb[j] + sum_four(x * g[0], x * g[1], x * g[2], x * g[3]),)
        dcomb = grown
    k = tl.arange(0, 4)
    tl.store(dpost_ptr + token * 4 + k, dpost)
    for j in tl.static_range(4):
        tl.store(dcomb_ptr + token * 16 + 4 * j + k, dcomb[j])


def constants(width: int, backward: bool) -> dict[str, Any]:
    """The kernels' compile-time arguments: 8 channels of every stream to a lane."""
    return {"WIDTH": width, "BLOCK_D": min(4096 if backward else 2048, triton.next_power_of_2(width))}


FORWARD_WARPS, BACKWARD_WARPS = 4, 8


def fits(y: Tensor, streams: Tensor) -> bool:
    """Whether the kernels take these: four streams, and no fp64."""
    return streams.shape[-2] == 4 and torch.float64 not in (y.dtype, streams.dtype)


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The operator (:func:`dsv4c.ops.hyper_connection.hc_post`); in plain torch where there are not four streams."""
    if not fits(y, streams):
        return plain_post(y, streams, post, comb)
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if out.numel():
        width = streams.shape[-1]
        chosen = constants(width, backward=False)
        _forward_kernel[(out.numel() // (4 * width), triton.cdiv(width, chosen["BLOCK_D"]))](
            y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), out, **chosen,
            num_warps=FORWARD_WARPS,
        )  # fmt: skip
    return out


def hc_post_backward(
    grad: Tensor, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of y, streams, post and comb."""
    if not fits(y, streams):
        return plain_post_backward(grad, y, streams, post, comb)
    dy, dx, dpost, dcomb = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (y, streams, post, comb))
    width = streams.shape[-1]
    if dx.numel():
        _backward_kernel[(dx.numel() // (4 * width),)](
            grad.contiguous(), y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), dy, dx, dpost,
            dcomb, **constants(width, backward=True), num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    return dy, dx, dpost, dcomb


def bytes_moved(n_tokens: int, width: int, itemsize: int = 2) -> dict[str, int]:
    """What a launch loads and stores, the 20 numbers a token once for each of its programs."""
    chunks = triton.cdiv(width, constants(width, backward=False)["BLOCK_D"])
    return {
        "forward": n_tokens * (9 * width * itemsize + chunks * 20 * 4),
        "backward": n_tokens * (14 * width * itemsize + 40 * 4),
    }
