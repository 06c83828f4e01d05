"""The dtype in which operators compute, whatever surrounds them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def accumulator(*tensors: Tensor) -> torch.dtype:
    """fp32, or fp64 where an input is fp64."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A region in which an outer autocast does not touch matrix products.

    ``.float()`` alone does not stop it (B35), and it reaches into the kernels of operators too.
    """
    # There is no autocast of the meta device, where shapes are worked out.
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
