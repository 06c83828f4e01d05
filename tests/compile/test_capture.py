"""What each objective trains, read from the joint graph of the model on the meta device: structure, not values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4c import DeepseekV4, ModelConfig, Reach
from dsv4c.compile.capture import capture_model, capture_module, coefficients, fp32_parameters, policy_of, trained_by
from dsv4c.model.objectives import POLICIES
from dsv4c.passes.graph import module_of, source_of
from dsv4c.passes.verify import Subject


def build(**changes: Any) -> DeepseekV4:
    with torch.device("meta"):
        return DeepseekV4(ModelConfig.preset("tiny", index_topk=4, **changes))


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    return build()


@pytest.fixture(scope="module")
def captured(model: DeepseekV4) -> Subject:
    return capture_model(model, seq_len=40)


@pytest.mark.parametrize("objective", POLICIES)
def test_each_objective_reaches_what_its_policy_says(model: DeepseekV4, captured: Subject, objective: str) -> None:
    # B19, B25
    policy, trained = policy_of(model, objective), trained_by(captured, objective)
    required = policy.required(captured.parameters)
    assert required
    assert set(required) <= trained
    assert [n for n in trained if not policy.allows(n)] == []


def test_the_language_model_loss_trains_everything_but_indexer_and_mtp(captured: Subject) -> None:
    expected = {n for n in captured.parameters if ".indexer." not in n and not n.startswith("mtp.")}
    assert trained_by(captured, "lm") == expected


def test_the_indexer_loss_trains_the_indexer_and_nothing_else(captured: Subject) -> None:
    assert trained_by(captured, "indexer_kl") == {n for n in captured.parameters if ".indexer." in n}


def test_hash_routers_need_no_balance_loss(model: DeepseekV4) -> None:
    required = policy_of(model, "seq_balance").required(dict(model.named_parameters()))
    assert required == [f"{path}.ffn.gate.weight" for path in ("layers.2", "layers.3", "layers.4", "mtp.0")]


def test_an_indexer_whose_input_is_not_detached_leaks_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "detach", lambda self: self)
    assert "embed.weight" in trained_by(capture_model(build(), seq_len=40), "indexer_kl")


def test_a_captured_model_has_its_parameters_outputs_and_places_by_name(model: DeepseekV4, captured: Subject) -> None:
    assert set(captured.parameters) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert set(captured.frozen) == set(dict(model.named_buffers()))
    assert set(captured.objectives) == set(captured.expected) == set(model.objectives)
    assert {"metrics.mtp", "metrics.indexer_kl", "metrics.captured_mass", "metrics.expert_load"} <= set(captured.returned)
    assert all(o.tangent is not None for o in captured.objectives.values())
    computed = [n for n in captured.nodes if n.op == "call_function" and "layers.2.attn.indexer" in module_of(n)]
    assert len(computed) > 50
    assert all("/dsv4c/model/" in source_of(n) for n in computed)


def test_coefficients_and_fp32_parameters_are_those_of_the_model(model: DeepseekV4) -> None:
    c = model.config
    assert coefficients(model) == {
        "lm": 1.0, "mtp": 0.3, "seq_balance": c.seq_balance_loss_coef, "indexer_kl": c.indexer_kl_coef,
    }  # fmt: skip
    kept = set(fp32_parameters(model))
    low = {n: p.dtype for n, p in (*build().bfloat16().named_parameters(), *build().bfloat16().named_buffers())}
    wide = {n for n, d in low.items() if d == torch.float32 and not n.endswith("norm.weight")}
    assert kept & set(low) == wide


def test_sizes_of_batch_and_sequence_may_be_symbols() -> None:
    small = build(num_hidden_layers=1, num_hash_layers=0, compress_ratios=(4, 0))
    captured = capture_model(small, seq_len=40, batch_size=2, symbolic=True)
    (embedded,) = [n for n in captured.nodes if n.op == "call_function" and str(n.target) == "aten.embedding.default"][:1]
    assert all(isinstance(s, torch.SymInt) for s in embedded.meta["val"].shape[:2])


def test_an_operator_that_has_no_gradient_on_meta_is_an_error_and_not_a_missing_edge() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(2, 3)

        def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
            return {"lm": torch.nn.functional.cross_entropy(self.w(x), t)}

    args = (torch.ones(1, 2, device="meta"), torch.zeros(1, dtype=torch.long, device="meta"))
    with pytest.raises(UserWarning, match="autograd kernel was not registered"):
        capture_module(Classifier().to("meta"), args, {"lm": Reach()})


@pytest.mark.parametrize(("cut", "trained"), [("detach", {"b"}), ("no_grad", {"b"}), ("none", {"a", "b"})])
def test_a_cut_by_no_grad_reads_like_a_cut_by_detach(cut: str, trained: set[str]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.a(x)
            if cut == "detach":
                inner = h.detach()
            elif cut == "no_grad":
                with torch.no_grad():
                    inner = self.a(x)
            else:
                inner = h
            return {"first": h.sum(), "second": self.b(inner).sum()}

    subject = capture_module(Two(), (torch.ones(1, 2),), {"second": Reach()})
    assert trained_by(subject, "second") == {f"{name}.weight" for name in trained}
    assert set(subject.returned) == {"first"}
