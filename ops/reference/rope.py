"""Partial interleaved rotation, as the specification writes it (section 2)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """``a, b -> a cos - b sin, a sin + b cos`` on neighbouring pairs of the last r channels; -sin for the inverse."""
    sin = -sin if inverse else sin
    if x.dim() == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    r = 2 * cos.shape[-1]
    plain, turned = x[..., : x.shape[-1] - r], x[..., x.shape[-1] - r :]
    a, b = turned.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), -1)
