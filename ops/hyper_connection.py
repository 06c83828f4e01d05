"""``dsv4::hc_pre`` and ``dsv4::hc_post``: the residual streams before and after a block (specification, sections 1.1, 1.2).

On a CPU all mixing is batched products of n x n by n x D, which run at the speed of a copy and write where the result is
wanted; bf16 streams are widened a block of tokens at a time.  Saved for the backward are the inputs, the logits and the
norm: 25 numbers a token at n = 4; the backward runs the 20 normalisations again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator, no_autocast
from dsv4c.ops.sinkhorn import normalised, normalised_backward

Pre = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_BLOCK = 1 << 18  # elements of the streams of a block of tokens


def _blocks(streams: Tensor, acc: torch.dtype) -> list[slice]:
    """Of the tokens: all of them where nothing has to be widened."""
    n_tokens = streams.shape[:-2].numel()
    step = n_tokens if streams.dtype == acc else max(8, _BLOCK // max(streams.shape[-2:].numel(), 1))
    return [slice(t, t + step) for t in range(0, n_tokens, max(step, 1))]


def _place(result: Tensor, acc: torch.dtype) -> Tensor:
    """Where a result of this dtype is computed: in its own place, or in a wide one to be rounded from."""
    return result if result.dtype == acc else torch.empty(result.shape, dtype=acc, device=result.device)


def spread(scale: Tensor, n: int) -> Tensor:
    """The three scales at the (2+n)n logits they belong to: n of pre, n of post, n*n of comb."""
    return torch.cat((scale[:1].expand(n), scale[1:2].expand(n), scale[2:].expand(n * n)))


def plain_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, norm_eps: float
) -> Pre:  # fmt: skip
    """hc_pre in plain torch, without the dispatcher around it."""
    (n, width), batch, acc = streams.shape[-2:], streams.shape[:-2], accumulator(streams, fn)
    x = streams.reshape(-1, n, width)
    u = torch.empty((len(x), width), dtype=streams.dtype, device=streams.device)
    z, rstd, post = (torch.empty((len(x), *shape), dtype=acc, device=streams.device) for shape in ((len(fn),), (), (n,)))
    scales, fn = spread(scale, n), fn.to(acc)
    with no_autocast(streams):
        for t in _blocks(streams, acc):
            v = x[t].to(acc).flatten(1)
            rstd[t] = torch.linalg.vector_norm(v, dim=-1).square_().div_(n * width).add_(norm_eps).rsqrt_()
            torch.mm(v, fn.T, out=z[t])
            gates = z[t].mul_(rstd[t, None])[:, : 2 * n].mul(scales[: 2 * n]).add_(base[: 2 * n]).sigmoid_()
            torch.mul(gates[:, n:], 2, out=post[t])
            mixed = _place(u[t], acc)
            torch.bmm(gates[:, None, :n] + eps, v.view(-1, n, width), out=mixed[:, None])
            u[t].copy_(mixed)  # nothing to do where it is the same place
        comb = normalised((z[:, 2 * n :] * scales[2 * n :] + base[2 * n :]).view(-1, n, n), iters, eps)
    return (
        u.view(*batch, width), post.view(*batch, n), comb.view(*batch, n, n), z.view(*batch, len(fn)), rstd.view(batch),
    )  # fmt: skip


def plain_pre_backward(
    grad: Tensor, grad_post: Tensor, grad_comb: Tensor, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, z: Tensor,
    rstd: Tensor, iters: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of hc_pre in plain torch."""
    (n, width), acc = streams.shape[-2:], accumulator(streams, fn)
    x, z, rstd, du = streams.reshape(-1, n, width), z.reshape(-1, len(fn)), rstd.reshape(-1), grad.reshape(-1, width)
    scales = spread(scale, n)
    dx = torch.empty(x.shape, dtype=streams.dtype, device=streams.device)
    dfn, fn = torch.zeros(fn.shape, dtype=acc, device=fn.device), fn.to(acc)
    logits = z * scales + base
    gates = torch.sigmoid(logits[:, : 2 * n])
    slopes = gates * (1 - gates)
    da = torch.empty_like(logits)
    da[:, n : 2 * n] = 2 * slopes[:, n:] * grad_post.reshape(-1, n)
    matrices = logits[:, 2 * n :].view(-1, n, n)
    with no_autocast(streams):
        da[:, 2 * n :] = normalised_backward(grad_comb.reshape(matrices.shape).to(acc), matrices, iters, eps).flatten(1)
        for t in _blocks(streams, acc):
            v, g, d = x[t].to(acc), du[t][:, None].to(acc), _place(dx[t], acc)
            torch.mul(torch.bmm(g, v.mT).squeeze(1), slopes[t, :n], out=da[t, :n])
            dz = da[t] * scales
            dp = dz * rstd[t, None]
            shrink = (dz * z[t]).sum(-1).mul_(rstd[t] * rstd[t]).div_(-n * width)
            torch.mul(v, shrink[:, None, None], out=d).addcmul_(gates[t, :n, None] + eps, g)
            d.flatten(1).addmm_(dp, fn)
            dfn.addmm_(dp.T, v.flatten(1))
            dx[t].copy_(d)
    by_logit = (da * z).sum(0)
    dscale = torch.stack((by_logit[:n].sum(), by_logit[n : 2 * n].sum(), by_logit[2 * n :].sum()))
    return dx.view(streams.shape), dfn, da.sum(0), dscale


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
    """hc_post in plain torch, without the dispatcher around it."""
    (n, width), acc = streams.shape[-2:], accumulator(streams, y)
    x, y, post, comb = streams.reshape(-1, n, width), y.reshape(-1, width), post.reshape(-1, n), comb.reshape(-1, n, n)
    out = torch.empty(x.shape, dtype=streams.dtype, device=streams.device)
    with no_autocast(streams):
        for t in _blocks(streams, acc):
            mixed = _place(out[t], acc)
            torch.bmm(comb[t].to(acc).mT, x[t].to(acc), out=mixed)
            mixed.addcmul_(post[t, :, None].to(acc), y[t][:, None].to(acc))
            out[t].copy_(mixed)
    return out.view(streams.shape)


def plain_post_backward(
    grad: Tensor, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of hc_post in plain torch."""
    (n, width), acc = streams.shape[-2:], accumulator(streams, y)
    shapes = (y.shape, streams.shape, post.shape, comb.shape)
    x, y, post, comb = streams.reshape(-1, n, width), y.reshape(-1, width), post.reshape(-1, n), comb.reshape(-1, n, n)
    grad = grad.reshape(-1, n, width)
    dy, dx, dpost, dcomb = (torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in (y, x, post, comb))
    with no_autocast(streams):
        for t in _blocks(streams, acc):
            g = grad[t].to(acc)
            torch.bmm(comb[t].to(acc), g, out=(d := _place(dx[t], acc)))
            torch.bmm(post[t][:, None].to(acc), g, out=(e := _place(dy[t], acc))[:, None])
            torch.bmm(y[t][:, None].to(acc), g.mT, out=(f := _place(dpost[t], acc))[:, None])
            torch.bmm(x[t].to(acc), g.mT, out=(h := _place(dcomb[t], acc)))
            for result, wide in ((dx, d), (dy, e), (dpost, f), (dcomb, h)):
                result[t].copy_(wide)
    dy, dx, dpost, dcomb = (d.view(s) for d, s in zip((dy, dx, dpost, dcomb), shapes, strict=True))
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
