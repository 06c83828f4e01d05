"""The rules on modules that are not ours: distillation, a generator against a discriminator, transformers' own block."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4c import Reach, verify_module
from dsv4c.errors import ConfigError
from tests.passes.verify.mutation import source_line


class Distillation(nn.Module):
    """A student that learns a teacher's distribution; the teacher learns from labels alone."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.teacher, self.student, self.cut = nn.Linear(8, 5), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 5)), cut

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.teacher(x)
        target = logits.softmax(-1)
        if self.cut:
            target = target.detach()
        learned = self.student(x).log_softmax(-1)
        distance = -(target * learned).sum(-1)
        return {"task": logits.square().mean(), "distill": distance.mean()}


DISTILLATION = {
    "task": Reach(may=("teacher.*",), must=("teacher.*",)),
    "distill": Reach(may=("student.*",), must=("student.*",)),
}


def test_a_teacher_that_is_detached_is_not_trained_by_its_student() -> None:
    report = verify_module(Distillation(cut=True), (torch.ones(2, 8),), DISTILLATION)
    assert report.ok, str(report)
    assert report.checked["gradient-reach"] == 2


def test_a_teacher_that_is_not_detached_is_reported_at_the_loss_that_reaches_it() -> None:
    report = verify_module(Distillation(cut=False), (torch.ones(2, 8),), DISTILLATION)
    (violation,) = report.violations
    assert violation.rule == "gradient-reach"
    assert violation.message.startswith("distill trains teacher.weight, teacher.bias, which it may not: target, made in")
    assert source_line(violation.source) == "distance = -(target * learned).sum(-1)"


class Adversaries(nn.Module):
    """Generator and discriminator with one loss each; the discriminator sees samples, not their maker."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.detached = detached

    def forward(self, noise: Tensor, real: Tensor) -> dict[str, Tensor]:
        fake = self.generator(noise)
        seen = fake.detach() if self.detached else fake
        judged = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(seen)).mean()
        return {"discriminator": judged, "generator": F.softplus(-self.discriminator(fake)).mean()}


def test_the_generators_loss_reaches_the_discriminator_unless_it_is_frozen_there() -> None:
    args = (torch.ones(2, 8), torch.ones(2, 4))
    own = {name: Reach(may=(f"{name}.*",), must=(f"{name}.*",)) for name in ("generator", "discriminator")}
    found = verify_module(Adversaries(detached=True), args, own).violations
    assert len(found) == 1
    assert found[0].message.startswith("generator trains discriminator.0.weight, discriminator.0.bias, ")
    assert "discriminator.0.weight, a parameter, enters discriminator" in found[0].message
    both = own | {"generator": Reach(must=("generator.*",))}  # the optimiser of the generator has its parameters alone
    assert verify_module(Adversaries(detached=True), args, both).ok


def test_a_discriminator_that_trains_its_generator_is_reported_where_it_sees_the_sample() -> None:
    policy = {"generator": Reach(), "discriminator": Reach(may=("discriminator.*",), must=("discriminator.*",))}
    (violation,) = verify_module(Adversaries(detached=False), (torch.ones(2, 8), torch.ones(2, 4)), policy).violations
    assert violation.message.startswith("discriminator trains generator.0.weight, generator.0.bias, ")
    assert "seen, made in generator" in violation.message
    assert source_line(violation.source).startswith("judged = F.softplus(-self.discriminator(real)).mean()")


transformers = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")


class Loss(nn.Module):
    """A block and a scalar of its output: a graph of the meta device has no gradient of the fused losses."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> dict[str, Tensor]:
        return {"loss": self.block(*args).float().square().mean()}


def experts(kind: str) -> nn.Module:
    """transformers' mixture of experts with a learned or a hash router."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 96, "num_hidden_layers": 1}
    config = transformers.DeepseekV4Config(n_routed_experts=4, num_experts_per_tok=2, **sizes)
    config.mlp_layer_types = [kind]
    config._experts_implementation = "grouped_mm"  # the eager loop runs over the experts that were hit: sizes of its own
    return transformers.DeepseekV4SparseMoeBlock(config, 0)


@pytest.mark.parametrize(("kind", "router"), [("moe", "DeepseekV4TopKRouter"), ("hash_moe", "DeepseekV4HashRouter")])
def test_transformers_router_is_reported_at_its_line_in_transformers(kind: str, router: str) -> None:
    with torch.device("meta"):
        module, x = Loss(experts(kind)).bfloat16(), torch.ones(2, 8, 64, dtype=torch.bfloat16)
        args = (x, torch.zeros(2, 8, dtype=torch.long)) if kind == "hash_moe" else (x,)
    report = verify_module(module, args, {"loss": Reach()}, router=("*.gate.weight",))
    (violation,) = [v for v in report.violations if v.rule == "router-fp32"]
    assert violation.message == "the router block.gate.weight is multiplied in bfloat16"
    assert violation.module == "block.gate"
    file, _, line = violation.source.rpartition(":")
    lines, first = inspect.getsourcelines(getattr(transformers, router).forward)
    assert file == inspect.getsourcefile(transformers.DeepseekV4TopKRouter)
    assert lines[int(line) - first].strip() == "logits = F.linear(flat, self.weight)"


def test_transformers_router_in_fp32_is_right() -> None:
    with torch.device("meta"):
        module, x = Loss(experts("moe")), torch.ones(2, 8, 64)
    report = verify_module(module, (x,), {"loss": Reach()}, router=("*.gate.weight",), rules=("router-fp32",))
    assert report.ok, str(report)
    assert report.checked["router-fp32"] == 1


def test_transformers_router_under_autocast_is_reported() -> None:
    module, x = Loss(experts("moe")), torch.ones(2, 8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        report = verify_module(module, (x,), {"loss": Reach()}, router=("*.gate.weight",), rules=("router-fp32",))
    assert [v.message for v in report.violations] == ["the router block.gate.weight is multiplied in bfloat16"]


def test_a_router_that_the_module_does_not_have_is_an_error_that_offers_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'teacher"):
        verify_module(Distillation(cut=True), (torch.ones(2, 8),), DISTILLATION, router=("teacher.wieght",))
