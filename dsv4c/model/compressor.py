"""Tokens to compressed entries by a gated softmax, channel by channel (specification, section 4).

A plain compressor (HCA) pools the m tokens of a window; an overlapping one (CSA, m = 4) pools 2m: the "previous" half of the
channels of the window before, and the "current" half of its own window.  All of it in fp32 up to the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv4c import ops
from dsv4c.config import ModelConfig
from dsv4c.model.layout import LayerLayout
from dsv4c.model.norms import RMSNorm
from dsv4c.model.precision import KeepsFp32, linear_wide


class Compressor(KeepsFp32):
    """``RMS_w(entry_p)`` [B,P,c] of x [B,S,D]; the caller rotates it to the position of its window's first token."""

    fp32_parameters = ("ape",)

    def __init__(self, config: ModelConfig, width: int, ratio: int) -> None:
        super().__init__()
        self.overlap, self.keep_fp32 = ratio == 4, config.keep_fp32_parameters
        channels = 2 * width if self.overlap else width
        self.wkv = nn.Linear(config.hidden_size, channels, bias=False)
        self.wgate = nn.Linear(config.hidden_size, channels, bias=False)
        self.ape = nn.Parameter(torch.empty(ratio, channels))
        self.norm = RMSNorm(width, config.rms_norm_eps, config.keep_fp32_parameters)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.ape)

    def forward(self, x: Tensor, at: LayerLayout) -> Tensor:
        values, logits = linear_wide(x, self.wkv.weight), linear_wide(x, self.wgate.weight)
        pooled = ops.compress(values, logits, self.ape, at.entry_end, at.entry_has_previous, self.overlap)
        return self.norm(pooled.to(x.dtype))
