"""``dsv4::grouped_mm``: the experts' matrix products over rows sorted by expert (specification, section 6).

``F.grouped_mm`` does the work where it can (fp32, bf16 and fp16, rows that are a multiple of 16 bytes).  It has no fp64
kernel, its fake refuses fp32 (so it cannot be compiled as it is), and it rejects gradients of stride 0: this operator has
one fake for all dtypes and makes its arguments contiguous.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4c.ops.precision import no_autocast


def _aligned(*tensors: Tensor) -> bool:
    return all(t.dtype != torch.float64 and t.shape[-1] * t.element_size() % 16 == 0 for t in tensors)


def _bounds(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


@torch.library.custom_op("dsv4::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``y_i = x_i weight[e]^T`` for row i of group e, ``ends[e-1] <= i < ends[e]``.

    Shapes: x [N,d], weight [E,o,d] of x's dtype, ends [E] int32, not decreasing, the last one N.  Returns [N,o].
    """
    with no_autocast(x):
        x, weight = x.contiguous(), weight.contiguous()
        if _aligned(x, weight, weight.mT):  # a result whose rows are not a multiple of 16 bytes would come back padded
            return F.grouped_mm(x, weight.mT, offs=ends)
        out = x.new_empty(len(x), weight.shape[1])
        for e, (first, last) in enumerate(_bounds(ends)):
            torch.mm(x[first:last], weight[e].T, out=out[first:last])
        return out


@grouped_mm.register_fake
def _(x, weight, ends):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)


@torch.library.custom_op("dsv4::grouped_mm_backward", mutates_args=())
def grouped_mm_backward(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """``dx_i = dy_i weight[e]`` and ``dweight[e] = dy[group e]^T x[group e]``; zero for a group without rows."""
    with no_autocast(x):
        grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
        if _aligned(grad, x, weight):
            return F.grouped_mm(grad, weight, offs=ends), F.grouped_mm(grad.mT, x, offs=ends)
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        for e, (first, last) in enumerate(_bounds(ends)):
            torch.mm(grad[first:last], weight[e], out=dx[first:last])
            torch.mm(grad[first:last].T, x[first:last], out=dweight[e])
        return dx, dweight


@grouped_mm_backward.register_fake
def _(grad, x, weight, ends):  # type: ignore[no-untyped-def]  # schema above
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(weight.shape, dtype=weight.dtype, device=weight.device),
    )


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
    return (*grouped_mm_backward(grad, *ctx.saved_tensors), None)


grouped_mm.register_autograd(_backward, setup_context=_save)
