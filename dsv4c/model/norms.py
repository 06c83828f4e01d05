"""Root-mean-square norms (specification, section 0): wholly in fp32, one cast at the end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv4c.model.precision import KeepsFp32, wide


def rms(x: Tensor, eps: float) -> Tensor:
    """``RMS_1(x) = x / sqrt(mean(x^2, last) + eps)``, in fp32 and not cast back."""
    x = wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(KeepsFp32):
    """``RMS_w(x) = w x / sqrt(mean(x^2, last) + eps)``; x [...,D], w [D] fp32; the result has x's dtype."""

    fp32_parameters = ("weight",)

    def __init__(self, width: int, eps: float, keep_fp32: bool = True) -> None:
        super().__init__()
        self.eps, self.keep_fp32 = eps, keep_fp32
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (rms(x, self.eps) * self.weight).to(x.dtype)
