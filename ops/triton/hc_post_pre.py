"""Triton kernels of ``dsv4::hc_post_pre`` for n = 4.

Forward: a few tokens to a program of 16 waves, whose registers hold the new streams from the mixing on, through norm,
projection and collapse: they are written once and not read.  Backward: the same tokens, from the gradient of pre through
that of the new streams, which stays in registers and is never written, to the gradients of y and of the old streams; and,
since it sums over all tokens, the gradient of fn in a pass of its own.  The normalisations of comb are one launch each way.
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

from dsv4c.ops.hc_post_pre import Backward, Forward, plain, plain_backward
from dsv4c.ops.triton import hc_post, hc_pre
from dsv4c.ops.triton import sinkhorn as normalisations
from dsv4c.ops.triton.hc_pre import SPLITS, gates, logit_gradients, tokens_streams


@triton.jit
def _forward_kernel(
    y_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, base_ptr, scale_ptr, new_ptr, u_ptr, new_post_ptr, logit_ptr, z_ptr, rstd_ptr,
    n_tokens, eps, norm_eps, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """``X'_k = post_k y + sum_j comb_jk X_j`` of a block of tokens, rounded; then what hc_pre does with them."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = tokens < n_tokens
    d = tl.arange(0, BLOCK_D)
    row, mask = tokens.to(tl.int64)[:, None], there[:, None] & (d < WIDTH)[None, :]
    y = tl.load(y_ptr + row * WIDTH + d[None, :], mask=mask, other=0.0).to(tl.float32)
    mixed = ()
    for k in tl.static_range(4):
        mixed = mixed + (tl.load(post_ptr + tokens * 4 + k, mask=there, other=0.0)[:, None] * y,)
    # A loop, not its body four times: the compiler would load all streams before it adds the first.
    for j in range(4):
        x = tl.load(x_ptr + row * (4 * WIDTH) + j * WIDTH + d[None, :], mask=mask, other=0.0).to(tl.float32)
        grown = ()
        for k in tl.static_range(4):
            comb = tl.load(comb_ptr + tokens * 16 + 4 * j + k, mask=there, other=0.0)
            grown = grown + (mixed[k] + comb[:, None] * x,)
        mixed = grown
    new = ()
    for k in tl.static_range(4):
        rounded = mixed[k].to(new_ptr.dtype.element_ty)
        tl.store(new_ptr + row * (4 * WIDTH) + k * WIDTH + d[None, :], rounded, mask=mask)
        new = new + (rounded,)
    gates(
        new, tokens, there, d, fn_ptr, base_ptr, scale_ptr, u_ptr, new_post_ptr, logit_ptr, z_ptr, rstd_ptr, eps, norm_eps,
        WIDTH,
    )  # fmt: skip


@triton.jit
def _sum_four(a, b, c, d):
    """The sums over D of four tiles [T,D] as one [T,4]: one exchange between waves where four sums take four."""
    return tl.sum(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], a.shape[1], 4]), 1)


@triton.jit
def _add_row(projected, da, tokens, there, d, rstd, fn_ptr, scale_ptr, z_ptr, da_ptr, dp_ptr, r, kind, WIDTH: tl.constexpr):
    """Keeps da and ``dp = da scale rstd`` of logit r; returns ``dp fn`` with its row, and ``<dz, z>`` with its part."""
    dz = da * tl.load(scale_ptr + kind)
    dp = dz * rstd
    tl.store(da_ptr + tokens * 24 + r, da, mask=there)
    tl.store(dp_ptr + tokens * 24 + r, dp, mask=there)
    grown = ()
    for k in tl.static_range(4):
        w = tl.load(fn_ptr + r * (4 * WIDTH) + k * WIDTH + d, mask=d < WIDTH, other=0.0)
        grown = grown + (projected[k] + dp[:, None] * w[None, :],)
    return grown, dz * tl.load(z_ptr + tokens * 24 + r, mask=there, other=0.0)


