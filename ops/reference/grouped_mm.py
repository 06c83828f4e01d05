"""One matrix product per group of rows, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Row i of group e (``ends[e-1] <= i < ends[e]``) times ``weight[e]^T``."""
    group = torch.searchsorted(ends.contiguous(), torch.arange(len(x), device=x.device), right=True)
    return torch.einsum("nd,nod->no", x, weight[group])
