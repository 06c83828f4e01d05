"""``dsv4::rope``: partial interleaved rotation of the last channels (specification, section 2).

A rotation is orthogonal: its backward is the inverse rotation of the gradient, by the same operator.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("dsv4::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """``a, b -> a cos - b sin, a sin + b cos`` on neighbouring pairs of the last r channels; -sin for the inverse.

    Shapes: x [B,S,c] or [B,S,H,c], cos and sin [B,S,r/2] fp32.  Computed in fp32 (fp64 for fp64 inputs), returned in x's
    dtype; the first c - r channels are copied bit for bit.
    """
    out = x.clone(memory_format=torch.contiguous_format)
    wide = torch.promote_types(x.dtype, torch.float32)
    tail = out[..., x.shape[-1] - 2 * cos.shape[-1] :]
    # A copy of its own: for one token, or where every channel turns, the tail is contiguous and would be turned in place.
    copied = torch.empty(tail.shape, dtype=wide, device=x.device).copy_(tail)
    turned = torch.view_as_complex(copied.unflatten(-1, (-1, 2)))
    angle = torch.complex(cos.to(wide), sin.neg().to(wide) if inverse else sin.to(wide))
    turned.mul_(angle if x.dim() == 3 else angle[:, :, None])
    tail.copy_(torch.view_as_real(turned).flatten(-2))
    return out


@rope.register_fake
def _(x, cos, sin, inverse):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
    return rope(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


rope.register_autograd(_backward, setup_context=_save)
