"""The number formats of the released checkpoints: fp8 e4m3 in blocks of 128x128, FP4 e2m1 in groups of 32 inputs.

Used where a stored tensor becomes a parameter and the other way round; nothing here knows names or files. ``fp8`` is
the OCP format (``float8_e4m3fn``, largest value 448), never the fnuz one of older AMD chips (B58). FP4 puts two values
into a byte, the one with the lower input index into the low nibble: as the released inference code unpacks it and as
``torch.float4_e2m1fn_x2`` and the OCP microscaling formats define it. A scale multiplies: value = code * scale.

Encoding decoded values gives the same values, and the same bytes where every scale was the smallest that holds its block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.errors import WeightsError

FP8_BLOCK = 128
FP4_GROUP = 32
FP8_MAX = 448.0
FP4_MAX = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# Where rounding goes up to the next code; on a tie to the even code, so that every second bound is inclusive.
_E2M1_BOUNDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def fp8_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[..., out, in] -> [..., ceil(out / 128), ceil(in / 128)]."""
    return (*shape[:-2], -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK))


def fp4_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[..., out, in] -> [..., out, ceil(in / 32)]."""
    return (*shape[:-1], -(-shape[-1] // FP4_GROUP))


def scale_values(scale: Tensor) -> Tensor:
    """Scales as fp32: fp32 and bf16 as they are, e8m0 (also as raw bytes) as 2^(code - 127). Raises WeightsError on
    NaN.
    """
    values = scale.view(torch.float8_e8m0fnu).float() if scale.dtype is torch.uint8 else scale.float()
    if not bool(torch.isfinite(values).all()):
        raise WeightsError("a block scale is not finite", allowed="finite scales", do="fetch the file again: it is damaged")
    return values


def decode_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., out, in] from e4m3 codes [..., out, in] and one scale a 128x128 block; the last blocks may be
    ragged.
    """
    rows = scale_values(scale).repeat_interleave(FP8_BLOCK, -2)[..., : codes.shape[-2], :]
    return codes.float().mul_(rows.repeat_interleave(FP8_BLOCK, -1)[..., : codes.shape[-1]])


def decode_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., out, in] from bytes [..., out, in / 2] and scales [..., out, in / 32]."""
    byte = packed.view(torch.uint8)
    table = torch.tensor(E2M1, device=packed.device)
    pairs = torch.stack((table[(byte & 15).int()], table[(byte >> 4).int()]), dim=-1)
    values = pairs.flatten(-2)
    return values.mul_(scale_values(scale).repeat_interleave(FP4_GROUP, -1)[..., : values.shape[-1]])


def encode_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and e8m0 scales: the smallest power of two with which a block's largest value is at most 448."""
    x = weight.float()
    high = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % FP8_BLOCK, 0, -x.shape[-2] % FP8_BLOCK))
    *outer, rows, columns = high.shape
    blocks = high.reshape(*outer, rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scale = _power_of_two(blocks.amax(dim=(-3, -1)) / FP8_MAX)
    by_row = scale_values(scale).repeat_interleave(FP8_BLOCK, -2)[..., : x.shape[-2], :]
    scaled = x / by_row.repeat_interleave(FP8_BLOCK, -1)[..., : x.shape[-1]]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def encode_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed int8 [..., out, in / 2] and e8m0 scales [..., out, in / 32], rounded to nearest, ties to even codes."""
    x = weight.float()
    if x.shape[-1] % 2:
        raise WeightsError(f"FP4 cannot pack {x.shape[-1]} inputs", allowed="an even number of inputs", do="store as bf16")
    high = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % FP4_GROUP))
    groups = high.reshape(*high.shape[:-1], -1, FP4_GROUP)
    scale = _power_of_two(groups.amax(dim=-1) / FP4_MAX)
    scaled = x / scale_values(scale).repeat_interleave(FP4_GROUP, -1)[..., : x.shape[-1]]
    size = scaled.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for bound, inclusive in _E2M1_BOUNDS:
        code += (size >= bound) if inclusive else (size > bound)
    code |= torch.signbit(scaled).to(torch.uint8) << 3
    return (code[..., 0::2] | code[..., 1::2] << 4).view(torch.int8), scale


def _power_of_two(least: Tensor) -> Tensor:
    """The smallest power of two that is at least ``least``, as e8m0; 1 for a block of zeros."""
    if not bool(torch.isfinite(least).all()):
        raise WeightsError("a weight that is not finite cannot be quantised", allowed="finite weights", do="store as bf16")
    fraction, exponent = torch.frexp(least)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(-127, 127)
    code = torch.where(least == 0, torch.zeros_like(exponent), exponent) + 127
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)
