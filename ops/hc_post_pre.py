"""``dsv4::hc_post_pre``: ``hc_post`` of one block and ``hc_pre`` of the next in one pass (specification, section 1).

What graph passes put in the place of the two after autograd, forward and backward; so neither has a gradient registered.  On
a CPU a block of tokens stays in the cache from the one to the other (:mod:`dsv4c.ops.cpp`): forward the new streams are
written once and not read again, backward the sum of what their gradient is made of is never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops import cpp
from dsv4c.ops.hyper_connection import plain_post, plain_post_backward, plain_pre, plain_pre_backward
from dsv4c.ops.precision import accumulator
from dsv4c.ops.sinkhorn import in_cpp

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Backward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _fuses(y: Tensor, streams: Tensor, fn: Tensor) -> bool:
    """Whether the C++ kernels take it."""
    acc = accumulator(streams, fn)
    return y.dtype == streams.dtype and acc == accumulator(streams, y) and in_cpp(streams, streams.shape[-2], acc)


def _as(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(dtype).contiguous() for t in tensors)


def plain(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float,
    norm_eps: float,
) -> Forward:  # fmt: skip
    """The operator without the dispatcher around it: in C++, or one after the other where that does not take it."""
    if not _fuses(y, streams, fn):
        new_streams = plain_post(y, streams, post, comb)
        return (new_streams, *plain_pre(new_streams, fn, base, scale, iters, eps, norm_eps))
    (n, width), batch, acc = streams.shape[-2:], streams.shape[:-2], accumulator(streams, fn)
    new_streams, u = (torch.empty((*batch, *shape), dtype=streams.dtype) for shape in ((n, width), (width,)))
    shapes = ((n,), (n, n), (fn.shape[0],), ())
    new_post, new_comb, z, rstd = (torch.empty((*batch, *shape), dtype=acc) for shape in shapes)
    tensors = (y.contiguous(), streams.contiguous(), *_as(acc, post, comb, fn, base, scale))
    outputs = (new_streams, u, new_post, new_comb, z, rstd)
    cpp.call("hc_post_pre", acc, streams.dtype, *tensors, *outputs, rstd.numel(), width, iters, eps, norm_eps)
    return outputs


def plain_backward(
    grad_streams: Tensor | None, grad_u: Tensor, grad_post: Tensor, grad_comb: Tensor, y: Tensor, streams: Tensor,
    post: Tensor, comb: Tensor, new_streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, z: Tensor, rstd: Tensor,
    iters: int, eps: float,
) -> Backward:  # fmt: skip
    """The gradients without the dispatcher around them."""
    if not _fuses(y, streams, fn):
        dx, dfn, dbase, dscale = plain_pre_backward(
            grad_u, grad_post, grad_comb, new_streams, fn, base, scale, z, rstd, iters, eps
        )
        total = dx if grad_streams is None else grad_streams.to(dx.dtype) + dx
        return (*plain_post_backward(total, y, streams, post, comb), dfn, dbase, dscale)
    stored, acc = streams.dtype, accumulator(streams, fn)
    gradients = tuple(torch.empty(t.shape, dtype=stored) for t in (y, streams))
    gradients += tuple(torch.empty(t.shape, dtype=acc) for t in (post, comb, fn, base, scale))
    tensors = (
        None if grad_streams is None else grad_streams.to(stored).contiguous(), *_as(stored, grad_u),
        *_as(acc, grad_post, grad_comb), *_as(stored, y, streams), *_as(acc, post, comb), *_as(stored, new_streams),
        *_as(acc, fn, base, scale, z, rstd),
    )  # fmt: skip
    cpp.call("hc_post_pre_backward", acc, stored, *tensors, *gradients, rstd.numel(), streams.shape[-1], iters, eps)
    dy, dx, dpost, dcomb, dfn, dbase, dscale = gradients
    return dy, dx, dpost.to(post.dtype), dcomb.to(comb.dtype), dfn, dbase, dscale


@torch.library.custom_op("dsv4::hc_post_pre", mutates_args=())
def hc_post_pre(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The new streams, what the next block reads of them, and how its result is mixed back.

    ``X'_k = post_k y + sum_j comb_jk X_j``, rounded to the streams' dtype; u, post', comb', z and rstd are those of
    ``hc_pre(X')`` (:mod:`dsv4c.ops.hyper_connection`).

    Shapes: y [...,D], streams [...,n,D], post [...,n], comb [...,n,n], fn [(2+n)n,nD], base [(2+n)n], scale [3].  Returns X'
    [...,n,D] and u [...,D] in the streams' dtype, and in fp32 (fp64 for fp64 inputs) post' [...,n], comb' [...,n,n],
    z [...,(2+n)n] and rstd [...].
    """
    return plain(y, streams, post, comb, fn, base, scale, iters, eps, norm_eps)


@hc_post_pre.register_fake
def _(y, streams, post, comb, fn, base, scale, iters, eps, norm_eps):  # type: ignore[no-untyped-def]  # schema above
    (n, width), batch = streams.shape[-2:], streams.shape[:-2]
    like = {"dtype": accumulator(streams, fn), "device": streams.device}
    return (
        *(torch.empty((*batch, *s), dtype=streams.dtype, device=streams.device) for s in ((n, width), (width,))),
        *(torch.empty((*batch, *s), **like) for s in ((n,), (n, n), (fn.shape[0],), ())),
    )


@torch.library.custom_op("dsv4::hc_post_pre_backward", mutates_args=())
def hc_post_pre_backward(
    grad_streams: Tensor | None, grad_u: Tensor, grad_post: Tensor, grad_comb: Tensor, y: Tensor, streams: Tensor,
    post: Tensor, comb: Tensor, new_streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, z: Tensor, rstd: Tensor,
    iters: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of y, streams, post, comb, fn, base and scale.

    ``g = dX' + hc_pre_backward(du, dpost', dcomb')``, both terms and their sum in the streams' dtype, dX' being what reaches
    the new streams from elsewhere (None: nothing); then ``hc_post_backward(g)``.  Dtypes are those that the two operators
    return: of y, streams, post and comb as they have them, of the parameters fp32 (fp64 for fp64 inputs).
    """
    return plain_backward(
        grad_streams, grad_u, grad_post, grad_comb, y, streams, post, comb, new_streams, fn, base, scale, z, rstd, iters, eps
    )


@hc_post_pre_backward.register_fake
def _(*args):  # type: ignore[no-untyped-def]  # schema above
    inputs, parameters, acc = args[4:8], args[9:12], accumulator(args[5], args[9])
    return (
        *(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs),
        *(torch.empty(p.shape, dtype=acc, device=p.device) for p in parameters),
    )
