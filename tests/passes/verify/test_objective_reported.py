"""Objectives that are formed and lost, and means that are divided or weighted more than once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4c import Reach
from dsv4c.passes.verify import Subject
from tests.passes.verify.graphs import found, joint
from tests.passes.verify.right_models import every_right_model, is_proved, right

RULE = "objective-reported"


@every_right_model
def test_right_models_are_proved(name: str) -> None:
    subject = right(name)
    assert is_proved(name, RULE) >= len(subject.expected) > 0
    assert set(subject.coefficients) == set(subject.expected)


def losses(formula: Callable[..., dict[str, Tensor]], *names: str, coefficients: dict[str, float] | None = None) -> Subject:
    subject = joint(formula, {n: Reach() for n in names or ("loss",)}, a=nn.Linear(4, 4, bias=False))
    return replace(subject, coefficients=coefficients or {})


def squares(m: Any, x: Tensor) -> Tensor:
    return m.a(x).square()


def test_one_mean_times_one_coefficient_is_right() -> None:
    for formula in (
        lambda m, x: {"loss": squares(m, x).mean() * 0.3},
        lambda m, x: {"loss": 0.3 * (squares(m, x).sum() / (x >= 0).sum())},
        lambda m, x: {"loss": squares(m, x).sum() / (x >= 0).sum().clamp(min=1) * 0.3},
        lambda m, x: {"loss": torch.stack([squares(m, x).mean(), squares(m, x + 1).mean()]).sum() * 0.3},
        lambda m, x: {"loss": (torch.stack([squares(m, x).sum() / (x >= 0).sum() for _ in range(2)]) * 0.3).sum()},
    ):
        assert found(losses(formula, coefficients={"loss": 0.3}), RULE) == []


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (lambda m, x: {"other": squares(m, x).mean()}, "the objective loss is on and is not returned"),
        (lambda m, x: {"loss": x.new_zeros(()), "other": squares(m, x).mean()}, "the objective loss is a constant"),
        (lambda m, x: {"loss": squares(m, x).detach().mean(), "other": squares(m, x).mean()}, "and trains nothing"),
        (lambda m, x: {"loss": squares(m, x).mean() / (x >= 0).sum()}, "is divided by a count 2 times"),
        (lambda m, x: {"loss": squares(m, x).sum() / (x >= 0).sum() / (x >= 0).sum()}, "is divided by a count 2 times"),
        (lambda m, x: {"loss": squares(m, x).mean() * (x >= 0).sum().float().reciprocal()}, "by a count 2 times"),
    ],
)
def test_a_wrong_objective_is_reported(formula: Callable[..., dict[str, Tensor]], message: str) -> None:
    (only,) = found(losses(formula), RULE)
    assert message in only


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (lambda m, x: {"loss": squares(m, x).mean() * 0.3 * 0.3}, "by 0.09 and its coefficient is 0.3: it is applied twice"),
        (lambda m, x: {"loss": squares(m, x).mean()}, "by 1 and its coefficient is 0.3: it is not applied"),
        (lambda m, x: {"loss": squares(m, x).sum() * 0.3}, "the objective loss is a sum and not a mean"),
        (lambda m, x: {"loss": torch.stack([squares(m, x).mean()] * 2).mean() * 0.3}, "multiplied by 0.15"),
    ],
)
def test_a_wrong_factor_is_reported_where_the_coefficient_is_known(
    formula: Callable[..., dict[str, Tensor]], message: str
) -> None:
    (only,) = found(losses(formula, coefficients={"loss": 0.3}), RULE)
    assert message in only


def test_other_peoples_losses_may_be_sums_and_weighted_as_they_like() -> None:
    assert found(losses(lambda m, x: {"loss": 0.5 * (squares(m, x).sum() * 0.1)}), RULE) == []


def test_a_metric_under_the_name_of_an_objective_has_its_number() -> None:
    def formula(m: Any, x: Tensor) -> dict[str, Tensor]:
        loss = squares(m, x).mean()
        return {"loss": loss, "metrics.loss": loss.detach() * 2, "metrics.other": x.new_zeros(())}

    assert found(losses(formula), RULE) == []

    def zero(m: Any, x: Tensor) -> dict[str, Tensor]:
        loss = squares(m, x).mean()
        return {"loss": loss, "metrics.loss": torch.zeros_like(loss)}

    assert found(losses(zero), RULE) == ["the metric metrics.loss does not depend on the objective loss"]
