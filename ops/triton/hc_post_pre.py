"""Triton kernels of ``dsv4::hc_post_pre`` for n = 4.

Forward: a few tokens to a program of 16 waves, whose registers hold the new streams from the mixing on, through norm,
projection and collapse: they are written once and not read.  Backward: the same tokens, from the gradient of pre through
that of the new streams, which stays in registers and is never written, to the gradients of y and of the old streams; and,
since it sums over all tokens, the gradient of fn in a pass of its own.  The normalisations of comb are one launch each way.
"""

# Kernels are written in Triton's language, which has no annotations for its values and grows tuples.
# mypy: disable-error-code="no-untyped-def, assignment, misc, var-annotated"
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
def _products(x, g):
    """``<x, g_k>`` over the channels of tiles [T,D], as one [T,4]: one exchange between waves where four sums take four."""
    even = tl.join(x * g[0].to(tl.float32), x * g[2].to(tl.float32))
    odd = tl.join(x * g[1].to(tl.float32), x * g[3].to(tl.float32))
    return tl.sum(tl.reshape(tl.join(even, odd), [x.shape[0], x.shape[1], 4]), 1)


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
    new = tokens_streams(new_ptr, tokens, d, there, WIDTH)
    du = tl.load(du_ptr + row * WIDTH + d[None, :], mask=mask, other=0.0).to(tl.float32)
    logit = tl.arange(0, 32)[None, :]
    dpre = tl.zeros([BLOCK_T, 32], tl.float32)
    for j in tl.static_range(4):
        dpre += tl.where(logit == j, tl.sum(du * new[j].to(tl.float32), 1)[:, None], 0.0)
    dp, shrink = logit_gradients(
        dpre, tokens, there, dnew_post_ptr, dmatrix_ptr, base_ptr, scale_ptr, z_ptr, rstd_ptr, da_ptr, dp_ptr, WIDTH
    )  # fmt: skip
    scale = tl.load(scale_ptr)
    g = ()
    for j in tl.static_range(4):
        z = tl.load(z_ptr + tokens * 24 + j, mask=there, other=0.0)
        pre = tl.sigmoid(z * scale + tl.load(base_ptr + j)) + eps
        g = g + (pre[:, None] * du + shrink[:, None] * new[j].to(tl.float32),)
    for r in range(24):
        factor = tl.sum(tl.where(logit == r, dp, 0.0), 1)[:, None]
        grown = ()
        for j in tl.static_range(4):
            w = tl.load(fn_ptr + r * (4 * WIDTH) + j * WIDTH + d, mask=d < WIDTH, other=0.0)
            grown = grown + (g[j] + factor * w[None, :],)
        g = grown
    rounded = ()
    dy = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for k in tl.static_range(4):
        total = g[k].to(new_ptr.dtype.element_ty)
        if ADDED:
            other = tl.load(grad_ptr + row * (4 * WIDTH) + k * WIDTH + d[None, :], mask=mask, other=0.0)
            total = (total.to(tl.float32) + other.to(tl.float32)).to(new_ptr.dtype.element_ty)
        rounded = rounded + (total,)
        dy += tl.load(post_ptr + tokens * 4 + k, mask=there, other=0.0)[:, None] * total.to(tl.float32)
    at = row * WIDTH + d[None, :]
    tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty), mask=mask)
    y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    four = tl.arange(0, 4)[None, :]
    tl.store(dpost_ptr + tokens[:, None] * 4 + four, _products(y, rounded), mask=there[:, None])
    for j in range(4):  # not four times its body, whose addresses would stay in registers from the first loads on
        dx = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for k in tl.static_range(4):
            comb = tl.load(comb_ptr + tokens * 16 + 4 * j + k, mask=there, other=0.0)
            dx += comb[:, None] * rounded[k].to(tl.float32)
        at = row * (4 * WIDTH) + j * WIDTH + d[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dcomb_ptr + tokens[:, None] * 16 + 4 * j + four, _products(x, rounded), mask=there[:, None])


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