@triton.jit
def _backward_kernel(
    grad_ptr, du_ptr, dnew_post_ptr, dmatrix_ptr, y_ptr, x_ptr, post_ptr, comb_ptr, new_ptr, fn_ptr, base_ptr, scale_ptr,
    z_ptr, rstd_ptr, dy_ptr, dx_ptr, dpost_ptr, dcomb_ptr, da_ptr, dp_ptr, n_tokens, eps,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """``g_j = dX'_j + (pre_j du + (dp fn)_j + shrink X'_j)``, both terms and the sum rounded; then hc_post's gradients."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = tokens < n_tokens
    d = tl.arange(0, BLOCK_D)
    row, mask = tokens.to(tl.int64)[:, None], there[:, None] & (d < WIDTH)[None, :]
    du = tl.load(du_ptr + row * WIDTH + d[None, :], mask=mask, other=0.0)
    dpre = tl.zeros([BLOCK_T], tl.float32)
    dpre = (dpre, dpre, dpre, dpre)
    for j in range(4):
        x = tl.load(new_ptr + row * (4 * WIDTH) + j * WIDTH + d[None, :], mask=mask, other=0.0)
        found = tl.sum(du.to(tl.float32) * x.to(tl.float32), 1)
        grown = ()
        for k in tl.static_range(4):
            grown = grown + (tl.where(j == k, found, dpre[k]),)
        dpre = grown
    rstd = tl.load(rstd_ptr + tokens, mask=there, other=0.0)
    shared = tl.zeros([BLOCK_T], tl.float32)
    projected = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    projected = (projected, projected, projected, projected)
    for r in range(8):
        logit = tl.load(z_ptr + tokens * 24 + r, mask=there, other=0.0) * tl.load(scale_ptr + r // 4) + tl.load(base_ptr + r)
        gate = tl.sigmoid(logit)
        of_pre = tl.where(r < 2, tl.where(r == 0, dpre[0], dpre[1]), tl.where(r == 2, dpre[2], dpre[3]))
        of_post = 2.0 * tl.load(dnew_post_ptr + tokens * 4 + r - 4, mask=there & (r >= 4), other=0.0)
        da = tl.where(r < 4, of_pre, of_post) * gate * (1.0 - gate)
        projected, part = _add_row(
            projected, da, tokens, there, d, rstd, fn_ptr, scale_ptr, z_ptr, da_ptr, dp_ptr, r, r // 4, WIDTH
        )
        shared += part
    for r in range(8, 24):
        da = tl.load(dmatrix_ptr + tokens * 16 + r - 8, mask=there, other=0.0)
        projected, part = _add_row(
            projected, da, tokens, there, d, rstd, fn_ptr, scale_ptr, z_ptr, da_ptr, dp_ptr, r, 2, WIDTH
        )
        shared += part
    shrink = -shared * rstd * rstd / (4 * WIDTH)
    scale = tl.load(scale_ptr)
    rounded = ()
    dy = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for k in tl.static_range(4):
        tl.debug_barrier()
        at = row * (4 * WIDTH) + k * WIDTH + d[None, :]
        # The streams again, from a cache: they and the sums are more than there are registers.
        new = tl.load(new_ptr + at, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + tokens * 24 + k, mask=there, other=0.0)
        pre = tl.sigmoid(z * scale + tl.load(base_ptr + k)) + eps
        total = (pre[:, None] * du.to(tl.float32) + shrink[:, None] * new + projected[k]).to(new_ptr.dtype.element_ty)
        if ADDED:
            other = tl.load(grad_ptr + at, mask=mask, other=0.0)
            total = (total.to(tl.float32) + other.to(tl.float32)).to(new_ptr.dtype.element_ty)
        rounded = rounded + (total,)
        dy += tl.load(post_ptr + tokens * 4 + k, mask=there, other=0.0)[:, None] * total.to(tl.float32)
    at = row * WIDTH + d[None, :]
    tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty), mask=mask)
    y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    four = tl.arange(0, 4)[None, :]
    dpost = _sum_four(
        y * rounded[0].to(tl.float32), y * rounded[1].to(tl.float32), y * rounded[2].to(tl.float32),
        y * rounded[3].to(tl.float32),
    )  # fmt: skip
    tl.store(dpost_ptr + tokens[:, None] * 4 + four, dpost, mask=there[:, None])
    for j in range(4):  # not four times its body, whose addresses would stay in registers from the first loads on
        dx = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for k in tl.static_range(4):
            comb = tl.load(comb_ptr + tokens * 16 + 4 * j + k, mask=there, other=0.0)
            dx += comb[:, None] * rounded[k].to(tl.float32)
        at = row * (4 * WIDTH) + j * WIDTH + d[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dcomb = _sum_four(
            x * rounded[0].to(tl.float32), x * rounded[1].to(tl.float32), x * rounded[2].to(tl.float32),
            x * rounded[3].to(tl.float32),
        )  # fmt: skip
        tl.store(dcomb_ptr + tokens[:, None] * 16 + 4 * j + four, dcomb, mask=there[:, None])


@triton.jit
def _fn_grad_kernel(
    x_ptr, dp_ptr, part_ptr, n_tokens, tokens_each, ALL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """A part of ``dfn = dp^T X'``, for some of the n D channels and a range of tokens."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.arange(0, 32)
    dfn = tl.zeros([32, BLOCK_D], tl.float32)
    first = tl.program_id(1) * tokens_each
    last = tl.minimum(first + tokens_each, n_tokens)
    for t in range(first, last, BLOCK_T):
        tokens = t + tl.arange(0, BLOCK_T)
        there = tokens < last
        dp = tl.load(dp_ptr + tokens[None, :] * 24 + row[:, None], mask=there[None, :] & (row < 24)[:, None], other=0.0)
        at = tokens.to(tl.int64)[:, None] * ALL + d[None, :]
        x = tl.load(x_ptr + at, mask=there[:, None] & (d < ALL)[None, :], other=0.0)
        dfn = tl.dot(dp, x.to(tl.float32), dfn, input_precision="ieee")
    at = row.to(tl.int64)[:, None] * ALL + d[None, :]
    mask = (row < 24)[:, None] & (d < ALL)[None, :]
    tl.store(part_ptr + tl.program_id(1).to(tl.int64) * 24 * ALL + at, dfn, mask=mask)


def constants(width: int, itemsize: int, wave: int = 64) -> dict[str, Any]:
    """Compile-time arguments of the kernels that hold tokens: half as many where streams take twice the registers."""
    chosen = hc_pre.forward_constants(width, wave)
    return chosen | {"BLOCK_T": max(1, chosen["BLOCK_T"] * 2 // itemsize)}


def fn_grad_constants(width: int) -> dict[str, Any]:
    return {"ALL": 4 * width, "BLOCK_D": 128, "BLOCK_T": 32}


WARPS, FN_GRAD_WARPS = 16, 4


def fits(y: Tensor, streams: Tensor, fn: Tensor) -> bool:
    """Whether the kernels take these."""
    return hc_pre.fits(streams, fn) and hc_post.fits(y, streams)


def _constants(streams: Tensor) -> dict[str, Any]:
    return constants(streams.shape[-1], streams.element_size(), 64 if torch.version.hip else 32)


def hc_post_pre(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float,
    norm_eps: float,
) -> Forward:  # fmt: skip
    """The operator (:func:`dsv4c.ops.hc_post_pre.hc_post_pre`); in plain torch where a token does not fit."""
    if not fits(y, streams, fn):
        return plain(y, streams, post, comb, fn, base, scale, iters, eps, norm_eps)
    batch, width, n_tokens = streams.shape[:-2], streams.shape[-1], streams.shape[:-2].numel()
    new_streams = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    u = torch.empty((*batch, width), dtype=streams.dtype, device=streams.device)
    new_post, logits, z, rstd = (
        torch.empty((*batch, *shape), dtype=torch.float32, device=streams.device) for shape in ((4,), (4, 4), (24,), ())
    )
    if n_tokens:
        chosen = _constants(streams)
        _forward_kernel[(triton.cdiv(n_tokens, chosen["BLOCK_T"]),)](
            y.contiguous(), streams.contiguous(), *(t.float().contiguous() for t in (post, comb, fn, base, scale)),
            new_streams, u, new_post, logits, z, rstd, n_tokens, eps, norm_eps, **chosen, num_warps=WARPS,
        )  # fmt: skip
    return new_streams, u, new_post, normalisations.sinkhorn(logits, iters, eps), z, rstd


def hc_post_pre_backward(
    grad_streams: Tensor | None, grad_u: Tensor, grad_post: Tensor, grad_comb: Tensor, y: Tensor, streams: Tensor,
    post: Tensor, comb: Tensor, new_streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, z: Tensor, rstd: Tensor,
    iters: int, eps: float,
) -> Backward:  # fmt: skip
    """The gradients of y, streams, post, comb, fn, base and scale."""
    if not fits(y, streams, fn):
        return plain_backward(
            grad_streams, grad_u, grad_post, grad_comb, y, streams, post, comb, new_streams, fn, base, scale, z, rstd, iters,
            eps,
        )  # fmt: skip
    width, n_tokens = streams.shape[-1], streams.shape[:-2].numel()
    new_streams, z, fn, base, scale = new_streams.contiguous(), z.contiguous(), *(p.float().contiguous() for p in (fn, base, scale))
    outputs = dy, dx, dpost, dcomb = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (y, streams, post, comb))
    da, dp = torch.empty((2, n_tokens, 24), dtype=torch.float32, device=fn.device)
    parts = torch.zeros((SPLITS, *fn.shape), dtype=torch.float32, device=fn.device)
    matrices = (z[..., 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4))
    dmatrices = normalisations.sinkhorn_backward(grad_comb, matrices, iters, eps)
    if n_tokens:
        chosen = _constants(streams)
        _backward_kernel[(triton.cdiv(n_tokens, chosen["BLOCK_T"]),)](
            None if grad_streams is None else grad_streams.contiguous(), grad_u.contiguous(), grad_post.contiguous(), dmatrices,
            y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), new_streams, fn, base, scale, z,
            rstd.contiguous(), dy, dx, dpost, dcomb, da, dp, n_tokens, eps, **chosen, ADDED=grad_streams is not None,
            num_warps=WARPS,
        )  # fmt: skip
        chosen = fn_grad_constants(width)
        _fn_grad_kernel[(triton.cdiv(4 * width, chosen["BLOCK_D"]), SPLITS)](
            new_streams, dp, parts, n_tokens, triton.cdiv(n_tokens, SPLITS), **chosen, num_warps=FN_GRAD_WARPS
        )
    by_logit = (da * z.view(-1, 24)).sum(0)
    dscale = torch.stack((by_logit[:4].sum(), by_logit[4:8].sum(), by_logit[8:].sum()))
    return (*outputs, parts.sum(0), da.sum(0), dscale)
