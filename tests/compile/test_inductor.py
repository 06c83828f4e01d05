"""What Inductor generates computes what the model says, and stays compiled: one compilation shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ModelConfig, TrainStep
from dsv4c.torch_compat import compile_counts, reset_compiler
from dsv4c.train.optim import OptimConfig, build_optimizer

CONFIG = ModelConfig.preset("tiny", index_topk=4)
SEQ_LEN, STEPS = 40, 20


def batches(n: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    documents = (torch.arange(SEQ_LEN) >= 17).long().expand(2, -1)
    out = []
    for _ in range(n):
        ids = torch.randint(0, 300, (2, SEQ_LEN + 1), generator=generator)
        out.append({"input_ids": ids[:, :-1], "targets": ids[:, 1:], "document_ids": documents})
    return out


def make(compile: bool) -> TrainStep:
    torch.manual_seed(0)
    model = DeepseekV4(CONFIG)
    return TrainStep(model, build_optimizer(model, OptimConfig(lr=1e-3)), compile=compile)


@pytest.fixture(scope="module")
def compiled() -> Iterator[TrainStep]:
    reset_compiler()
    yield make(compile=True)
    reset_compiler()


def gradients(step: TrainStep, objective: str) -> dict[str, Tensor]:
    step.model.zero_grad()
    step.model(**batches(1)[0]).losses[objective].backward()
    found = {n: p.grad.clone() for n, p in step.model.named_parameters() if p.grad is not None}
    step.model.zero_grad()
    return found


@pytest.mark.parametrize("objective", CONFIG.objectives)
def test_each_objective_has_the_gradient_of_the_eager_model(compiled: TrainStep, objective: str) -> None:
    expected, found = gradients(make(compile=False), objective), gradients(compiled, objective)
    largest = max(g.norm().item() for g in expected.values())
    for name, grad in found.items():
        difference = (grad - expected[name]).norm() if name in expected else grad.norm()
        assert difference <= 1e-4 * (expected[name].norm() if name in expected else 0.0) + 1e-7 * largest, name
    assert all(name in found for name in expected)


def test_no_break_and_no_recompile_over_twenty_steps_and_losses_equal_to_eager(compiled: TrainStep) -> None:
    eager = make(compile=False)
    pairs = []
    for i, batch in enumerate(batches(STEPS)):
        pairs.append((compiled.step(batch)["loss"], eager.step(batch)["loss"]))
        if i == 0:
            after_first = compile_counts()
    assert compile_counts() == after_first
    assert after_first.graph_breaks == 0
    assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], rel=1e-4)
