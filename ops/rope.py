"""``dsv4::rope`` and ``dsv4::rope_``: partial interleaved rotation of the last channels (specification, section 2).

A rotation is orthogonal: its backward is the inverse rotation of the gradient, by the same operator.  Most of what the
functional operator does is to copy the channels that do not turn; where the caller gives x up, ``rope_`` moves the others
only.  The CPU kernel is C++ (:mod:`dsv4c.ops.cpp`): as a product of complex numbers in torch ``rope_`` took 1.6 to 2.8 times
as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops import cpp


def _turn(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """Writes x with its last channels rotated into out, which may be x itself."""
    acc, plain = torch.promote_types(x.dtype, torch.float32), x.shape[-1] - 2 * cos.shape[-1]
    cos, sin = cos.to(acc), sin.to(acc)
    pairs, turned = x[..., plain:], out[..., plain:]
    if x.dim() == 3:
        pairs, turned = pairs[:, :, None], turned[:, :, None]
    if x.device.type == "cpu" and (acc, x.dtype) in cpp.TYPES and pairs.stride(-1) == turned.stride(-1) == 1:
        strides = (*pairs.stride()[:3], *turned.stride()[:3])
        tensors = (pairs.data_ptr(), turned.data_ptr(), cos.contiguous(), sin.contiguous())
        cpp.call("rope", acc, x.dtype, *tensors, *pairs.shape[:3], plain, cos.shape[-1], *strides, int(inverse))
    else:
        if out is not x:
            out[..., :plain] = x[..., :plain]
        angle = torch.complex(cos, sin.neg() if inverse else sin)[:, :, None]
        wide = torch.empty((*pairs.shape[:-1], cos.shape[-1], 2), dtype=acc, device=x.device)
        wide.copy_(pairs.unflatten(-1, (-1, 2)))
        turned.copy_(torch.view_as_real(torch.view_as_complex(wide).mul_(angle)).flatten(-2))


@torch.library.custom_op("dsv4::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """``a, b -> a cos - b sin, a sin + b cos`` on neighbouring pairs of the last r channels; -sin for the inverse.

    Shapes: x [B,S,c] or [B,S,H,c], cos and sin [B,S,r/2] fp32.  Computed in fp32 (fp64 for fp64 inputs), returned in x's
    dtype; the first c - r channels are copied bit for bit.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _turn(x, out, cos, sin, inverse)
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


def _refuse_gradient(x: Tensor) -> None:
    if x.requires_grad:
        raise RuntimeError("dsv4::rope_ overwrites x, which requires a gradient: use dsv4::rope, or rope_ on x.detach()")


@torch.library.custom_op("dsv4::rope_", mutates_args=("x",))
def rope_(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """:func:`rope` written into x, of any strides: only the last r channels are touched.

    It has no gradient: RuntimeError where x requires one, also under ``torch.no_grad``.
    """
    _refuse_gradient(x)
    _turn(x, x, cos, sin, inverse)


@rope_.register_fake
def _(x, cos, sin, inverse):  # type: ignore[no-untyped-def]  # schema above
    _refuse_gradient(x)
