"""Triton kernels of ``dsv4::route``: scores, choice, weights and load of a block of tokens in one pass, and the gradient.

The k best are found one after another among the scores that a token's lanes hold; among equal ones the first is taken.
Counts are integers, so that adding them atomically gives the same result in every order.
"""

# Kernels are written in Triton's language, which has no annotations for its values.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sqrt_softplus(x):
    """``sqrt(log(1 + e^x))``: x above 20, ``e^(x/2)`` below -20, where the sum would lose it (B63)."""
    middle = tl.where(x > 20.0, 20.0, tl.where(x < -20.0, -20.0, x))
    grown = tl.exp(middle)
    # log(1 + e) without losing a small e: the rounding of the sum is divided out.
    one = 1.0 + grown
    softplus = tl.where(one == 1.0, grown, tl.log(one) * (grown / (one - 1.0)))
    root = tl.sqrt(tl.where(x > 20.0, x, softplus))
    return tl.where(x < -20.0, tl.exp(x * 0.5), root)


@triton.jit
def _route_kernel(
    logit_ptr, bias_ptr, given_ptr, real_ptr, weight_ptr, id_ptr, score_ptr, load_ptr, n_tokens, n_experts, route_scale,
    K: tl.constexpr, BIASED: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    slots = tl.arange(0, BLOCK_K)
    there = tokens < n_tokens
    at = tokens.to(tl.int64)[:, None] * n_experts + experts[None, :]
    inside = there[:, None] & (experts < n_experts)[None, :]
    scores = _sqrt_softplus(tl.load(logit_ptr + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(score_ptr + at, scores, mask=inside)
    choice = scores
    if BIASED:
        choice += tl.load(bias_ptr + experts, mask=experts < n_experts, other=0.0).to(tl.float32)[None, :]
    choice = tl.where((experts < n_experts)[None, :], choice, float("-inf"))
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for i in tl.static_range(K):
        if GIVEN:
            best = tl.load(given_ptr + tokens * K + i, mask=there, other=0).to(tl.int32)
        else:
            # NaN everywhere has no largest: whatever comes out has to be an expert.
            best = tl.minimum(tl.argmax(choice, 1), n_experts - 1)
        here = experts[None, :] == best[:, None]
        score = tl.sum(tl.where(here, scores, 0.0), 1)
        choice = tl.where(here, float("-inf"), choice)
        ids = tl.where((slots == i)[None, :], best[:, None], ids)
        chosen = tl.where((slots == i)[None, :], score[:, None], chosen)
    weights = chosen * (route_scale / (tl.sum(chosen, 1) + 1e-20))[:, None]
    to = tokens[:, None] * K + slots[None, :]
    used = there[:, None] & (slots < K)[None, :]
    tl.store(weight_ptr + to, weights, mask=used)
    tl.store(id_ptr + to, ids.to(tl.int64), mask=used)
    if MASKED:
        used = used & (tl.load(real_ptr + tokens, mask=there, other=0) != 0)[:, None]
    tl.atomic_add(load_ptr + ids, tl.full([BLOCK_T, BLOCK_K], 1, tl.int32), mask=used, sem="relaxed")


@triton.jit
def _backward_kernel(
    dweight_ptr, dscore_ptr, id_ptr, score_ptr, dlogit_ptr, n_tokens, n_experts, route_scale,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``dl = (ds + d of the normalisation) (1 - e^(-s^2)) / (2s)``."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts, slots = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    there = tokens < n_tokens
    row = tokens.to(tl.int64)[:, None] * n_experts
    at = row + experts[None, :]
    inside = there[:, None] & (experts < n_experts)[None, :]
    scores = tl.load(score_ptr + at, mask=inside, other=1.0)
    ds = tl.load(dscore_ptr + at, mask=inside, other=0.0)
    to = tokens[:, None] * K + slots[None, :]
    used = there[:, None] & (slots < K)[None, :]
    ids = tl.load(id_ptr + to, mask=used, other=0)
    chosen = tl.load(score_ptr + row + ids, mask=used, other=0.0)
    dw = tl.load(dweight_ptr + to, mask=used, other=0.0)
    total = tl.sum(chosen, 1) + 1e-20
    pulled = (dw - (tl.sum(dw * chosen, 1) / total)[:, None]) * (route_scale / total)[:, None]
    for i in tl.static_range(K):
        expert = tl.load(id_ptr + tokens * K + i, mask=there, other=-1)
        d = tl.sum(tl.where((slots == i)[None, :], pulled, 0.0), 1)
        ds += tl.where(experts[None, :] == expert[:, None], d[:, None], 0.0)
    square = scores * scores
    # 1 - e^(-s^2) loses a small square, s - s^3/4 + s^5/12 does not: each where it is exact to fp32.
    small = scores * (0.5 - square * (0.25 - square * 0.083333333333))
    slope = tl.where(square < 0.01, small, (1.0 - tl.exp(-square)) / (2.0 * scores))
    tl.store(dlogit_ptr + at, ds * slope, mask=inside)


def constants(n_experts: int, k: int) -> dict[str, Any]:
    """The compile-time arguments that both kernels take: 4 waves hold 2048 scores."""
    block = triton.next_power_of_2(n_experts)
    return {"K": k, "BLOCK_T": max(1, 2048 // block), "BLOCK_E": block, "BLOCK_K": triton.next_power_of_2(k)}


def route(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, real: Tensor | None, k: int, route_scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator (:mod:`dsv4c.ops.route`) on logits in fp32, fp16 or bf16."""
    (n, n_experts), device = logits.shape, logits.device
    weights = torch.empty((n, k), dtype=torch.float32, device=device)
    ids = torch.empty((n, k), dtype=torch.int64, device=device)
    scores = torch.empty((n, n_experts), dtype=torch.float32, device=device)
    load = torch.zeros(n_experts, dtype=torch.int32, device=device)
    if n:
        chosen = constants(n_experts, k)
        bias, given, real = (None if t is None else t.contiguous() for t in (bias, given, real))
        _route_kernel[(triton.cdiv(n, chosen["BLOCK_T"]),)](
            logits.contiguous(), bias, given, real, weights, ids, scores, load, n, n_experts, route_scale, **chosen,
            BIASED=bias is not None and given is None, GIVEN=given is not None, MASKED=real is not None, num_warps=4,
        )  # fmt: skip
    return weights, ids, scores, load.long()


def route_backward(grad_weights: Tensor, grad_scores: Tensor, ids: Tensor, scores: Tensor, route_scale: float) -> Tensor:
    """The gradient of the logits, in fp32."""
    dlogits = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    if dlogits.numel():
        (n, n_experts), chosen = scores.shape, constants(scores.shape[1], ids.shape[1])
        _backward_kernel[(triton.cdiv(n, chosen["BLOCK_T"]),)](
            grad_weights.contiguous(), grad_scores.contiguous(), ids.contiguous(), scores.contiguous(), dlogits, n,
            n_experts, route_scale, **chosen, num_warps=4,
        )  # fmt: skip
    return dlogits


def bytes_moved(n: int, n_experts: int, k: int) -> dict[str, int]:
    """What a launch of a learned router loads and stores; the chosen scores are read again from the cache."""
    return {
        "forward": n * (n_experts * 8 + k * 12 + 1) + n_experts * 8,
        "backward": n * (n_experts * 12 + k * 12),
    }
