"""The optimiser step: scaling, accumulation, the routing bias, and what stops it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ModelConfig, TrainStep
from dsv4c.errors import ConfigError, DataError, NonFiniteError
from dsv4c.train.optim import OptimConfig, build_optimizer

Batch = dict[str, Tensor]


def batch(rows: int = 4, seq_len: int = 33, seed: int = 0) -> Batch:
    """Rows with documents, padding and unequal numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 300, (rows, seq_len + 1), generator=generator)
    targets = ids[:, 1:].clone()
    documents = torch.zeros(rows, seq_len, dtype=torch.long)
    padding = torch.ones(rows, seq_len, dtype=torch.bool)
    for r in range(rows):
        targets[r, : 3 * r] = -100
        documents[r, 7 + 5 * r :] = 1
        padding[r, seq_len - r :] = False
    return {"input_ids": ids[:, :-1], "targets": targets, "document_ids": documents, "padding_mask": padding}


def make(grad_accum: int = 1, dtype: str = "fp32", lr: float = 1e-3, **changes: object) -> TrainStep:
    torch.manual_seed(0)
    model = DeepseekV4(ModelConfig.preset("tiny", **changes))
    return TrainStep(model, build_optimizer(model, OptimConfig(lr=lr)), grad_accum=grad_accum, dtype=dtype, compile=False)


def split(whole: Batch) -> list[Batch]:
    return [{k: v[i : i + 1] for k, v in whole.items()} for i in range(len(whole["input_ids"]))]


def test_one_step_of_four_rows_is_one_step_of_four_micro_batches() -> None:  # B23, B24
    whole, parts = make(), make(grad_accum=4)
    before = {n: p.detach().clone() for n, p in whole.model.named_parameters()}
    for step in (whole, parts):  # an update by SGD is the gradient itself
        step.optimizer, step.grad_clip = torch.optim.SGD(step.model.parameters(), lr=10.0), None
    a, b = whole.step(batch()), parts.step(split(batch()))
    for name in ("loss", "lm", "mtp", "seq_balance", "indexer_kl", "raw/indexer_kl", "grad_norm"):
        assert b[name] == pytest.approx(a[name], rel=1e-5), name
    assert torch.equal(whole.expert_load, parts.expert_load)
    for (name, p), q in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        assert (p - q).norm() <= 1e-4 * (p - before[name]).norm() + 1e-7, name


def test_every_objective_that_is_on_is_reported_and_the_loss_is_their_sum() -> None:
    result = make().step(batch())
    assert result["loss"] == pytest.approx(sum(result[k] for k in ("lm", "mtp", "seq_balance", "indexer_kl")))
    assert all(isinstance(v, float) for v in result.values())


def test_an_objective_that_is_off_is_absent() -> None:
    result = make(indexer_kl_coef=0.0, seq_balance_loss_coef=0.0, mtp_loss_coef=0.0).step(batch())
    assert not {"mtp", "seq_balance", "indexer_kl", "raw/mtp"} & set(result)


def test_the_routing_bias_moves_by_the_rate_towards_the_unloaded_experts_once_a_step() -> None:  # B27, B28
    step = make(grad_accum=2)
    whole = batch()
    halves = [{k: v[:2] for k, v in whole.items()}, {k: v[2:] for k, v in whole.items()}]
    step.step(halves)
    for layer, load in zip((*step.model.layers, *step.model.mtp), step.expert_load, strict=True):
        gate = layer.ffn.gate
        if gate.hashed:
            assert not hasattr(gate, "bias")
        else:
            assert torch.equal(gate.bias, 1e-3 * torch.sign(load.mean() - load))
            assert not gate.bias.requires_grad
    real = int(whole["padding_mask"].sum())
    assert int(step.expert_load[0].sum()) == real * step.model.config.num_experts_per_tok


def test_forced_routing_turns_the_balance_objective_off_and_leaves_the_bias_alone() -> None:
    step = make(force_balanced_routing=True)
    result = step.step(batch())
    assert "seq_balance" not in result
    assert all(not layer.ffn.gate.bias.any() for layer in step.model.layers if not layer.ffn.gate.hashed)


def test_the_same_seed_gives_the_same_losses_bit_for_bit() -> None:
    def losses() -> list[float]:
        step = make()
        return [step.step(batch(seed=i))["loss"] for i in range(3)]

    assert losses() == losses()


def test_bf16_autocast_leaves_the_parameters_in_fp32_and_trains() -> None:
    step = make(dtype="bf16", lr=3e-3)
    first = step.step(batch(rows=1))["loss"]
    for _ in range(4):
        last = step.step(batch(rows=1))["loss"]
    assert last < first - 0.3
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}


