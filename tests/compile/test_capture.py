"""What each objective trains, read from the joint graph of the model on the meta device: structure, not values."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from torch import Tensor, nn

from dsv4c import DeepseekV4, ModelConfig
from dsv4c.compile.capture import JointGraph, capture, capture_losses
from dsv4c.model.objectives import POLICIES


def build(**changes: object) -> DeepseekV4:
    with torch.device("meta"):
        return DeepseekV4(ModelConfig.preset("tiny", index_topk=4, **changes))


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    return capture_losses(build(), seq_len=40)


@pytest.mark.parametrize("objective", POLICIES)
def test_each_objective_reaches_what_its_policy_says(joint: JointGraph, objective: str) -> None:  # B19, B25
    policy, trained = POLICIES[objective], joint.trained_by(objective)
    for name in joint.gradients:
        allowed = any(fnmatchcase(name, p) for p in policy.may) and not any(fnmatchcase(name, p) for p in policy.never)
        assert allowed or name not in trained, f"{objective} leaks into {name}"
    required = [n for n in joint.gradients if any(fnmatchcase(n, p) for p in policy.must)]
    if objective == "seq_balance":  # hash routers have no balance loss
        required = [n for n in required if not n.startswith(("layers.0.", "layers.1."))]
    assert required
    assert set(required) <= trained


def test_the_language_model_loss_trains_everything_but_indexer_and_mtp(joint: JointGraph) -> None:
    assert joint.trained_by("lm") == {n for n in joint.gradients if ".indexer." not in n and not n.startswith("mtp.")}


def test_the_indexer_loss_trains_the_indexer_and_nothing_else(joint: JointGraph) -> None:
    assert joint.trained_by("indexer_kl") == {n for n in joint.gradients if ".indexer." in n}


def test_an_indexer_whose_input_is_not_detached_leaks_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "detach", lambda self: self)
    leaked = capture_losses(build(), seq_len=40).trained_by("indexer_kl")
    assert "embed.weight" in leaked


def test_an_operator_that_has_no_gradient_on_meta_is_an_error_and_not_a_missing_edge() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(2, 3)

        def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
            return {"lm": torch.nn.functional.cross_entropy(self.w(x), t)}

    args = (torch.ones(1, 2, device="meta"), torch.zeros(1, dtype=torch.long, device="meta"))
    with pytest.raises(UserWarning, match="autograd kernel was not registered"):
        capture(Classifier().to("meta"), args)


def test_a_cut_by_no_grad_reads_like_a_cut_by_detach() -> None:
    class Two(nn.Module):
        def __init__(self, cut: str) -> None:
            super().__init__()
            self.a, self.b, self.cut = nn.Linear(2, 2), nn.Linear(2, 2), cut

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.a(x)
            if self.cut == "detach":
                inner = h.detach()
            elif self.cut == "no_grad":
                with torch.no_grad():
                    inner = self.a(x)
            else:
                inner = h
            return {"first": h.sum(), "second": self.b(inner).sum()}

    trained = {cut: capture(Two(cut), (torch.ones(1, 2),)).trained_by("second") for cut in ("detach", "no_grad", "none")}
    assert trained["detach"] == trained["no_grad"] == {"b.weight", "b.bias"}
    assert trained["none"] == {"a.weight", "a.bias", "b.weight", "b.bias"}