def forward_constants(width: int, itemsize: int, wave: int = 64) -> dict[str, Any]:
    """Compile-time arguments: half as many tokens where streams take twice the registers."""
    chosen = hc_pre.forward_constants(width, wave)
    return chosen | {"BLOCK_T": max(1, chosen["BLOCK_T"] * 2 // itemsize)}


def backward_constants(width: int, wave: int = 64) -> dict[str, Any]:
    """Half as many tokens as forward: their streams are in registers with the gradients of these, in fp32."""
    return forward_constants(width, 4, wave)


def fn_grad_constants(width: int) -> dict[str, Any]:
    return {"ALL": 4 * width, "BLOCK_D": 128, "BLOCK_T": 32}


WARPS, FN_GRAD_WARPS = 16, 4  # the first of the kernels that hold tokens


def fits(y: Tensor, streams: Tensor, fn: Tensor) -> bool:
    """Whether the kernels take these."""
    return hc_pre.fits(streams, fn) and hc_post.fits(y, streams)


def _wave() -> int:
    return 64 if torch.version.hip else 32


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
        chosen = forward_constants(width, streams.element_size(), _wave())
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
    new_streams, z = new_streams.contiguous(), z.contiguous()
    fn, base, scale = (p.float().contiguous() for p in (fn, base, scale))
    dy, dx, dpost, dcomb = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (y, streams, post, comb))
    da, dp = torch.empty((2, n_tokens, 24), dtype=torch.float32, device=fn.device)
    parts = torch.zeros((SPLITS, *fn.shape), dtype=torch.float32, device=fn.device)
    matrices = (z[..., 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4))
    dmatrices = normalisations.sinkhorn_backward(grad_comb, matrices, iters, eps)
    if n_tokens:
        chosen = backward_constants(width, _wave())
        _backward_kernel[(triton.cdiv(n_tokens, chosen["BLOCK_T"]),)](
            None if grad_streams is None else grad_streams.contiguous(), grad_u.contiguous(), grad_post.contiguous(),
            dmatrices, y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), new_streams, fn, base,
            scale, z, rstd.contiguous(), dy, dx, dpost, dcomb, da, dp, n_tokens, eps, **chosen,
            ADDED=grad_streams is not None, num_warps=WARPS,
        )  # fmt: skip
        chosen = fn_grad_constants(width)
        _fn_grad_kernel[(triton.cdiv(4 * width, chosen["BLOCK_D"]), SPLITS)](
            new_streams, dp, parts, n_tokens, triton.cdiv(n_tokens, SPLITS), **chosen, num_warps=FN_GRAD_WARPS
        )
    by_logit = (da * z.view(-1, 24)).sum(0)
    dscale = torch.stack((by_logit[:4].sum(), by_logit[4:8].sum(), by_logit[8:].sum()))
    return dy, dx, dpost, dcomb, parts.sum(0), da.sum(0), dscale


def bytes_moved(n_tokens: int, width: int, itemsize: int = 2) -> dict[str, int]:
    """What the launches load and store, the normalisations of comb included.

    ``forward`` and ``backward`` count fn once for each of the eight caches of a part, which hold it whole, ``issued`` for
    every program of both; backward, with a gradient from elsewhere, the new streams twice, for the gradient of fn by itself,
    whose parts go out and in.  ``apart``: of hc_pre_backward, the sum of gradients and hc_post_backward.
    """
    token, fn = n_tokens * width * itemsize, 24 * 4 * width * 4
    programs = [triton.cdiv(n_tokens, c["BLOCK_T"]) for c in (forward_constants(width, itemsize), backward_constants(width))]
    apart = hc_pre.bytes_moved(n_tokens, width, itemsize)["backward"] + 3 * 4 * token
    return {
        "forward": 10 * token + n_tokens * (20 + 4 + 24 + 1 + 3 * 16) * 4 + 8 * fn,
        "backward": 23 * token + n_tokens * (40 + 4 + 4 * 16 + 25 + 3 * 24) * 4 + (8 + 2 * SPLITS) * fn,
        "issued": 33 * token + sum(programs) * fn,
        "apart": apart + hc_post.bytes_moved(n_tokens, width, itemsize)["backward"],
    }
