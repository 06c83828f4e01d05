"""Triton kernels of ``dsv4::hc_pre`` for n = 4.

Forward: the streams of four tokens stay in the registers of 16 waves while the 24 rows of fn pass by, so that they are read
from memory once, for the projection, the norm and the collapse alike; the normalisations of comb are a second launch, one
token to a lane (:mod:`dsv4c.ops.triton.sinkhorn`).  Backward: the normalisations first; then the gradient of pre, one token
to a program; then the gradients of streams and fn in one more pass over the streams, fn's columns held in registers.
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

from dsv4c.ops.hyper_connection import plain_pre, plain_pre_backward
from dsv4c.ops.triton import sinkhorn as normalisations
from dsv4c.ops.triton.hc_post import load_streams, sum_four


@triton.jit
def tokens_streams(ptr, tokens, d, there, WIDTH: tl.constexpr):
    """The four streams of these tokens [T,D], as they are stored."""
    x = ()
    for j in tl.static_range(4):
        at = tokens.to(tl.int64)[:, None] * (4 * WIDTH) + j * WIDTH + d[None, :]
        x = x + (tl.load(ptr + at, mask=there[:, None] & (d < WIDTH)[None, :], other=0.0),)
    return x


@triton.jit
def _projected(x, fn_ptr, row, d, WIDTH: tl.constexpr):
    """``sum_j X_j fn_row,j`` [T,D], to be summed over D."""
    total = tl.zeros(x[0].shape, tl.float32)
    for j in tl.static_range(4):
        w = tl.load(fn_ptr + row * (4 * WIDTH) + j * WIDTH + d, mask=d < WIDTH, other=0.0)
        total += x[j].to(tl.float32) * w[None, :]
    return total


@triton.jit
def gates(
    x, tokens, there, d, fn_ptr, base_ptr, scale_ptr, u_ptr, post_ptr, logit_ptr, z_ptr, rstd_ptr, eps, norm_eps,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Of a block of tokens, x their four streams: norm and projection, u as soon as pre is known, post, comb's logits."""
    square = tl.zeros(x[0].shape, tl.float32)
    for j in tl.static_range(4):
        square += x[j].to(tl.float32) * x[j].to(tl.float32)
    rstd = tl.rsqrt(tl.sum(square, 1) / (4 * WIDTH) + norm_eps)
    tl.store(rstd_ptr + tokens, rstd, mask=there)
    u = tl.zeros(x[0].shape, tl.float32)
    scale = tl.load(scale_ptr)
    for j in tl.static_range(4):
        z = tl.sum(_projected(x, fn_ptr, j, d, WIDTH), 1) * rstd
        tl.store(z_ptr + tokens * 24 + j, z, mask=there)
        pre = tl.sigmoid(z * scale + tl.load(base_ptr + j)) + eps
        u += pre[:, None] * x[j].to(tl.float32)
    at = tokens.to(tl.int64)[:, None] * WIDTH + d[None, :]
    tl.store(u_ptr + at, u.to(u_ptr.dtype.element_ty), mask=there[:, None] & (d < WIDTH)[None, :])
    for row in range(4, 24):
        z = tl.sum(_projected(x, fn_ptr, row, d, WIDTH), 1) * rstd
        tl.store(z_ptr + tokens * 24 + row, z, mask=there)
        logit = z * tl.load(scale_ptr + tl.where(row < 8, 1, 2)) + tl.load(base_ptr + row)
        tl.store(post_ptr + tokens * 4 + row - 4, 2.0 * tl.sigmoid(logit), mask=there & (row < 8))
        tl.store(logit_ptr + tokens * 16 + row - 8, logit, mask=there & (row >= 8))


