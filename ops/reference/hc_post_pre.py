"""The streams after one block and before the next, as the specification writes them (sections 1.1 and 1.2)."""

from __future__ import annotations

from torch import Tensor

from dsv4c.ops.reference.hyper_connection import hc_post, hc_pre


def hc_post_pre(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``X'_k = post_k y + sum_j comb_jk X_j``, and of X' what the next block reads and how its result is mixed back."""
    new_streams = hc_post(y, streams, post, comb)
    return (new_streams, *hc_pre(new_streams, fn, base, scale, iters, eps, norm_eps))
