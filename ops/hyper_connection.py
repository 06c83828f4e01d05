"""``dsv4::hc_pre`` and ``dsv4::hc_post``: the residual streams before and after a block (specification, sections 1.1, 1.2).

On a CPU everything but the projection is C++ (:mod:`dsv4c.ops.cpp`): a block of tokens stays in the cache between the passes
that it needs, in fp32 or bf16 as it is stored.  Saved for the backward are the inputs, the logits and the
norm: 25 numbers a token at n = 4; the backward runs the 20 normalisations again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4c.ops import cpp
from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.reference import hyper_connection as formulas
from dsv4c.ops.sinkhorn import formula_gradients, in_cpp

Pre = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_BLOCK = 1 << 18  # elements of streams that are widened at a time


def spread(scale: Tensor, n: int) -> Tensor:
    """The three scales at the (2+n)n logits they belong to: n of pre, n of post, n*n of comb."""
    return torch.cat((scale[:1].expand(n), scale[1:2].expand(n), scale[2:].expand(n * n)))


def _as(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as a C++ kernel takes them."""
    return tuple(t.to(dtype).contiguous() for t in tensors)


def plain_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, norm_eps: float
) -> Pre:  # fmt: skip
    """hc_pre without the dispatcher around it: in C++, or by its formula for other n and on other devices."""
    (n, width), batch, acc = streams.shape[-2:], streams.shape[:-2], accumulator(streams, fn)
    fn, base, scale = _as(acc, fn, base, scale)
    if not in_cpp(streams, n, acc):
        with no_autocast(streams):
            u, post, comb, z, rstd = formulas.hc_pre(streams, fn, base, scale, iters, eps, norm_eps)
        return u.contiguous(), post.contiguous(), comb.contiguous(), z.contiguous(), rstd.contiguous()
    x = streams.reshape(-1, n * width)
    u, rstd = torch.empty((len(x), width), dtype=x.dtype), torch.empty(len(x), dtype=acc)
    post, comb, z = (torch.empty((len(x), size), dtype=acc) for size in (n, n * n, len(fn)))
    step = max(len(x), 1) if x.dtype == acc else max(8, _BLOCK // max(x.shape[1], 1))
    with no_autocast(streams):
        for t in range(0, len(x), step):
            torch.mm(x[t : t + step].to(acc), fn.T, out=z[t : t + step])
    tensors = (x.contiguous(), base, scale, z, u, post, comb, rstd)
    cpp.call("hc_pre", acc, x.dtype, *tensors, len(x), width, iters, eps, norm_eps)
    return (
        u.view(*batch, width), post.view(*batch, n), comb.view(*batch, n, n), z.view(*batch, len(fn)), rstd.view(batch),
    )  # fmt: skip


def plain_pre_backward(
    grad: Tensor, grad_post: Tensor, grad_comb: Tensor, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, z: Tensor,
    rstd: Tensor, iters: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of hc_pre without the dispatcher around it."""
    (n, width), acc = streams.shape[-2:], accumulator(streams, fn)
    parameters = _as(acc, fn, base, scale)
    if not in_cpp(streams, n, acc):
        v = streams.to(acc)
        # By token, as the saved norm was computed.
        norm_eps: Any = rstd.pow(-2) - v.flatten(-2).square().mean(-1)
        gradients = formula_gradients(
            lambda x, f, b, s: formulas.hc_pre(x, f, b, s, iters, eps, norm_eps)[:3], (v, *parameters),
            (grad.to(acc), grad_post.to(acc), grad_comb.to(acc)),
        )  # fmt: skip
        dx, dfn, dbase, dscale = (g.contiguous() for g in gradients)
        return dx.to(streams.dtype), dfn, dbase, dscale
    dx = torch.empty(streams.shape, dtype=streams.dtype)
    dfn, dbase, dscale = (torch.empty(p.shape, dtype=acc) for p in parameters)
    tensors = (
        *_as(streams.dtype, grad), *_as(acc, grad_post, grad_comb), streams.contiguous(), *parameters, *_as(acc, z, rstd),
        dx, dfn, dbase, dscale,
    )  # fmt: skip
    cpp.call("hc_pre_backward", acc, streams.dtype, *tensors, rstd.numel(), width, iters, eps)
    return dx, dfn, dbase, dscale


@torch.library.custom_op("dsv4::hc_pre", mutates_args=())
def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the block reads, and how its result is mixed back.

    ``rstd = 1 / sqrt(mean(v^2) + norm_eps)``, v the n D channels of a token; ``z = (v fn^T) rstd``;
    ``pre = sigmoid(z scale_0 + base) + eps``; ``post = 2 sigmoid(z scale_1 + base)``;
    ``comb = sinkhorn(z scale_2 + base)`` (:mod:`dsv4c.ops.sinkhorn`); ``u = sum_j pre_j X_j``.

    Shapes: streams [...,n,D], fn [(2+n)n,nD], base [(2+n)n] and scale [3] fp32.  Returns u [...,D] in the streams' dtype,
    post [...,n], comb [...,n,n], and, for the backward and without gradients of their own, z [...,(2+n)n] and rstd [...];
    these four in fp32 (fp64 for fp64 inputs).
    """
    return plain_pre(streams, fn, base, scale, iters, eps, norm_eps)


@hc_pre.register_fake
def _(streams, fn, base, scale, iters, eps, norm_eps):  # type: ignore[no-untyped-def]  # schema above
    (n, width), batch = streams.shape[-2:], streams.shape[:-2]
    like = {"dtype": accumulator(streams, fn), "device": streams.device}
    return (
        torch.empty((*batch, width), dtype=streams.dtype, device=streams.device),
        torch.empty((*batch, n), **like),
        torch.empty((*batch, n, n), **like),
        torch.empty((*batch, fn.shape[0]), **like),
        torch.empty(batch, **like),
    )


@torch.library.custom_op("dsv4::hc_pre_backward", mutates_args=())
def hc_pre_backward(
    grad: Tensor, grad_post: Tensor, grad_comb: Tensor, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, z: Tensor,
    rstd: Tensor, iters: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of streams, fn, base and scale.

    With da the gradient of ``z scale + base``, ``dz = da scale`` and ``dp = dz rstd``:
    ``dX_j = pre_j du + (dp fn)_j - X_j rstd^2 <dz, z> / (nD)``, ``dfn = dp^T v``, ``dbase = sum da``, ``dscale = sum da z``.
    """
    return plain_pre_backward(grad, grad_post, grad_comb, streams, fn, base, scale, z, rstd, iters, eps)


@hc_pre_backward.register_fake
def _(grad, grad_post, grad_comb, streams, fn, base, scale, *_):  # type: ignore[no-untyped-def]  # schema above
    like = {"dtype": accumulator(streams, fn), "device": streams.device}
    return (
        torch.empty(streams.shape, dtype=streams.dtype, device=streams.device),
        *(torch.empty(p.shape, **like) for p in (fn, base, scale)),
    )


def _save_pre(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    *tensors, ctx.iters, ctx.eps, _ = inputs
    z, rstd = output[3:]
    ctx.mark_non_differentiable(z, rstd)
    ctx.save_for_backward(*tensors, z, rstd)


def _pre_backward(ctx, grad, grad_post, grad_comb, _z, _rstd):  # type: ignore[no-untyped-def]  # autograd context
    streams, *parameters, z, rstd = ctx.saved_tensors
    dx, *grads = hc_pre_backward(grad, grad_post, grad_comb, streams, *parameters, z, rstd, ctx.iters, ctx.eps)
    return (dx, *(g.to(p.dtype) for g, p in zip(grads, parameters, strict=True)), None, None, None)


hc_pre.register_autograd(_pre_backward, setup_context=_save_pre)


def plain_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """hc_post without the dispatcher around it: in C++, or by its formula where types differ, for other n and devices."""
    (n, width), acc = streams.shape[-2:], accumulator(streams, y)
    if not in_cpp(streams, n, acc) or y.dtype != streams.dtype:
        return formulas.hc_post(y, streams, post.to(acc), comb.to(acc)).contiguous()
    out = torch.empty(streams.shape, dtype=streams.dtype)
    tensors = (y.contiguous(), streams.contiguous(), *_as(acc, post, comb), out)
    cpp.call("hc_post", acc, streams.dtype, *tensors, streams.shape[:-2].numel(), width)
    return out


def plain_post_backward(
    grad: Tensor, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of hc_post without the dispatcher around it."""
    (n, width), acc, inputs = streams.shape[-2:], accumulator(streams, y), (y, streams, post, comb)
    if not in_cpp(streams, n, acc) or y.dtype != streams.dtype:
        wide = tuple(t.to(acc) for t in inputs)
        gradients = formula_gradients(formulas.hc_post, wide, grad.to(acc))
    else:
        gradients = (torch.empty(y.shape, dtype=y.dtype), torch.empty(streams.shape, dtype=streams.dtype))
        gradients += (torch.empty(post.shape, dtype=acc), torch.empty(comb.shape, dtype=acc))
        tensors = (*_as(streams.dtype, grad, y, streams), *_as(acc, post, comb), *gradients)
        cpp.call("hc_post_backward", acc, streams.dtype, *tensors, streams.shape[:-2].numel(), width)
    dy, dx, dpost, dcomb = (g.contiguous().to(t.dtype) for g, t in zip(gradients, inputs, strict=True))
    return dy, dx, dpost, dcomb


@torch.library.custom_op("dsv4::hc_post", mutates_args=())
def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``X'_k = post_k y + sum_j comb_jk X_j`` in fp32: the FIRST index of comb is summed.

    Shapes: y [...,D], streams [...,n,D], post [...,n] and comb [...,n,n] fp32.  Returns [...,n,D] in the streams' dtype.
    """
    return plain_post(y, streams, post, comb)


@hc_post.register_fake
def _(y, streams, post, comb):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)


@torch.library.custom_op("dsv4::hc_post_backward", mutates_args=())
def hc_post_backward(
    grad: Tensor, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dy = sum_k post_k dX'_k``, ``dX_j = sum_k comb_jk dX'_k``, ``dpost_k = <y, dX'_k>``, ``dcomb_jk = <X_j, dX'_k>``."""
    return plain_post_backward(grad, y, streams, post, comb)


@hc_post_backward.register_fake
def _(grad, *inputs):  # type: ignore[no-untyped-def]  # schema above
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs)


def _save_post(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    ctx.save_for_backward(*inputs)


def _post_backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
    return hc_post_backward(grad, *ctx.saved_tensors)


hc_post.register_autograd(_post_backward, setup_context=_save_post)
