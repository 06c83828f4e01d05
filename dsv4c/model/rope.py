"""Partial, interleaved rotary embedding with one table per layer kind (specification, section 2).

``a, b -> a cos - b sin, a sin + b cos`` on neighbouring channels of the last r; the first channels are untouched.  The
magnitude factor is 1: YaRN changes frequencies here and nothing else (B04).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4c import ops
from dsv4c.config import ModelConfig


def inverse_frequencies(config: ModelConfig, ratio: int, device: torch.device | None = None) -> Tensor:
    """``inv_j`` [r/2] fp32 of a layer with this compress ratio.

    Sliding-window layers (ratio 0) use ``rope_theta`` as it is.  Compressed layers use ``compress_rope_theta`` with YaRN:
    ``inv_j = f_j ((1 - ramp_j) + ramp_j / factor)``, the ramp linear in j between the correction dimensions of beta_fast
    and beta_slow; no YaRN where rope_original_length is 0.
    """
    r = config.qk_rope_head_dim
    base = config.compress_rope_theta if ratio else config.rope_theta
    j = torch.arange(r // 2, dtype=torch.float64, device=device)
    inv = base ** (-2 * j / r)
    if ratio and config.rope_original_length:

        def correction(beta: float) -> float:
            return r * math.log(config.rope_original_length / (2 * math.pi * beta)) / (2 * math.log(base))

        low = max(math.floor(correction(config.rope_beta_fast)), 0)
        high: float = min(math.ceil(correction(config.rope_beta_slow)), r - 1)
        high = high if high != low else high + 0.001
        ramp = ((j - low) / (high - low)).clamp(0, 1)
        inv = inv * ((1 - ramp) + ramp / config.rope_factor)
    return inv.float()


def tables(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [...,r/2] in fp32 of ``positions`` [...] (int)."""
    angle = positions[..., None].float() * inv_freq
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last r channels of x [B,S,c] or [B,S,H,c] by cos, sin [B,S,r/2], or back, in fp32; x's dtype returned."""
    return ops.rope(x, cos, sin, inverse)
