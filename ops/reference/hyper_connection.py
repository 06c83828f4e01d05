"""The residual streams before and after a block, as the specification writes them (sections 1.1 and 1.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator
from dsv4c.ops.reference.sinkhorn import sinkhorn


def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``u = sum_j pre_j X_j``, post and comb from the normed projection z of all streams; z and its norm, as constants."""
    n, x = streams.shape[-2], streams.to(accumulator(streams, fn))
    v = x.flatten(-2)
    rstd = torch.rsqrt(v.square().mean(-1) + norm_eps)
    z = v @ fn.to(x.dtype).T * rstd[..., None]
    pre = torch.sigmoid(z[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(z[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = sinkhorn((z[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), iters, eps)
    u = (pre[..., None] * x).sum(-2)
    return u.to(streams.dtype), post, comb, z.detach(), rstd.detach()


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``X'_k = post_k y + sum_j comb_jk X_j``: the first index of comb is summed."""
    acc = accumulator(streams, y)
    mixed = (comb[..., None] * streams.to(acc)[..., None, :]).sum(-3)
    return (post[..., None] * y.to(acc)[..., None, :] + mixed).to(streams.dtype)
