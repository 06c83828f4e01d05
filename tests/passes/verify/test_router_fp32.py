"""Routers of several families, right and wrong in each of the ways in which a router loses its fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4c import Reach, verify_graph
from dsv4c.errors import ConfigError
from dsv4c.passes.verify import Subject, verify
from tests.passes.verify.graphs import bf16, f32, found, joint, tensor, traced
from tests.passes.verify.right_models import every_right_model, is_proved, right

RULE = "router-fp32"
N, D, E = 8, 16, 4


@every_right_model
def test_right_models_are_proved(name: str) -> None:
    routers = sum(n.endswith("ffn.gate.weight") for n in (*right(name).parameters, *right(name).frozen))
    assert is_proved(name, RULE) == 2 * routers > 0  # each weight, and the operator that it decides in


def messages(function: Callable[..., Any], *more: Tensor, weight: torch.dtype = bf16) -> list[str]:
    """What is said about the router ``w`` of a function (x, w, ...) on bf16 activations."""
    gm = traced(function, tensor(N, D), tensor(E, D, dtype=weight), *more)
    return [v.message for v in verify_graph(gm, rules=(RULE,), router=("w_1",)).violations]


def softmax_router(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = F.linear(x.float(), w.float()).softmax(-1).topk(2)
    return weights / weights.sum(-1, keepdim=True), ids


def sigmoid_router(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(F.linear(x.float(), w.float()))
    ids = (scores + b).topk(2).indices
    return scores.gather(-1, ids), ids


def hash_router(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    weights = F.softplus(F.linear(x.float(), w.float())).sqrt().gather(-1, ids)
    return weights / weights.sum(-1, keepdim=True)


def test_right_routers_are_silent() -> None:
    assert messages(softmax_router) == []  # these casts are also what torch.autocast(dtype=float32) leaves on an accelerator
    assert messages(softmax_router, weight=f32) == []
    assert messages(sigmoid_router, tensor(E, dtype=f32)) == []
    assert messages(hash_router, torch.zeros(N, 2, dtype=torch.long)) == []


def test_a_wide_router_is_right_in_fp64_too() -> None:
    assert messages(lambda x, w: F.linear(x.double(), w.double()).topk(2)) == []


def test_a_product_in_bf16_is_reported_and_widening_it_changes_nothing() -> None:
    assert messages(lambda x, w: F.linear(x, w).topk(2)) == ["the router w_1 is multiplied in bfloat16"]
    assert messages(lambda x, w: F.linear(x, w).float().softmax(-1).topk(2)) == ["the router w_1 is multiplied in bfloat16"]
    assert messages(lambda x, w: (x @ w.t()).float().topk(2)) == ["the router w_1 is multiplied in bfloat16"]
    assert messages(lambda x, w: torch.einsum("nd,ed->ne", x, w).topk(2)) == ["the router w_1 is multiplied in bfloat16"]


def test_the_weight_is_followed_through_views_and_casts() -> None:
    assert messages(lambda x, w: (x @ w.float().to(bf16).reshape(E, D).transpose(0, 1)).topk(2)) != []
    assert messages(lambda x, w: (x.float() @ w.reshape(E, D).float().transpose(0, 1)).topk(2)) == []


def test_a_dead_fp32_twin_is_no_evidence() -> None:
    def twin(x: Tensor, w: Tensor) -> Any:
        F.linear(x.float(), w.float())
        return F.linear(x, w).float().topk(2)

    assert messages(twin) == ["the router w_1 is multiplied in bfloat16"]


def test_a_dead_bf16_twin_is_no_defect() -> None:
    def twin(x: Tensor, w: Tensor) -> Any:
        F.linear(x, w)
        return F.linear(x.float(), w.float()).topk(2)

    assert messages(twin) == []


@pytest.mark.parametrize(
    "rounded",
    [
        lambda x, w: F.linear(x.float(), w.float()).to(bf16).topk(2),
        lambda x, w: F.linear(x.float(), w.float()).to(bf16).float().topk(2),
        lambda x, w: F.linear(x.float(), w.float()).softmax(-1).to(bf16).topk(2),
        lambda x, w: F.linear(x.float(), w.float()).sigmoid().to(bf16).float().argmax(-1),
    ],
)
def test_scores_that_are_rounded_before_the_choice_are_reported(rounded: Callable[..., Any]) -> None:
    assert messages(rounded) == ["the scores of the router w_1 are rounded to bfloat16 before the choice"]


def test_a_cast_after_the_choice_is_the_callers_business() -> None:
    def cast(x: Tensor, w: Tensor) -> Tensor:
        weights, _ = softmax_router(x, w)
        return weights.to(bf16)

    assert messages(cast) == []


def test_weights_that_are_normalised_in_bf16_are_reported() -> None:
    def low(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        weights = F.linear(x.float(), w.float()).topk(2).values.to(bf16)
        return y.relu() * (weights / weights.sum(-1, keepdim=True))

    assert messages(low, tensor(N, 2)) == ["the weights of the router w_1 are computed in bfloat16"]


def test_a_bf16_bias_is_reported() -> None:
    assert messages(sigmoid_router, tensor(E)) == ["b_1 is bfloat16 where it is added to the scores of the router w_1"]

    def widened(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return sigmoid_router(x, w, b.float())

    assert messages(widened, tensor(E)) == ["b_1 is bfloat16 where it is added to the scores of the router w_1"]


def test_the_operator_wants_logits_that_never_were_bf16() -> None:
    def route(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return torch.ops.dsv4.route(F.linear(x, w).float(), b, None, None, 2, 1.5)

    gm = traced(route, tensor(N, D), tensor(E, D), tensor(E, dtype=f32))
    report = verify_graph(gm, rules=(RULE,))
    assert [v.message for v in report.violations] == ["dsv4.route decides on logits that were bfloat16"]


def test_a_router_that_there_is_not_is_an_error() -> None:
    gm = traced(softmax_router, tensor(N, D), tensor(E, D))
    with pytest.raises(ConfigError, match="no parameter, placeholder or module is called 'gate'"):
        verify_graph(gm, router=("gate",))


@pytest.mark.parametrize(
    ("setting", "device", "ok"),
    [
        ("torch.backends.cuda.matmul.allow_tf32", "cpu", True),
        ("torch.backends.cuda.matmul.allow_tf32", "meta", False),
        ('torch.set_float32_matmul_precision("highest") is not in effect', "cpu", False),
    ],
)
def test_settings_of_the_process_count_where_they_apply(setting: str, device: str, ok: bool) -> None:
    x, w = tensor(N, D).to(device), tensor(E, D).to(device)
    gm = traced(softmax_router, x, w)
    subject = Subject("graph", gm, routers=("w_1",), reduced_precision={setting: True})
    assert verify(subject, (RULE,)).ok is ok
    assert verify(Subject("graph", gm, routers=("w_1",), reduced_precision={setting: False}), (RULE,)).ok


class Block(nn.Module):
    """x + experts(x), as other people write it: the router is a Linear, the sum may be left in fp32."""

    def __init__(self, cast: bool, inside_autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.moe = _MoE(cast, inside_autocast)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


class _MoE(nn.Module):
    def __init__(self, cast: bool, inside_autocast: torch.dtype | None) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(4, E, bias=False), nn.Linear(4, 4, bias=False)
        self.cast, self.inside_autocast = cast, inside_autocast

    def forward(self, x: Tensor) -> Tensor:
        if self.inside_autocast is not None:
            with torch.autocast("cpu", self.inside_autocast):
                scores = self.gate(x.float())
        else:
            scores = F.linear(x.float(), self.gate.weight.float())
        weights = scores.softmax(-1).topk(1).values
        y = weights * self.expert(x)
        return y.to(x.dtype) if self.cast else y


def block(**options: Any) -> Subject:
    return joint(
        lambda m, x: {"loss": m.block(x).float().sum()}, {"loss": Reach()}, block=Block(**options), dtype=bf16,
        routers=("*.gate.weight",),
    )  # fmt: skip


def test_an_fp32_sum_of_experts_may_not_promote_the_residual_stream() -> None:
    assert found(block(cast=True), RULE) == []
    (message,) = found(block(cast=False), RULE)
    assert message == "the float32 sum of the experts of block.moe makes the residual stream float32"


def test_a_router_that_autocast_lowers_is_reported() -> None:
    (message,) = found(block(cast=True, inside_autocast=bf16), RULE)
    assert message == "the router block.moe.gate.weight is multiplied in bfloat16"


def test_a_module_path_names_a_router_where_no_parameter_does() -> None:
    gm = traced(lambda x, w: F.linear(x, w).topk(2), tensor(N, D), tensor(E, D))
    for node in gm.graph.nodes:
        node.meta["module"] = "layer.gate"
    report = verify_graph(gm, rules=(RULE,), router=("*.gate",))
    assert [v.message for v in report.violations] == ["the router layer.gate is multiplied in bfloat16"]
