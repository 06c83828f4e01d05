"""What an objective trains against what its policy says, on formulas of a few lines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4c import Reach
from tests.passes.verify.graphs import found, joint, report
from tests.passes.verify.mutation import source_line
from tests.passes.verify.right_models import every_right_model, is_proved, right

RULE = "gradient-reach"
A_ONLY, BOTH = Reach(may=("a.*",), must=("a.weight",)), Reach(must=("a.weight", "b.weight"))


@every_right_model
def test_right_models_are_proved(name: str) -> None:
    trained = [o for o in right(name).objectives if o not in right(name).watched]
    assert is_proved(name, RULE) >= len(trained) > 0


def two(losses: Callable[..., dict[str, Tensor]], **policies: Reach) -> Any:
    return joint(losses, policies, a=nn.Linear(4, 4, bias=False), b=nn.Linear(4, 4, bias=False))


CUTS: dict[str, Callable[[Tensor], Tensor]] = {"detach": lambda h: h.detach(), "data": lambda h: h.data}


@pytest.mark.parametrize("cut", CUTS)
def test_however_it_is_cut_it_is_cut(cut: str) -> None:
    assert found(two(lambda m, x: {"loss": m.a(CUTS[cut](m.b(x))).sum()}, loss=A_ONLY), RULE) == []


def test_no_grad_cuts_too() -> None:
    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            h = m.b(x)
        return {"loss": m.a(h).sum()}

    assert found(two(losses, loss=A_ONLY), RULE) == []


def test_a_leak_names_the_value_where_it_was_made_and_the_line_that_uses_it() -> None:
    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        hidden = m.b(x)
        return {"loss": m.a(hidden).sum()}

    (violation,) = report(two(losses, loss=A_ONLY), RULE).violations
    assert violation.message.startswith("loss trains b.weight, which it may not: ")
    assert source_line(violation.source) == 'return {"loss": m.a(hidden).sum()}'
    assert "hidden, made in" in violation.message and Path(__file__).name in violation.message
    assert violation.hint.startswith("detach hidden before this line uses it")


def test_a_detach_beside_the_path_is_no_cut() -> None:
    decoy = found(two(lambda m, x: {"loss": (m.a(m.b(x)) + m.b(x).detach()).sum()}, loss=A_ONLY), RULE)
    assert len(decoy) == 1 and "b.weight" in decoy[0]


def test_what_flows_through_another_value_is_a_violation_of_its_own() -> None:
    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        first = m.b(x)
        second = m.c(x)
        return {"loss": (m.a(first) * m.a(second)).sum()}

    linear = lambda: nn.Linear(4, 4, bias=False)  # noqa: E731
    messages = found(joint(losses, {"loss": A_ONLY}, a=linear(), b=linear(), c=linear()), RULE)
    assert len(messages) == 2
    assert any("b.weight" in m and "first" in m for m in messages)
    assert any("c.weight" in m and "second" in m for m in messages)


def test_an_objective_that_misses_what_it_has_to_train_is_reported() -> None:
    (message,) = found(two(lambda m, x: {"loss": m.a(m.b(x).detach()).sum()}, loss=BOTH), RULE)
    assert message == "loss does not train b.weight, which it has to"


def test_a_policy_that_matches_nothing_is_reported() -> None:
    (message,) = found(two(lambda m, x: {"loss": m.a(x).sum()}, loss=Reach(must=("c.*",))), RULE)
    assert message == "the policy of loss requires 'c.*', and no parameter has such a name"


def test_a_backward_graph_holds_only_the_parameters_that_were_saved_for_it() -> None:
    subject = two(lambda m, x: {"loss": m.a(x).sum()}, loss=Reach(must=("c.*",)))
    assert found(replace(subject, stage="backward"), RULE) == []


def test_losses_that_are_summed_inside_cannot_be_told_apart() -> None:
    both = two(lambda m, x: {"loss": m.a(x).sum() + m.b(x).sum()}, loss=BOTH, aux=A_ONLY)
    assert "the policy names objective aux, which the module does not return (it returns loss)" in found(both, RULE)


class _Injects(torch.autograd.Function):
    """A loss that is written into the backward pass and returned by nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def test_a_gradient_that_no_objective_carries_is_reported() -> None:
    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        h = m.a(x)
        return {"loss": _Injects.apply(m.b(h), h.square().sum()).sum()}

    messages = found(two(losses, loss=Reach()), RULE)
    assert messages and "a gradient that no objective's tangent carries is added to a.weight" in messages[0]


def test_a_gradient_that_nothing_but_the_injection_carries_is_reported() -> None:
    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        return {"loss": _Injects.apply(m.b(x), m.a(x).square().sum()).sum()}

    assert any("is added to a.weight" in m for m in found(two(losses, loss=Reach(must=("b.weight",))), RULE))


def test_the_path_is_short_and_says_what_it_leaves_out() -> None:
    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        h = m.b(x)
        for _ in range(20):
            h = torch.tanh(h)
        y = m.a(h)
        for _ in range(20):
            y = torch.tanh(y)
        return {"loss": y.sum()}

    (violation,) = report(two(losses, loss=A_ONLY), RULE).violations
    assert len(violation.path) <= 15
    assert any(line.startswith("... ") and line.endswith(" nodes") for line in violation.path)
    assert violation.path[0].startswith("tangents_1")


def test_an_objective_without_a_policy_may_train_anything() -> None:
    assert found(two(lambda m, x: {"loss": m.a(x).sum(), "other": m.b(x).sum()}, loss=A_ONLY), RULE) == []


def test_parameters_that_two_objectives_share_are_judged_one_by_one() -> None:
    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        h = m.b(x)
        return {"main": h.sum(), "aux": m.a(h.detach()).sum()}

    right_ = two(losses, main=Reach(may=("b.*",), must=("b.*",)), aux=A_ONLY)
    assert found(right_, RULE) == []
    (message,) = found(two(losses, main=A_ONLY, aux=A_ONLY), RULE)[:1]
    assert message.startswith("main trains b.weight, which it may not")


def test_a_deep_copy_of_a_module_is_not_the_module() -> None:
    shared = nn.Linear(4, 4, bias=False)
    policies = {"loss": A_ONLY}
    formula = lambda m, x: {"loss": (m.a(x) - m.b(x)).square().sum()}  # noqa: E731
    (message,) = found(joint(formula, policies, a=shared, b=copy.deepcopy(shared)), RULE)
    assert "loss trains b.weight" in message
