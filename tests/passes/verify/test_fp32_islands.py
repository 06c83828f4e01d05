"""What has to be fp32 inside a bf16 model, line by line of the specification's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsv4c.ops  # noqa: F401  # registers the operators
from dsv4c import Reach, verify_graph
from tests.passes.verify.graphs import bf16, f32, found, joint, tensor, traced
from tests.passes.verify.right_models import every_right_model, is_proved

RULE = "fp32-islands"
Formula = Callable[..., Any]


@every_right_model
def test_right_models_are_proved(name: str) -> None:
    assert is_proved(name, RULE) > 20


def messages(function: Formula, *args: Tensor) -> list[str]:
    return [v.message for v in verify_graph(traced(function, *args), rules=(RULE,)).violations]


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (lambda x: x.softmax(-1), "a softmax is taken in bfloat16"),
        (lambda x: x.log_softmax(-1), "a log_softmax is taken in bfloat16"),
        (lambda x: x.logsumexp(-1), "a logsumexp is taken in bfloat16"),
        (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), "exponentials are added in bfloat16"),
    ],
)
def test_a_softmax_in_bf16_is_reported(formula: Formula, message: str) -> None:
    assert message in messages(formula, tensor(2, 4))
    assert messages(lambda x: formula(x.float()), tensor(2, 4)) == []


def test_activations_are_not_in_the_table() -> None:
    assert messages(lambda x: F.silu(x) * torch.sigmoid(x) + F.gelu(x) + x.exp() + x.tanh(), tensor(2, 4)) == []


def norm(x: Tensor, w: Tensor, *, wide: bool = True, round_first: bool = False) -> Tensor:
    v = x.float() if wide else x
    y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
    return y.to(x.dtype) * w.to(x.dtype) if round_first else (y * w).to(x.dtype)


def test_a_norm_in_fp32_is_right() -> None:
    assert messages(lambda x, w: norm(x, w), tensor(2, 4), tensor(4, dtype=f32)) == []
    assert messages(lambda x, w: norm(x, w), tensor(2, 4), tensor(4)) == []  # a bf16 weight that is widened
    assert messages(lambda x: F.layer_norm(x, (4,)), tensor(2, 4)) == []  # one operator: computes in fp32


def test_a_norm_in_bf16_is_reported() -> None:
    low = messages(lambda x, w: norm(x, w, wide=False), tensor(2, 4), tensor(4))
    assert low == ["the mean of squares of a norm is taken in bfloat16"]


def test_squares_that_are_taken_before_widening_are_reported() -> None:
    low = messages(lambda x: torch.rsqrt(x.square().float().mean(-1, keepdim=True) + 1e-6) * x.float(), tensor(2, 4))
    assert low == ["the mean of squares of a norm is taken in bfloat16"]


def test_a_norm_that_is_rounded_before_its_weight_is_reported() -> None:
    low = messages(lambda x, w: norm(x, w, round_first=True), tensor(2, 4), tensor(4, dtype=f32))
    assert low == ["a norm is rounded to bfloat16 before its weight"]


def test_a_norm_that_is_multiplied_in_bf16_is_reported() -> None:
    low = messages(lambda x: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True)).to(bf16), tensor(2, 4))
    assert low == ["a norm is multiplied in bfloat16"]


@pytest.mark.parametrize(
    ("positions", "frequencies", "ok"), [(f32, f32, True), (bf16, f32, False), (f32, bf16, False), (torch.int64, f32, True)]
)
def test_rotary_angles_are_products_of_fp32(positions: torch.dtype, frequencies: torch.dtype, ok: bool) -> None:
    low = messages(
        lambda p, w: (p[:, None].float() * w.float()).cos(), torch.zeros(8).to(positions), tensor(4, dtype=frequencies)
    )
    assert (low == []) is ok
    assert ok or low[0] == "rotary angles are computed from bfloat16 values"


def test_a_rotation_wants_tables_that_never_were_bf16() -> None:
    x = tensor(1, 8, 4)

    def rotated(x: Tensor, angle: Tensor) -> Tensor:
        return torch.ops.dsv4.rope(x, angle.cos().to(bf16).float(), angle.sin(), False)

    assert messages(rotated, x, tensor(1, 8, 2, dtype=f32)) == ["the table of cosines (cos of dsv4.rope) was bfloat16"]


def test_the_logits_of_a_loss_never_were_bf16() -> None:
    def formula(cast_first: bool) -> Formula:
        def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
            logits = F.linear(x.float(), m.a.weight.float()) if cast_first else m.a(x).float()
            return {"loss": (logits.logsumexp(-1) - logits[..., 0]).mean()}

        return losses

    head = {"a": nn.Linear(4, 4, bias=False)}
    assert found(joint(formula(True), {"loss": Reach()}, dtype=bf16, **head), RULE) == []
    assert found(joint(formula(False), {"loss": Reach()}, dtype=bf16, **head), RULE) == [
        "the logits of a loss were bfloat16"
    ]


def test_a_loss_in_bf16_is_reported() -> None:
    low = found(joint(lambda m, x: {"loss": m.a(x).square().mean()}, {"loss": Reach()}, dtype=bf16, a=nn.Linear(4, 4)), RULE)
    assert low == ["the loss loss is bfloat16"]


def test_what_a_region_hands_on_is_no_loss() -> None:
    subject = joint(lambda m, x: {"streams": m.a(x)}, {"streams": Reach()}, dtype=bf16, a=nn.Linear(4, 4))
    assert found(subject, RULE) == []


def test_parameters_that_stay_in_fp32_are_stored_and_used_so() -> None:
    def formula(m: Any, x: Tensor) -> dict[str, Tensor]:
        return {"loss": F.linear(x.float(), m.a.weight.to(x.dtype).float()).sum()}

    subject = joint(formula, {"loss": Reach()}, dtype=bf16, a=nn.Linear(4, 4, bias=False))
    assert found(subject, RULE) == []
    assert found(replace(subject, fp32=("a.weight",)), RULE) == ["a.weight is stored in bfloat16"]
    subject = joint(formula, {"loss": Reach()}, x=tensor(2, 4), a=nn.Linear(4, 4, bias=False))
    assert found(replace(subject, fp32=("a.weight",)), RULE) == ["a.weight is rounded to bfloat16"]


def test_experts_are_added_in_fp32() -> None:
    def added(x: Tensor, w: Tensor, ends: Tensor, *, wide: bool) -> Tensor:
        out = torch.ops.dsv4.grouped_mm(x, w, ends)
        out = out.float() if wide else out
        return out.unflatten(0, (-1, 2)).sum(1)

    args = (tensor(8, 16), tensor(2, 16, 16), torch.tensor([4, 8], dtype=torch.int32))
    assert messages(lambda *a: added(*a, wide=True), *args) == []
    assert messages(lambda *a: added(*a, wide=False), *args) == ["experts are added in bfloat16"]


def test_nothing_is_found_in_a_model_that_is_fp32_throughout() -> None:
    assert messages(lambda x, w: norm(x, w, wide=False).softmax(-1), tensor(2, 4, dtype=f32), tensor(4, dtype=f32)) == []
