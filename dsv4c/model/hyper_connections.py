"""Manifold-constrained hyper-connections: n residual streams mixed by doubly stochastic matrices (section 1).

``X' = comb^T X + post y``: the FIRST index of comb is summed.  Untransposed, comb passes every test of shapes and of row
and column sums, and is wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv4c import ops
from dsv4c.config import ModelConfig
from dsv4c.model.precision import KeepsFp32, linear_wide, wide
from dsv4c.ops.precision import no_autocast


def mix(weights: Tensor, streams: Tensor) -> Tensor:
    """``y_k = sum_j weights_jk X_j`` in fp32: weights [B,S,n,k] fp32, X [B,S,n,D] -> [B,S,k,D].

    As a batched matrix product of n x n by n x D it runs at the speed of a copy, forward and backward.
    """
    with no_autocast(streams):
        return torch.matmul(weights.mT, wide(streams))


class _Mix(KeepsFp32):
    """``z = (v fn^T) / sqrt(mean(v^2) + eps)`` of the flattened streams v [B,S,nD]; all parameters fp32."""

    fp32_parameters = ("fn", "base", "scale")

    def __init__(self, config: ModelConfig, n_out: int, n_scales: int) -> None:
        super().__init__()
        self.n, self.eps, self.norm_eps = config.hc_mult, config.hc_eps, config.rms_norm_eps
        self.keep_fp32, self.init = config.keep_fp32_parameters, (config.initializer_range, config.hc_init_scale)
        self.fn = nn.Parameter(torch.empty(n_out, self.n * config.hidden_size))
        self.base = nn.Parameter(torch.empty(n_out))
        self.scale = nn.Parameter(torch.empty(n_scales))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.fn, std=self.init[0])
        nn.init.zeros_(self.base)
        nn.init.constant_(self.scale, self.init[1])

    def logits(self, streams: Tensor) -> Tensor:
        v = wide(streams.flatten(-2))
        return linear_wide(v, self.fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.norm_eps)


class HyperConnection(_Mix):
    """Before and after a block: ``u = sum_j pre_j X_j`` and ``X'_k = post_k y + sum_j comb_jk X_j``.

    ``pre = sigmoid(z scale_0 + base) + eps``; ``post = 2 sigmoid(z scale_1 + base)``;
    ``comb = sinkhorn(z scale_2 + base)``.  X [B,S,n,D]; u, y [B,S,D]; post [B,S,n] and comb [B,S,n,n] fp32.
    """

    def __init__(self, config: ModelConfig) -> None:
        n = config.hc_mult
        super().__init__(config, (2 + n) * n, 3)
        self.iters = config.hc_sinkhorn_iters

    def pre(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u in the streams' dtype, post and comb."""
        n = self.n
        z, base, scale = self.logits(streams), self.base, self.scale
        weights = torch.sigmoid(z[..., :n] * scale[0] + base[:n]) + self.eps
        post = 2 * torch.sigmoid(z[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = ops.sinkhorn((z[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), self.iters, self.eps)
        return mix(weights[..., None], streams).squeeze(-2).to(streams.dtype), post, comb

    def post(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """The new streams, in the old streams' dtype."""
        return (post[..., None] * wide(y)[:, :, None] + mix(comb, streams)).to(streams.dtype)


class HyperHead(_Mix):
    """The n streams back to one: ``h = sum_j (sigmoid(z_j scale + base_j) + eps) X_j`` (section 1.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hc_mult, 1)

    def forward(self, streams: Tensor) -> Tensor:
        weights = torch.sigmoid(self.logits(streams) * self.scale + self.base) + self.eps
        return mix(weights[..., None], streams).squeeze(-2).to(streams.dtype)
