"""Where the model leaves the activation dtype: fp32 islands, fp32 parameters, and simulated low precision.

The specification's table of what must be fp32 (section 0) is kept by two means: :func:`wide` in the formulas, inside
``no_autocast`` where a matrix product is among them, and :class:`KeepsFp32` for the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4c.config import QUANTISATION_BLOCKS
from dsv4c.ops.precision import no_autocast


def wide(x: Tensor) -> Tensor:
    """x in fp32, or unchanged where it is wider (fp64 goes through the whole model)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def activation_dtype(like: Tensor) -> torch.dtype:
    """The dtype of residual streams: the autocast dtype inside autocast, the parameters' dtype outside."""
    if not like.is_meta and torch.is_autocast_enabled(like.device.type):
        return torch.get_autocast_dtype(like.device.type)
    return like.dtype


class KeepsFp32(nn.Module):
    """A module whose ``fp32_parameters`` (and buffers) stay in fp32 through ``.bfloat16()``, ``.half()`` and ``.to(dtype)``.

    They keep their exact values: they are moved to the new device as they are instead of being rounded and widened again.
    ``.double()`` does widen them.
    """

    fp32_parameters: ClassVar[tuple[str, ...]] = ()
    keep_fp32: bool = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if not self.keep_fp32:
            return super()._apply(fn, recurse)
        tensors = [self._parameters.get(n, self._buffers.get(n)) for n in self.fp32_parameters]
        kept = {id(t) for t in tensors if t is not None} | {id(t.grad) for t in tensors if isinstance(t, nn.Parameter)}

        def keep(t: Tensor) -> Tensor:
            result = fn(t)
            if id(t) in kept and result.is_floating_point() and result.dtype.itemsize < 4:
                return t.to(device=result.device, dtype=torch.float32)
            return result

        for child in self.children() if recurse else ():
            child._apply(fn)
        return super()._apply(keep, recurse=False)


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """``x W^T`` in fp32 (fp64) whatever autocast says."""
    with no_autocast(x):
        return F.linear(wide(x), wide(weight))


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded.to(x.dtype) - x).detach()


def _power_of_two_scale(x: Tensor, block: int, largest: float, floor: float) -> tuple[Tensor, Tensor]:
    """x in blocks of its last axis, and the scale ``2^ceil(log2(amax / largest))`` of each block."""
    blocks = wide(x).unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=floor)
    return blocks, torch.exp2(torch.ceil(torch.log2(amax / largest)))


def fake_fp8(x: Tensor, block: int = QUANTISATION_BLOCKS["fp8"]) -> Tensor:
    """x rounded to fp8 e4m3 with one power-of-two scale per ``block`` of the last axis; gradients go straight through.

    Source: specification, section 7 (quantisation-aware training), ``scale = 2^ceil(log2(amax/448))``, amax >= 1e-4.
    """
    blocks, scale = _power_of_two_scale(x, min(block, x.shape[-1]), 448.0, 1e-4)
    rounded = (blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(blocks.dtype) * scale
    return _straight_through(x, rounded.flatten(-2))


def fake_fp4(x: Tensor, block: int = QUANTISATION_BLOCKS["fp4"]) -> Tensor:
    """x rounded to fp4 e2m1 {0, .5, 1, 1.5, 2, 3, 4, 6} with one power-of-two scale per ``block``; straight through.

    Rounds to the nearest value, ties to the even mantissa, as the hardware formats do.
    """
    blocks, scale = _power_of_two_scale(x, min(block, x.shape[-1]), 6.0, 6.0 * 2.0**-126)
    size = (blocks / scale).abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    rounded = torch.round(size / step).mul(step).clamp(max=6.0).copysign(blocks) * scale
    return _straight_through(x, rounded.flatten(-2))


QUANTIZE: dict[str, Callable[[Tensor], Tensor]] = {"full": lambda x: x, "fp8": fake_fp8, "fp4": fake_fp4}
