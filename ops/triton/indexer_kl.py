"""Triton kernel of ``dsv4::indexer_kl``: one wave to a query, loss and gradient in one pass.

The row stays in registers between the softmax and the gradient; sums run within a wave, so that there is no barrier and no
local memory.  Rows' losses are summed by a second, tiny launch in a fixed order.
"""

# Kernels are written in Triton's language, which has no annotations for its values.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4c.ops.indexer_kl import GUARD, plain

LARGEST = 16384  # scores of a row that 16 waves hold in registers


@triton.jit
def divergence(scores, target, counted, GUARD: tl.constexpr):
    """Of one row [K]: ``sum_p T log((T + g) / (Y + g))``, and ``Y sum(r) - r`` with ``r = T Y / (Y + g)``."""
    peak = tl.max(scores, 0)
    none = scores == float("-inf")
    # Where there is no entry the peak is -inf and the difference NaN: those places are zero by the mask.
    mass = tl.where(none, 0.0, tl.exp(scores - peak))
    total = tl.sum(mass, 0)
    alive = counted & (total != 0.0)  # NaN is alive: it has to be seen
    y = tl.where(alive, mass * (1.0 / total), 0.0)
    t = tl.where(none | (alive == 0), 0.0, target)
    inverse = 1.0 / (y + GUARD)
    loss = tl.sum(t * tl.log((t + GUARD) * inverse), 0)
    pulled = t * y * inverse
    return loss, y * tl.sum(pulled, 0) - pulled


@triton.jit
def _kl_kernel(
    target_ptr, score_ptr, real_ptr, loss_ptr, grad_ptr, n_chosen, GUARD: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Loss and gradient of one row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    at = row * n_chosen + k
    inside = k < n_chosen
    scores = tl.load(score_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    target = tl.load(target_ptr + at, mask=inside, other=0.0).to(tl.float32)
    loss, grad = divergence(scores, target, tl.load(real_ptr + row) != 0, GUARD)
    tl.store(loss_ptr + row, loss)
    tl.store(grad_ptr + at, grad, mask=inside)


def constants(n_chosen: int) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    return {"GUARD": GUARD, "BLOCK_K": triton.next_power_of_2(n_chosen)}


def warps(n_chosen: int) -> int:
    """One up to 1024 scores, then as many as keep 16 scores a lane."""
    return max(1, triton.next_power_of_2(n_chosen) // 1024)


def fits(target: Tensor, scores: Tensor) -> bool:
    """Whether the kernel takes these: a row that fits into registers, and no fp64."""
    return scores.shape[-1] <= LARGEST and torch.float64 not in (target.dtype, scores.dtype)


def indexer_kl(target: Tensor, scores: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The operator (:mod:`dsv4c.ops.indexer_kl`); in plain torch where a row does not fit."""
    if not fits(target, scores):
        return plain(target, scores, real)
    n_rows, n_chosen = real.numel(), scores.shape[-1]
    losses = torch.zeros(n_rows, dtype=torch.float32, device=scores.device)
    dscores = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    if dscores.numel():
        _kl_kernel[(n_rows,)](
            target.contiguous(), scores.contiguous(), real.contiguous(), losses, dscores, n_chosen,
            **constants(n_chosen), num_warps=warps(n_chosen),
        )  # fmt: skip
    return losses.sum(), dscores


def bytes_moved(n_rows: int, n_chosen: int) -> int:
    """What the two launches load and store: teacher, scores and gradient in fp32, a flag and a loss a row."""
    return n_rows * n_chosen * 4 * 3 + n_rows * (1 + 4 * 2) + 4
