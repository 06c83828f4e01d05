"""The rule ``mixing``: comb and post go to the mixing that they were made for, as they were made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4c import ops
from dsv4c.passes.verify import verify
from tests.passes.verify.traced import B, S, messages, model, numbers, report

N, D = 4, 8
STREAMS = (numbers(B, S, N, D), numbers(24, N * D), numbers(24), numbers(3))


def pre(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return ops.hc_pre(streams, fn, base, scale, 20, 1e-6, 1e-6)[:3]


@pytest.mark.parametrize("kind", ["swa", "csa-hash", "mtp"])
def test_a_right_model_is_proved(kind: str) -> None:
    found = verify(model(kind), ["mixing"])
    assert found.ok and found.checked["mixing"] == (4 if kind == "mtp" else 2)


def right(x: Tensor, *mix: Tensor) -> Tensor:
    u, post, comb = pre(x, *mix)
    return ops.hc_post(u, x, post, comb)


def through_casts(x: Tensor, *mix: Tensor) -> Tensor:
    u, post, comb = pre(x, *mix)
    return ops.hc_post(u, x.clone(), post.double().float(), comb.contiguous())


@pytest.mark.parametrize("forward", [right, through_casts])
def test_a_right_mixing_is_proved(forward: Callable[..., Tensor]) -> None:
    assert report("mixing", forward, *STREAMS).ok


def untransposed(x: Tensor, *mix: Tensor) -> Tensor:
    u, post, comb = pre(x, *mix)
    return ops.hc_post(u, x, post, comb.mT)


def made_elsewhere(x: Tensor, *mix: Tensor) -> Tensor:
    u, post, comb = pre(x, *mix)
    return ops.hc_post(u, x, post, comb.softmax(-1))


def of_other_streams(x: Tensor, *mix: Tensor) -> Tensor:
    u, post, comb = pre(torch.relu(x), *mix)
    return ops.hc_post(u, x, post, comb)


def of_two_mixings(x: Tensor, *mix: Tensor) -> Tensor:
    u, post, _ = pre(x, *mix)
    _, _, comb = pre(torch.relu(x), *mix)
    return ops.hc_post(u, x, post, comb)


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (untransposed, "comb of hc_post is transposed"),
        (made_elsewhere, "comb of hc_post is not what dsv4.hc_pre returned as comb"),
        (of_other_streams, "not made of the streams it mixes"),
        (of_two_mixings, "not made of the streams it mixes"),
    ],
)
def test_a_wrong_mixing_is_reported(forward: Callable[..., Tensor], says: str) -> None:
    (message,) = messages(report("mixing", forward, *STREAMS))
    assert says in message
