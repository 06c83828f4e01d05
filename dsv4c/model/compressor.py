"""Tokens to compressed entries by a gated softmax, channel by channel (specification, section 4).

A plain compressor (HCA) pools the m tokens of a window; an overlapping one (CSA, m = 4) pools 2m: the "previous" half of the
channels of the window before, and the "current" half of its own window.  All of it in fp32 up to the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv4c.config import ModelConfig
from dsv4c.model.layout import LayerLayout
from dsv4c.model.norms import RMSNorm
from dsv4c.model.precision import KeepsFp32, linear_wide


def pool(values: Tensor, logits: Tensor, ape: Tensor, at: LayerLayout, overlap: bool) -> Tensor:
    """``entry_p = sum_slots softmax_slots(logits + ape) values`` -> [B,P,c].

    values, logits [B,S,wc] and ape [m,wc], w = 2 with overlap: channels 0..c-1 are the previous half, c..2c-1 the
    current one.  The first window of a document has no previous window: those slots get weight 0.
    """
    ratio, width = ape.shape
    c = width // 2 if overlap else width
    row = torch.arange(len(values), device=values.device)[:, None, None]
    slot = torch.arange(ratio, device=values.device)
    current = (at.entry_end[:, :, None] - ratio + 1 + slot).clamp(0, values.shape[1] - 1)
    v, e = values[..., width - c :][row, current], logits[..., width - c :][row, current] + ape[:, width - c :]
    if overlap:
        before = (current - ratio).clamp(min=0)
        missing = ~at.entry_has_previous[:, :, None, None]
        v_before = values[..., :c][row, before].masked_fill(missing, 0.0)
        e_before = (logits[..., :c][row, before] + ape[:, :c]).masked_fill(missing, float("-inf"))
        v, e = torch.cat((v_before, v), 2), torch.cat((e_before, e), 2)
    return (e.softmax(2) * v).sum(2)


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
        pooled = pool(linear_wide(x, self.wkv.weight), linear_wide(x, self.wgate.weight), self.ape, at, self.overlap)
        return self.norm(pooled.to(x.dtype))
