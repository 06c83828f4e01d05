"""The public names, and what a forward returns: the promises of the interface that users build on."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

import dsv4c
from dsv4c import DeepseekV4, ModelConfig, TrainStep, compile_model
from dsv4c.errors import DataError

NAMES = (
    "ModelConfig", "DeepseekV4", "TrainStep", "compile_model", "verify_model", "verify_module", "verify_graph", "Reach",
)  # fmt: skip
PRESETS = ("tiny", "small", "flash", "flash-primus", "pro")
# Objective: the settings that turn it off, and the metrics that go with it.
OFF = {
    "mtp": ({"mtp_loss_coef": 0.0}, {"mtp"}),
    "seq_balance": ({"seq_balance_loss_coef": 0.0}, {"seq_balance"}),
    "indexer_kl": ({"indexer_kl_coef": 0.0}, {"indexer_kl"}),
}
ALWAYS = {"captured_mass", "expert_load"}


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    torch.manual_seed(0)
    return DeepseekV4(ModelConfig.preset("tiny"))


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 320, (2, 13), generator=torch.Generator().manual_seed(0))
    return text[:, :-1], text[:, 1:]


def keywords(f: object) -> list[str]:
    return list(inspect.signature(f).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_there_and_listed(name):
    assert getattr(dsv4c, name).__name__ == name and name in dsv4c.__all__


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones():
    with pytest.raises(AttributeError, match="DeepseekV4"):
        dsv4c.DeepSeekV4  # noqa: B018


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_config_that_reads_itself_back(name):
    config = ModelConfig.preset(name)
    assert ModelConfig.from_json(config.to_dict()) == config


def test_replace_gives_a_changed_copy():
    config = ModelConfig.preset("tiny")
    assert config.replace(indexer_kl_coef=0.5).indexer_kl_coef == 0.5 and config.indexer_kl_coef == 1e-2


def test_the_arguments_of_a_forward_have_their_names(model):
    expected = ["input_ids", "targets", "document_ids", "padding_mask", "position_ids"]
    assert keywords(model.forward)[:5] == expected


def test_a_model_is_made_on_the_default_device():
    with torch.device("meta"):
        made = DeepseekV4(ModelConfig.preset("tiny"))
    assert {p.device.type for p in made.parameters()} == {"meta"}
    ids = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    assert made(ids).logits.shape == (2, 9, 320)
    assert {loss.shape for loss in made(ids, ids).losses.values()} == {torch.Size()}


def test_a_flash_model_can_be_made_on_meta():
    with torch.device("meta"):
        made = DeepseekV4(ModelConfig.preset("flash"))
    assert sum(p.numel() for n, p in made.named_parameters() if not n.startswith("mtp.")) > 284e9


def test_labels_are_refused_with_the_explanation(model, batch):
    ids, targets = batch
    with pytest.raises(DataError, match="unshifted") as error:
        model(input_ids=ids, labels=targets)
    assert "targets" in str(error.value) and "shifted" in str(error.value)


def test_an_unknown_argument_is_refused_by_name(model, batch):
    with pytest.raises(DataError, match="attention_mask"):
        model(input_ids=batch[0], attention_mask=torch.ones_like(batch[0]))


def test_without_targets_there_are_fp32_logits_and_nothing_else(model, batch):
    out = model(batch[0])
    assert out.logits.shape == (2, 12, 320) and out.logits.dtype == torch.float32
    assert out.losses == {} and out.metrics == {}


def test_logits_are_fp32_in_a_bf16_model(batch):
    assert DeepseekV4(ModelConfig.preset("tiny")).bfloat16()(batch[0]).logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_targets_there_is_one_fp32_scalar_for_each_objective(model, batch, dtype):
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        out = model(*batch)
    assert out.logits is None
    assert tuple(out.losses) == ("lm", "mtp", "seq_balance", "indexer_kl")
    for loss in out.losses.values():
        assert loss.shape == () and loss.dtype == torch.float32 and loss.requires_grad


def test_metrics_are_those_promised_and_detached(model, batch):
    metrics = model(*batch).metrics
    assert set(metrics) == {"mtp", "indexer_kl", "seq_balance"} | ALWAYS
    assert not any(m.requires_grad for m in metrics.values())
    assert metrics["expert_load"].shape == (6, 8)  # layers, then MTP


def test_losses_carry_their_coefficients_and_metrics_do_not(batch):
    torch.manual_seed(0)
    out = DeepseekV4(ModelConfig.preset("tiny", mtp_loss_coef=0.25, indexer_kl_coef=0.5, seq_balance_loss_coef=2.0))(*batch)
    torch.testing.assert_close(out.losses["mtp"], 0.25 * out.metrics["mtp"])
    torch.testing.assert_close(out.losses["indexer_kl"], 0.5 * out.metrics["indexer_kl"])
    # The mean over the three learned decoder layers and MTP; the loss is their sum.
    torch.testing.assert_close(out.losses["seq_balance"], 4 * out.metrics["seq_balance"])


@pytest.mark.parametrize("off", [*[[name] for name in OFF], list(OFF)], ids=lambda names: ", ".join(names))
def test_an_objective_that_is_off_is_absent_and_one_that_is_on_is_present(batch, off):
    changes = {key: value for name in off for key, value in OFF[name][0].items()}
    out = DeepseekV4(ModelConfig.preset("tiny", **changes))(*batch)
    assert set(out.losses) == {"lm", *OFF} - set(off)
    assert set(out.metrics) == ({"mtp", "seq_balance", "indexer_kl"} | ALWAYS) - set().union(*(OFF[name][1] for name in off))


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4])
def test_an_objective_that_is_on_is_present_also_where_it_has_nothing_to_say(model, n_tokens):
    ids = torch.zeros(1, n_tokens, dtype=torch.int64)
    losses = model(ids, torch.full_like(ids, -100)).losses
    assert tuple(losses) == ("lm", "mtp", "seq_balance", "indexer_kl")
    assert all(loss.isfinite() for loss in losses.values()) and losses["lm"] == 0


def names_of(model: DeepseekV4, which: Iterable[str]) -> list[bool]:
    return [p.requires_grad for n, p in model.named_parameters() if any(w in n for w in which)]


@pytest.mark.parametrize("coefficient", [0.0, 1e-2])
def test_the_indexer_is_frozen_exactly_when_its_objective_is_off(coefficient):
    model = DeepseekV4(ModelConfig.preset("tiny", indexer_kl_coef=coefficient))
    found = names_of(model, [".indexer."])
    assert found and set(found) == {coefficient > 0}


def test_targets_are_already_shifted_and_minus_100_is_ignored(model, batch):
    ids, targets = batch
    targets = targets.clone()
    targets[0, 5:], targets[1, :2] = -100, -100
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(ids, targets).losses["lm"], expected)


def test_compile_model_takes_passes_and_regions_and_gives_the_model_back():
    assert {"model", "passes", "regional"} <= set(keywords(compile_model))
    model = DeepseekV4(ModelConfig.preset("tiny"))
    assert compile_model(model, backend="eager") is model


def test_verification_takes_what_it_is_documented_to_take_and_reports():
    assert {"seq_len", "batch_size", "rules"} <= set(keywords(dsv4c.verify_model))
    assert {"module", "args", "policy", "rules"} <= set(keywords(dsv4c.verify_module))
    assert {"gm", "rules", "router"} <= set(keywords(dsv4c.verify_graph))
    assert {"may", "must"} <= set(keywords(dsv4c.Reach))

    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"first": self.b(self.a(x)).square().sum()}

    report = dsv4c.verify_module(Squares(), (torch.ones(1, 2),), {"first": dsv4c.Reach(may=("b.*",), must=("b.*",))})
    assert not report.ok
    found = report.violations[0]
    assert found.rule == "gradient-reach" and "a.weight" in found.message
    assert found.source.rpartition(":")[0] == __file__ and found.node and found.path and found.hint
    assert json.loads(report.to_json())["ok"] is False


def test_a_train_step_takes_batches_and_returns_floats(batch):
    assert {"model", "optimizer", "grad_accum"} <= set(keywords(TrainStep))
    torch.manual_seed(0)
    model = DeepseekV4(ModelConfig.preset("tiny"))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), grad_accum=2, compile=False)
    halves = [{"input_ids": batch[0][i : i + 1], "targets": batch[1][i : i + 1]} for i in (0, 1)]
    report = step.step(halves)
    assert {"loss", "lm", "mtp", "seq_balance", "indexer_kl"} <= set(report)
    assert all(isinstance(value, float) for value in report.values())
