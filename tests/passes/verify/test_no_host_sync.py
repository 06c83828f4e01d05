"""The rule ``no-host-sync``: nothing in a step waits for a value on the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4c.passes.verify import verify
from tests.passes.verify.traced import B, S, messages, model, report


@pytest.mark.parametrize("kind", ["swa-hash", "csa", "hca", "mtp"])
def test_a_right_model_is_proved(kind: str) -> None:
    found = verify(model(kind), ["no-host-sync"])
    assert found.ok, str(found)
    assert found.checked["no-host-sync"] > 500


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.masked_fill(x > 0, 0.0),
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x[:, torch.arange(3)],
        lambda x: torch.index_put(x, (x > 0,), torch.zeros(())),
    ],
    ids=["where", "masked_fill", "casts", "integers as index", "one number for a mask"],
)
def test_what_stays_on_the_device_is_proved(function: Callable[[Tensor], Tensor]) -> None:
    found = report("no-host-sync", function, torch.ones(B, S))
    assert found.ok, str(found)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x * x.sum().item(), "reads a number from the device"),
        (lambda x: x[x > 0], "indexes by the boolean mask"),
        (lambda x: x.nonzero(), "has a size that is known on the device only"),
        (lambda x: torch.masked_select(x, x > 0), "has a size that is known on the device only"),
        (lambda x: x.unique(), "has a size that is known on the device only"),
    ],
    ids=["item", "boolean mask", "nonzero", "masked_select", "unique"],
)
def test_what_waits_is_reported(function: Callable[[Tensor], Tensor], says: str) -> None:
    found = messages(report("no-host-sync", function, torch.ones(B, S), mode="symbolic"))
    assert any(says in m for m in found), found


def test_a_copy_to_another_device_is_reported() -> None:
    (message,) = messages(report("no-host-sync", lambda x: x.to("meta"), torch.ones(B, S)))
    assert "copies from cpu to meta" in message


def test_sizes_that_follow_from_one_that_waits_are_not_reported_again() -> None:
    found = report("no-host-sync", lambda x: (x[x > 0] * 2).exp(), torch.ones(B, S), mode="symbolic")
    assert len(found.violations) == 1
