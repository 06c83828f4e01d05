"""``dsv4::sinkhorn``: the mixing matrix of the residual streams (specification, section 1.1).

The CPU kernel (:mod:`dsv4c.ops.cpp`) keeps the 4 x 4 matrices of a token in one lane of 16 vectors through all steps.  The
backward runs the normalisations again instead of storing 2*iters matrices per token between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4c.ops import cpp
from dsv4c.ops.precision import no_autocast
from dsv4c.ops.reference import sinkhorn as formula


def formula_gradients(of: Callable[..., Any], inputs: tuple[Tensor, ...], grads: Any) -> tuple[Tensor, ...]:
    """Gradients of a formula in plain torch, also inside an operator, where autograd records nothing."""
    with no_autocast(inputs[0]):
        gradients: tuple[Tensor, ...] = torch.func.vjp(of, *inputs)[1](grads)
    return gradients


def in_cpp(like: Tensor, n: int, compute: torch.dtype) -> bool:
    """Whether the C++ kernels take it: four streams on a CPU, in types they are built for."""
    return like.device.type == "cpu" and n == 4 and (compute, like.dtype) in cpp.TYPES


def normalised(logits: Tensor, iters: int, eps: float) -> Tensor:
    """The operator without the dispatcher around it: in C++, or by its formula for other n and on other devices."""
    if not in_cpp(logits, logits.shape[-1], logits.dtype):
        return formula(logits, iters, eps).contiguous()
    out = torch.empty(logits.shape, dtype=logits.dtype)
    cpp.call("sinkhorn", logits.dtype, logits.dtype, logits.contiguous(), out, logits.numel() // 16, iters, eps)
    return out


def normalised_backward(grad: Tensor, logits: Tensor, iters: int, eps: float) -> Tensor:
    """The gradient without the dispatcher around it.

    For ``g = C dC``, the gradient of log C, a step ``C' = C / (s + eps)`` is ``g = g' - C' sum(g')``: no division, and no
    sum has to be kept.
    """
    if not in_cpp(logits, logits.shape[-1], logits.dtype):
        return formula_gradients(lambda m: formula(m, iters, eps), (logits,), grad)[0].contiguous()
    out, dtype = torch.empty(logits.shape, dtype=logits.dtype), logits.dtype
    tensors = (grad.to(dtype).contiguous(), logits.contiguous(), out)
    cpp.call("sinkhorn_backward", dtype, dtype, *tensors, logits.numel() // 16, iters, eps)
    return out


@torch.library.custom_op("dsv4::sinkhorn", mutates_args=())
def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Alternate row and column normalisations of ``softmax(logits) + eps``.

    ``C = softmax_k(M) + eps; C /= colsum + eps;`` then iters-1 times ``C /= rowsum + eps; C /= colsum + eps``.
    logits [...,n,n] fp32 or fp64; returns the same shape and dtype.  The last step is over columns: they sum to 1.
    """
    return normalised(logits, iters, eps)


@sinkhorn.register_fake
def _(logits, iters, eps):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("dsv4::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(grad: Tensor, logits: Tensor, iters: int, eps: float) -> Tensor:
    """For ``C' = C / (s + eps)``: ``dC = (dC' - sum(dC' C')) / (s + eps)``, from the last step to the first."""
    return normalised_backward(grad, logits, iters, eps)


@sinkhorn_backward.register_fake
def _(grad, logits, iters, eps):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    logits, ctx.iters, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
    return sinkhorn_backward(grad, ctx.saved_tensors[0], ctx.iters, ctx.eps), None, None


sinkhorn.register_autograd(_backward, setup_context=_save)
