"""``dsv4::rope``: partial interleaved rotation of the last channels (specification, section 2).

A rotation is orthogonal: its backward is the inverse rotation of the gradient, by the same operator.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _plain(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    rotary, acc = 2 * cos.shape[-1], torch.promote_types(x.dtype, torch.float32)
    angle = torch.complex(cos.to(acc), sin.neg().to(acc) if inverse else sin.to(acc))
    angle = angle if x.dim() == 3 else angle[:, :, None]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plain = x.shape[-1] - rotary
    out[..., :plain] = x[..., :plain]
    # Pairs are complex numbers where a pair has one address: an even offset, in steps of two.
    pairs = x[..., plain:].unflatten(-1, (-1, 2))
    aligned = pairs.storage_offset() % 2 == 0 and pairs.stride(-1) == 1 and all(n % 2 == 0 for n in pairs.stride()[:-1])
    if x.dtype == acc and plain % 2 == 0 and aligned:
        turned = torch.view_as_complex(out[..., plain:].unflatten(-1, (-1, 2)))
        torch.mul(torch.view_as_complex(pairs), angle, out=turned)
    else:
        wide = torch.empty(pairs.shape, dtype=acc, device=x.device).copy_(pairs)
        turned = torch.view_as_complex(wide).mul_(angle)
        out[..., plain:] = torch.view_as_real(turned).flatten(-2)
    return out


@torch.library.custom_op("dsv4::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """``a, b -> a cos - b sin, a sin + b cos`` on neighbouring pairs of the last r channels; -sin for the inverse.

    Shapes: x [B,S,c] or [B,S,H,c], cos and sin [B,S,r/2] fp32.  Computed in fp32 (fp64 for fp64 inputs), returned in x's
    dtype; the first c - r channels are copied bit for bit.
    """
    return _plain(x, cos, sin, inverse)


@rope.register_fake
def _(x, cos, sin, inverse):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
    return rope(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


rope.register_autograd(_backward, setup_context=_save)
