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


class _Mix(KeepsFp32):
    """The parameters of a mixing, all fp32: fn [n_out,nD], base [n_out], scale [n_scales]."""

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
        u, post, comb, _, _ = ops.hc_pre(streams, self.fn, self.base, self.scale, self.iters, self.eps, self.norm_eps)
        return u, post, comb

    def post(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """The new streams, in the old streams' dtype."""
        return ops.hc_post(y, streams, post, comb)


class HyperHead(_Mix):
    """The n streams back to one: ``h = sum_j (sigmoid(z_j scale + base_j) + eps) X_j`` (section 1.3).

    ``z = (v fn^T) / sqrt(mean(v^2) + eps)`` of the flattened streams v [B,S,nD].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hc_mult, 1)

    def forward(self, streams: Tensor) -> Tensor:
        v = wide(streams.flatten(-2))
        z = linear_wide(v, self.fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.norm_eps)
        weights = torch.sigmoid(z * self.scale + self.base) + self.eps
        with no_autocast(streams):
            return torch.matmul(weights[..., None, :], wide(streams)).squeeze(-2).to(streams.dtype)
