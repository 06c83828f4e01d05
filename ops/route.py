"""``dsv4::route``: which experts a token goes to and with what weight (specification, section 6).

Takes the router's logits: the fp32 product before it stays a product of the graph, where a pass can see its dtype.  From
the logits on everything is fp32, whatever autocast says.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4c.ops.precision import accumulator

_LINEAR, _EXPONENTIAL = 20.0, -20.0  # softplus(l) is l above and e^l below, to fp32 precision


def sqrt_softplus(logits: Tensor) -> Tensor:
    """``sqrt(softplus(l))``; below -20 it is ``e^(l/2)``, which does not underflow where softplus does (B63)."""
    scores = F.softplus(logits, threshold=_LINEAR).sqrt_()
    return torch.where(logits < _EXPONENTIAL, torch.exp(logits / 2), scores)


def _slope(scores: Tensor) -> Tensor:
    """``ds/dl = sigmoid(l) / (2s) = (1 - e^(-s^2)) / (2s)``, which tends to s/2 as s does to 0: finite for every logit."""
    square = scores * scores
    return torch.where(scores < 1e-4, scores / 2, torch.expm1(-square).div_(-2 * scores))


def _plain(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, real: Tensor | None, k: int, route_scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    acc = accumulator(logits)
    scores = sqrt_softplus(logits.to(acc).contiguous())
    if given is not None:
        ids = given.to(torch.int64).clone(memory_format=torch.contiguous_format)
    else:
        ids = (scores if bias is None else scores + bias).topk(k, -1).indices
    chosen = scores.gather(-1, ids)
    weights = chosen.div_(chosen.sum(-1, keepdim=True).add_(1e-20)).mul_(route_scale)
    counted = ids if real is None else ids[real]
    load = torch.zeros(logits.shape[-1], dtype=torch.int64, device=logits.device)
    flat = counted.flatten()
    load.scatter_add_(0, flat, torch.ones_like(flat))
    return weights, ids, scores, load


def _plain_backward(
    grad_weights: Tensor, grad_scores: Tensor, ids: Tensor, scores: Tensor, route_scale: float
) -> Tensor:  # fmt: skip
    chosen = scores.gather(-1, ids)
    total = chosen.sum(-1, keepdim=True).add_(1e-20)
    mean = (grad_weights * chosen).sum(-1, keepdim=True).div_(total)
    dchosen = (grad_weights - mean).mul_(route_scale).div_(total)
    dscores = grad_scores.clone(memory_format=torch.contiguous_format).scatter_add_(-1, ids, dchosen)
    return dscores.mul_(_slope(scores))


@torch.library.custom_op("dsv4::route", mutates_args=())
def route(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, real: Tensor | None, k: int, route_scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``s = sqrt(softplus(l))``; the k best of s + bias, or the given k; ``weights = s_ids / sum(s_ids) route_scale``.

    The bias chooses and never weighs, and gets no gradient.  Shapes: logits [N,E], bias [E], given [N,k] int (the hash
    router's experts; bias is not read then), real [N] bool (None: all are).  Returns weights [N,k] in fp32
    (fp64 for fp64 logits), ids [N,k] int64, scores [N,E] in the weights' dtype, and load [E] int64: how many real tokens
    go to each expert.
    """
    return _plain(logits, bias, given, real, k, route_scale)


@route.register_fake
def _(logits, bias, given, real, k, route_scale):  # type: ignore[no-untyped-def]  # schema above
    n_tokens, n_experts = logits.shape
    like = {"dtype": accumulator(logits), "device": logits.device}
    return (
        torch.empty((n_tokens, k), **like),
        torch.empty((n_tokens, k), dtype=torch.int64, device=logits.device),
        torch.empty((n_tokens, n_experts), **like),
        torch.empty((n_experts,), dtype=torch.int64, device=logits.device),
    )


@torch.library.custom_op("dsv4::route_backward", mutates_args=())
def route_backward(
    grad_weights: Tensor, grad_scores: Tensor, ids: Tensor, scores: Tensor, route_scale: float
) -> Tensor:  # fmt: skip
    """``dl = (ds + d of the normalisation at ids) (1 - e^(-s^2)) / (2s)`` [N,E]; finite for every logit."""
    return _plain_backward(grad_weights, grad_scores, ids, scores, route_scale)


@route_backward.register_fake
def _(grad_weights, grad_scores, ids, scores, route_scale):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    ctx.dtype, ctx.route_scale = inputs[0].dtype, inputs[5]
    _, ids, scores, load = output
    ctx.mark_non_differentiable(ids, load)
    ctx.save_for_backward(ids, scores)


def _backward(ctx, grad_weights, _ids, grad_scores, _load):  # type: ignore[no-untyped-def]  # autograd context
    dlogits = route_backward(grad_weights, grad_scores, *ctx.saved_tensors, ctx.route_scale)
    return dlogits.to(ctx.dtype), None, None, None, None, None


route.register_autograd(_backward, setup_context=_save)
