"""Clamped SwiGLU, as the specification writes it (section 6)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dsv4c.ops.precision import accumulator


def swiglu_clamp(gate_up: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """``w silu(min(g, limit)) clamp(u, -limit, limit)``; limit 0: no clamp."""
    g, u = gate_up.to(accumulator(gate_up)).chunk(2, -1)
    if limit > 0:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    hidden = F.silu(g) * u
    return (hidden if weight is None else hidden * weight[:, None]).to(gate_up.dtype)