def test_a_nan_weight_stops_the_step_and_is_named_and_nothing_is_updated() -> None:  # B61
    step = make()
    with torch.no_grad():
        step.model.layers[3].attn.wkv.weight[0, 0] = float("nan")
    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    with pytest.raises(NonFiniteError, match=r"step 1: the loss lm.*\n.*layers\.3\.attn\.wkv\.weight"):
        step.step(batch())
    assert all(torch.equal(p.nan_to_num(), before[n].nan_to_num()) for n, p in step.model.named_parameters())


def test_an_activation_that_overflows_is_named_with_its_layer() -> None:
    step = make()
    with torch.no_grad():
        step.model.layers[1].ffn.shared_experts.w13.weight.fill_(1e9)
        step.model.layers[1].ffn.shared_experts.w2.weight.fill_(3e38)
    with pytest.raises(NonFiniteError, match=r"output of layers\.1\.ffn"):
        step.step(batch())


def test_a_gradient_that_is_not_finite_is_named_with_its_objective() -> None:
    step = make()
    step.model.layers[4].attn.kv_norm.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(NonFiniteError, match=r"objective lm.*\n.*gradient of layers\.4\.attn\.kv_norm\.weight"):
        step.step(batch())


def test_another_number_of_batches_is_refused() -> None:
    with pytest.raises(DataError, match="1 micro-batches for grad_accum=2"):
        make(grad_accum=2).step([batch()])


def test_an_unknown_or_missing_key_is_refused() -> None:
    with pytest.raises(DataError, match="labels"):
        make().step({**batch(), "labels": batch()["targets"]})
    with pytest.raises(DataError, match="lacks targets"):
        make().step({"input_ids": batch()["input_ids"]})


def test_nonsense_settings_are_refused() -> None:
    for settings in ({"grad_accum": 0}, {"dtype": "fp8"}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            make(**settings)  # type: ignore[arg-type]


def test_a_target_that_is_no_token_is_refused_and_not_trained_on() -> None:
    for wrong in (-1, 320):
        bad = batch()
        bad["targets"][0, 5] = wrong
        with pytest.raises(DataError, match=rf"token id {wrong}(?s:.*)targets(?s:.*)-100"):
            make().step(bad)
    with pytest.raises(DataError, match=r"targets is torch\.float32"):
        make().step({**batch(), "targets": batch()["targets"].float()})


def test_the_indexer_warm_up_changes_nothing_but_the_indexer_buffers_included() -> None:
    step = make()
    step.model.set_stage("indexer_warmup")
    before = {n: t.clone() for n, t in step.model.state_dict().items()}
    step.step(batch())
    changed = {n for n, t in step.model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed
    assert all(".indexer." in n for n in changed)


def test_the_warm_up_watches_what_the_best_entries_of_the_indexer_would_capture() -> None:
    step = make(index_topk=2)
    step.model.set_stage("indexer_warmup")
    assert 0 < step.step(batch())["captured_mass"] < 1


def test_rows_too_short_for_the_warm_up_are_refused() -> None:
    step = make()
    step.model.set_stage("indexer_warmup")
    with pytest.raises(DataError, match="nothing in this batch can be trained on"):
        step.step(batch(seq_len=3))


def test_an_optimizer_built_while_the_indexer_was_frozen_takes_it_in_and_a_foreign_one_is_refused() -> None:  # B19
    torch.manual_seed(0)
    model = DeepseekV4(ModelConfig.preset("tiny", index_topk=4))
    model.set_stage("dense")
    step = TrainStep(model, build_optimizer(model, OptimConfig(lr=1e-3)), compile=False)
    model.set_stage("sparse")
    before = model.layers[2].attn.indexer.wq_b.weight.detach().clone()
    step.step(batch())
    assert not torch.equal(model.layers[2].attn.indexer.wq_b.weight, before)
    other = DeepseekV4(ModelConfig.preset("tiny"))
    with pytest.raises(ConfigError, match="not in the optimizer"):
        TrainStep(model, torch.optim.SGD(other.parameters(), lr=0.1), compile=False).step(batch())


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # B64, B65
    monkeypatch.setattr("dsv4c.model.objectives.n_processes", lambda: 2)
    with pytest.raises(ConfigError, match="2 processes"):
        make()


def test_a_gradient_whose_norm_overflows_is_named() -> None:
    step = make()
    step.model.norm.weight.register_hook(lambda g: g * 0 + 1e30)
    with pytest.raises(NonFiniteError, match=r"gradient of norm\.weight: finite, but as large as 1e\+30"):
        step.step(batch())