@triton.jit
def _forward_kernel(
    x_ptr, fn_ptr, base_ptr, scale_ptr, u_ptr, post_ptr, logit_ptr, z_ptr, rstd_ptr, n_tokens, eps, norm_eps,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """All that is needed of a block of tokens, from streams that are read once."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = tokens < n_tokens
    d = tl.arange(0, BLOCK_D)
    x = tokens_streams(x_ptr, tokens, d, there, WIDTH)
    gates(
        x, tokens, there, d, fn_ptr, base_ptr, scale_ptr, u_ptr, post_ptr, logit_ptr, z_ptr, rstd_ptr, eps, norm_eps, WIDTH
    )  # fmt: skip


@triton.jit
def logit_gradients(
    dpre, tokens, there, dpost_ptr, dmatrix_ptr, base_ptr, scale_ptr, z_ptr, rstd_ptr, da_ptr, dp_ptr, WIDTH: tl.constexpr
):  # fmt: skip
    """da [T,32] of the 24 logits, dpre being at the first four places; ``dp = da scale rstd`` and the norm's share."""
    row = tl.arange(0, 32)
    t, r = tokens[:, None], row[None, :]
    inside, at = there[:, None] & (r < 24), t * 24 + r
    z = tl.load(z_ptr + at, mask=inside, other=0.0)
    scale = tl.load(scale_ptr + tl.where(row < 4, 0, tl.where(row < 8, 1, 2)))
    gate = tl.sigmoid(z * scale[None, :] + tl.load(base_ptr + row, mask=row < 24, other=0.0)[None, :])
    dpost = tl.load(dpost_ptr + t * 4 + r - 4, mask=inside & (r >= 4) & (r < 8), other=0.0)
    dmatrix = tl.load(dmatrix_ptr + t * 16 + r - 8, mask=inside & (r >= 8), other=0.0)
    da = tl.where(r < 8, (dpre + 2.0 * dpost) * gate * (1.0 - gate), dmatrix)
    rstd = tl.load(rstd_ptr + tokens, mask=there, other=0.0)
    dz = da * scale[None, :]
    dp = dz * rstd[:, None]
    tl.store(da_ptr + at, da, mask=inside)
    tl.store(dp_ptr + at, dp, mask=inside)
    return dp, -tl.sum(dz * z, 1) * rstd * rstd / (4 * WIDTH)


@triton.jit
def _pre_grad_kernel(
    du_ptr, dpost_ptr, dmatrix_ptr, x_ptr, base_ptr, scale_ptr, z_ptr, rstd_ptr, da_ptr, dp_ptr, shrink_ptr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Per token: ``dpre_j = <du, X_j>``; then da of its 24 logits, ``dp = da scale rstd`` and the norm's share."""
    token = tl.program_id(0).to(tl.int64)
    dpre = tl.zeros([4], tl.float32)
    for first in range(0, WIDTH, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        x = load_streams(x_ptr + token * 4 * WIDTH, d, d < WIDTH, WIDTH)
        du = tl.load(du_ptr + token * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        dpre += sum_four(x[0] * du, x[1] * du, x[2] * du, x[3] * du)
    row, four, one = tl.arange(0, 32), tl.arange(0, 4), token + tl.arange(0, 1)
    spread = tl.sum(tl.where(row[:, None] == four[None, :], dpre[None, :], 0.0), 1)
    _, shrink = logit_gradients(
        spread[None, :], one, one >= 0, dpost_ptr, dmatrix_ptr, base_ptr, scale_ptr, z_ptr, rstd_ptr, da_ptr, dp_ptr, WIDTH
    )  # fmt: skip
    tl.store(shrink_ptr + one, shrink)


@triton.jit
def _stream_grad_kernel(
    du_ptr, x_ptr, fn_ptr, base_ptr, scale_ptr, z_ptr, dp_ptr, shrink_ptr, dx_ptr, part_ptr, n_tokens, tokens_each, eps,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """``dX_j = pre_j du + (dp fn)_j + shrink X_j`` and a part of ``dfn = dp^T X``.

    For some channels of one stream and a range of tokens; the programs of the four streams are neighbours and share du.
    """
    j = tl.program_id(0) % 4
    d = tl.program_id(0) // 4 * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.arange(0, 32)
    at_fn = row[:, None] * (4 * WIDTH) + j * WIDTH + d[None, :]
    fn_mask = (row < 24)[:, None] & (d < WIDTH)[None, :]
    fn = tl.load(fn_ptr + at_fn, mask=fn_mask, other=0.0)
    dfn = tl.zeros([32, BLOCK_D], tl.float32)
    scale, base = tl.load(scale_ptr), tl.load(base_ptr + j)
    first = tl.program_id(1) * tokens_each
    for t in range(first, tl.minimum(first + tokens_each, n_tokens), BLOCK_T):
        tokens = t + tl.arange(0, BLOCK_T)
        there = (tokens < n_tokens) & (tokens < first + tokens_each)
        mask = there[:, None] & (d < WIDTH)[None, :]
        du = tl.load(du_ptr + tokens.to(tl.int64)[:, None] * WIDTH + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dp = tl.load(dp_ptr + tokens[:, None] * 24 + row[None, :], mask=there[:, None] & (row < 24)[None, :], other=0.0)
        shrink = tl.load(shrink_ptr + tokens, mask=there, other=0.0)
        pre = tl.sigmoid(tl.load(z_ptr + tokens * 24 + j, mask=there, other=0.0) * scale + base) + eps
        at = (tokens.to(tl.int64) * 4 + j)[:, None] * WIDTH + d[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dx = tl.dot(dp, fn, pre[:, None] * du + shrink[:, None] * x, input_precision="ieee")
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dfn = tl.dot(tl.trans(dp), x, dfn, input_precision="ieee")
    tl.store(part_ptr + tl.program_id(1) * 24 * 4 * WIDTH + at_fn, dfn, mask=fn_mask)


def forward_constants(width: int, wave: int = 64) -> dict[str, Any]:
    """Compile-time arguments: 64 elements of the streams to each lane of 16 waves, which have 32 lanes on CUDA."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK_D": block, "BLOCK_T": max(1, min(16, 256 * wave // block))}


def pre_grad_constants(width: int) -> dict[str, Any]:
    return {"WIDTH": width, "BLOCK_D": min(2048, triton.next_power_of_2(width))}


def stream_grad_constants(width: int) -> dict[str, Any]:
    return {"WIDTH": width, "BLOCK_D": 64, "BLOCK_T": 16}


FORWARD_WARPS, PRE_GRAD_WARPS, STREAM_GRAD_WARPS = 16, 4, 4
LARGEST = 16384  # channels of a stream that the registers of 16 waves hold
SPLITS = 8  # ranges of tokens whose parts of dfn are added up at the end, in a fixed order


def fits(streams: Tensor, fn: Tensor) -> bool:
    """Whether the kernels take these: four streams that fit into registers, and no fp64."""
    return streams.shape[-2] == 4 and streams.shape[-1] <= LARGEST and torch.float64 not in (streams.dtype, fn.dtype)


def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator (:func:`dsv4c.ops.hyper_connection.hc_pre`); in plain torch where a token does not fit."""
    if not fits(streams, fn):
        return plain_pre(streams, fn, base, scale, iters, eps, norm_eps)
    batch, width, n_tokens = streams.shape[:-2], streams.shape[-1], streams.shape[:-2].numel()
    u = torch.empty((*batch, width), dtype=streams.dtype, device=streams.device)
    post, logits, z, rstd = (
        torch.empty((*batch, *shape), dtype=torch.float32, device=streams.device) for shape in ((4,), (4, 4), (24,), ())
    )
    if n_tokens:
        chosen = forward_constants(width, 64 if torch.version.hip else 32)
        _forward_kernel[(triton.cdiv(n_tokens, chosen["BLOCK_T"]),)](
            streams.contiguous(), fn.float().contiguous(), base.float().contiguous(), scale.float().contiguous(), u, post,
            logits, z, rstd, n_tokens, eps, norm_eps, **chosen, num_warps=FORWARD_WARPS,
        )  # fmt: skip
    return u, post, normalisations.sinkhorn(logits, iters, eps), z, rstd


def hc_pre_backward(
    grad: Tensor, grad_post: Tensor, grad_comb: Tensor, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, z: Tensor,
    rstd: Tensor, iters: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of streams, fn, base and scale."""
    if not fits(streams, fn):
        return plain_pre_backward(grad, grad_post, grad_comb, streams, fn, base, scale, z, rstd, iters, eps)
    width, n_tokens = streams.shape[-1], streams.shape[:-2].numel()
    streams, grad, grad_post, z = streams.contiguous(), grad.contiguous(), grad_post.contiguous(), z.contiguous()
    fn, base, scale = (p.float().contiguous() for p in (fn, base, scale))
    dx = torch.empty_like(streams)
    da, dp = torch.empty((2, n_tokens, 24), dtype=torch.float32, device=fn.device)
    shrink = torch.empty(n_tokens, dtype=torch.float32, device=fn.device)
    parts = torch.zeros((SPLITS, *fn.shape), dtype=torch.float32, device=fn.device)
    matrices = (z[..., 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4))
    dmatrices = normalisations.sinkhorn_backward(grad_comb, matrices, iters, eps)
    if n_tokens:
        _pre_grad_kernel[(n_tokens,)](
            grad, grad_post, dmatrices, streams, base, scale, z, rstd.contiguous(), da, dp, shrink,
            **pre_grad_constants(width), num_warps=PRE_GRAD_WARPS,
        )  # fmt: skip
        chosen = stream_grad_constants(width)
        _stream_grad_kernel[(4 * triton.cdiv(width, chosen["BLOCK_D"]), SPLITS)](
            grad, streams, fn, base, scale, z, dp, shrink, dx, parts, n_tokens, triton.cdiv(n_tokens, SPLITS), eps, **chosen,
            num_warps=STREAM_GRAD_WARPS,
        )  # fmt: skip
    by_logit = (da * z.view(-1, 24)).sum(0)
    dscale = torch.stack((by_logit[:4].sum(), by_logit[4:8].sum(), by_logit[8:].sum()))
    return dx, parts.sum(0), da.sum(0), dscale


def bytes_moved(n_tokens: int, width: int, itemsize: int = 2) -> dict[str, int]:
    """What the launches load and store.

    ``forward`` counts fn once for each of the eight caches of a part, which hold it whole; ``issued`` counts it for every
    program.  ``backward`` counts the streams twice, the gradient of u twice (neighbouring programs share it), and the parts
    of fn's gradient in and out.
    """
    streams, u, fn = 4 * n_tokens * width * itemsize, n_tokens * width * itemsize, 24 * 4 * width * 4
    small = n_tokens * (4 + 24 + 1 + 3 * 16) * 4
    programs = triton.cdiv(n_tokens, forward_constants(width)["BLOCK_T"])
    return {
        "forward": streams + u + small + 8 * fn,
        "issued": streams + u + small + programs * fn,
        "backward": 3 * streams + 2 * u + fn + 2 * SPLITS * fn + n_tokens * (8 * 24 + 4) * 4,
    }
