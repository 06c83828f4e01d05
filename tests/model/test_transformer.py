"""The whole model against the specification's formulas, and what its forward accepts, returns and leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch

from dsv4c import DeepseekV4, ModelConfig, ops
from dsv4c.errors import DataError
from dsv4c.model.objectives import Counts
from tests.model import formulas
from tests.model.conftest import SPEC, batch, build, gradients, largest_difference, reached, same_bits, total

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 21]


@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_logits_losses_and_gradients_are_those_of_the_formulas(tiny64: DeepseekV4, n_tokens: int) -> None:
    # fp64 throughout: the angles alone are fp32, on both sides
    ids, targets = batch(n_tokens, rows=1)
    expected_logits, expected = formulas.forward(tiny64, ids[0], targets[0])
    out = tiny64(ids, targets=targets)
    torch.testing.assert_close(tiny64(ids).logits[0], expected_logits, rtol=0, atol=1e-10)
    assert out.losses.keys() == expected.keys()
    for name, loss in expected.items():
        torch.testing.assert_close(out.losses[name], loss, rtol=1e-10, atol=1e-13, msg=name)
        assert largest_difference(gradients(tiny64, out.losses[name]), gradients(tiny64, loss)) < 1e-8, name


def test_a_batch_of_two_rows_gives_the_mean_over_their_tokens_and_documents(tiny64: DeepseekV4) -> None:
    ids, targets = batch(19)
    alone = [formulas.forward(tiny64, i, t)[1] for i, t in zip(ids, targets, strict=True)]
    out = tiny64(ids, targets=targets)
    for name, loss in out.losses.items():
        torch.testing.assert_close(loss, (alone[0][name] + alone[1][name]) / 2, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("n_tokens", range(1, 13))
def test_every_length_runs_forward_and_backward_with_every_objective(tiny: DeepseekV4, n_tokens: int) -> None:
    # B10
    ids, targets = batch(n_tokens)
    out = tiny(ids, targets=targets)
    assert tuple(out.losses) == ("lm", "mtp", "seq_balance", "indexer_kl") == tiny.objectives
    assert all(loss.dtype == torch.float32 and loss.shape == () and loss.isfinite() for loss in out.losses.values())
    grads = gradients(tiny, total(out))
    assert all(g is None or bool(g.isfinite().all()) for g in grads.values())
    assert tiny(ids).logits.shape == (2, n_tokens, 96)


def test_logits_are_fp32_and_only_given_without_targets(tiny: DeepseekV4) -> None:
    ids, targets = batch(5)
    without, with_targets = tiny(ids), tiny(ids, targets=targets)
    assert without.logits.dtype == torch.float32 and not without.losses
    assert with_targets.logits is None


def test_the_initial_values_are_those_of_the_specification() -> None:
    torch.manual_seed(0)
    model = DeepseekV4(ModelConfig.preset("tiny", initializer_range=0.05))
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            assert bool((p == 1).all()), name
        elif name.endswith(("attn_sink", "ape", ".base", "_base")):
            assert not bool(p.any()), name
        elif name.endswith((".scale",)):
            assert bool((p == 0.01).all()), name
        else:
            assert abs(float(p.detach().std()) / 0.05 - 1) < 0.15, name
    for name, b in model.named_buffers():
        assert name.endswith("tid2eid") or not bool(b.any()), name


def test_the_totals_of_the_released_models_are_those_of_the_paper() -> None:
    # invariant 30
    expected = {"flash": (284_332_240_471, 290_942_289_362), "pro": (1_572_997_201_763, 1_598_837_347_742)}
    for name, (main, everything) in expected.items():
        with torch.device("meta"):
            model = DeepseekV4(ModelConfig.preset(name))
        tensors = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if "tid2eid" not in n}
        assert sum(t.numel() for t in tensors.values()) == everything
        assert sum(t.numel() for n, t in tensors.items() if not n.startswith("mtp.")) == main


def test_the_schedules_of_the_released_models_are_those_of_the_paper() -> None:
    # invariant 31
    def decoder(config: ModelConfig) -> tuple[int, int, int, int]:
        kinds = [k.attention for k in config.layer_kinds[: config.num_hidden_layers]]
        return len(config.compress_ratios), kinds.count("swa"), kinds.count("csa"), kinds.count("hca")

    flash, pro = ModelConfig.preset("flash"), ModelConfig.preset("pro")
    assert decoder(flash) == (44, 2, 21, 20)
    assert decoder(pro) == (62, 0, 30, 31)
    for config in (flash, pro):
        assert [i for i, k in enumerate(config.layer_kinds) if k.router == "hash"] == [0, 1, 2]
        assert config.layer_kinds[-1].name == "swa-learned"
        assert config.layer_kinds[-2].attention == "csa"


@pytest.mark.parametrize("first", [1, 3, 4, 7, 8, 15, 16, 20])
def test_logits_before_a_changed_token_do_not_change(tiny: DeepseekV4, first: int) -> None:
    # invariant 11
    ids, _ = batch(24, rows=1)
    changed = ids.clone()
    changed[:, first:] = (changed[:, first:] + 7) % 96
    before, after = (tiny(i).logits[0].detach() for i in (ids, changed))
    assert float((before[:first] - after[:first]).abs().max()) <= 2e-6
    assert float((before[first:] - after[first:]).abs().amax(-1).min()) > 1e-3


def test_the_last_token_changes_the_logits_before_it_by_rounding_alone(tiny64: DeepseekV4) -> None:
    # B08 for the whole model: experts take their tokens in groups, whose sizes may change the order of adding
    for seed in range(3):
        ids, _ = batch(16, seed=seed)
        changed = ids.clone()
        changed[:, 15] = (changed[:, 15] + 1) % 96
        difference = (tiny64(ids).logits - tiny64(changed).logits).detach().abs().amax(-1)
        assert float(difference[:, :15].max()) < 1e-13 and float(difference[:, 15].min()) > 1e-3


@pytest.mark.parametrize("packed", [False, True])
def test_several_blocks_of_queries_compute_what_one_does(tiny64: DeepseekV4, packed: bool) -> None:
    # operators work through 256 queries at a time here; the references take all of them at once
    lengths = [3, 130, 1, 77, 113] if packed else [324]
    ids, targets = batch(324, rows=1)
    documents = torch.tensor([[d for d, n in enumerate(lengths) for _ in range(n)]])
    found = tiny64(ids, targets=targets, document_ids=documents)
    with ops.use_reference():
        expected = tiny64(ids, targets=targets, document_ids=documents)
    for name, loss in expected.losses.items():
        torch.testing.assert_close(found.losses[name], loss, rtol=1e-12, atol=1e-14, msg=name)
    assert largest_difference(gradients(tiny64, total(found)), gradients(tiny64, total(expected))) < 1e-9


def test_a_model_on_the_meta_device_runs_forward_and_backward() -> None:
    with torch.device("meta"):
        model, ids = DeepseekV4(SPEC), torch.zeros(2, 16, dtype=torch.long)
    out = model(ids, targets=ids)
    total(out).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert tuple(out.losses) == SPEC.objectives


def test_a_second_batch_is_not_affected_by_the_first(tiny: DeepseekV4) -> None:
    # B30: nothing is kept between forwards, whatever their shapes
    model, fresh = copy.deepcopy(tiny), copy.deepcopy(tiny)
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    ids, targets = batch(16)
    total(model(ids, targets=targets))
    short_ids, short_targets = batch(8)
    one, two = model(short_ids, targets=short_targets), fresh(short_ids, targets=short_targets)
    assert all(torch.equal(one.losses[n], two.losses[n]) for n in one.losses)
    assert same_bits(gradients(model, total(one)), gradients(fresh, total(two)))
    assert attributes == {n: set(vars(m)) for n, m in model.named_modules()}
    assert all(torch.equal(value, state[n]) for n, value in model.state_dict().items())  # B43: no counter is mutated


def test_the_same_batch_gives_the_same_bits_twice(tiny: DeepseekV4) -> None:
    ids, targets = batch(23)
    one, two = tiny(ids, targets=targets), tiny(ids, targets=targets)
    assert all(torch.equal(one.losses[n], two.losses[n]) for n in one.losses)
    assert same_bits(gradients(tiny, total(one)), gradients(tiny, total(two)))


def test_losses_divided_by_given_counts_add_up_over_micro_batches(tiny64: DeepseekV4) -> None:
    # B23, B24: the split into micro-batches changes no objective and no gradient
    ids, targets = batch(13, rows=4)
    targets[0, 3:9] = -100
    whole = tiny64(ids, targets=targets)
    counts = Counts(*(torch.tensor(float(n)) for n in (4 * 13 - 6, 4 * 12 - 6, 4, 4, 52)))
    parts = [tiny64(i[None], targets=t[None], counts=counts) for i, t in zip(ids, targets, strict=True)]
    for name, loss in whole.losses.items():
        summed = torch.stack([part.losses[name] for part in parts]).sum()
        torch.testing.assert_close(summed, loss, rtol=1e-10, atol=1e-13, msg=name)
        assert largest_difference(gradients(tiny64, loss), gradients(tiny64, summed)) < 1e-9, name


def test_metrics_are_detached_and_without_coefficients(tiny: DeepseekV4) -> None:
    ids, targets = batch(21)
    out = tiny(ids, targets=targets)
    assert set(out.metrics) == {"mtp", "seq_balance", "indexer_kl", "captured_mass", "expert_load"}
    assert not any(m.requires_grad for m in out.metrics.values())
    torch.testing.assert_close(out.metrics["mtp"] * SPEC.mtp_loss_coef, out.losses["mtp"].detach())
    torch.testing.assert_close(out.metrics["indexer_kl"] * SPEC.indexer_kl_coef, out.losses["indexer_kl"].detach())
    torch.testing.assert_close(out.metrics["seq_balance"] * 4, out.losses["seq_balance"].detach())  # 3 layers and MTP


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({"mtp_loss_coef": 0.0}, "mtp"),
        ({"num_nextn_predict_layers": 0, "compress_ratios": (0, 0, 4, 8, 4)}, "mtp"),
        ({"seq_balance_loss_coef": 0.0}, "seq_balance"),
        ({"force_balanced_routing": True}, "seq_balance"),
        ({"indexer_kl_coef": 0.0}, "indexer_kl"),
    ],
)
def test_an_objective_that_is_off_is_absent(changes: dict[str, object], absent: str) -> None:
    model = build(SPEC.replace(**changes))
    ids, targets = batch(3)
    assert tuple(model(ids, targets=targets).losses) == model.objectives
    assert set(SPEC.objectives) - set(model.objectives) == {absent}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "input_ids is missing"),  # B15
        ({"inputs_embeds": torch.zeros(1, 4, 64)}, "input_ids"),  # B15
        ({"input_ids": torch.full((1, 4), 96)}, "token id 96"),  # B15
        ({"input_ids": torch.full((1, 4), -1)}, "token id -1"),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, "input_ids is torch.int64 \\[4\\]"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "S >= 1"),
        ({"input_ids": torch.zeros(1, 4)}, "torch.float32"),
        ({"input_ids": torch.ones(1, 4).long(), "labels": torch.ones(1, 4).long()}, "already shifted"),
        ({"input_ids": torch.ones(1, 4).long(), "targets": torch.ones(1, 5).long()}, "targets is \\[1, 5\\]"),
        ({"input_ids": torch.ones(1, 4).long(), "document_ids": torch.ones(4).long()}, "document_ids"),
        ({"input_ids": torch.ones(1, 4).long(), "padding_mask": torch.ones(1, 4)}, "bool"),  # B11
    ],
)
def test_a_wrong_input_is_refused_by_name(tiny: DeepseekV4, arguments: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tiny(**arguments)


def test_ignored_targets_take_no_part_in_a_loss(tiny64: DeepseekV4) -> None:
    ids, targets = batch(9, rows=1)
    cut = targets.clone()
    cut[:, 5:] = -100
    out = tiny64(ids, targets=cut)
    shorter = tiny64(ids[:, :5], targets=targets[:, :5])
    torch.testing.assert_close(out.losses["lm"], shorter.losses["lm"], rtol=1e-12, atol=0)
    torch.testing.assert_close(out.losses["mtp"], shorter.losses["mtp"], rtol=1e-12, atol=0)


def test_a_batch_without_any_target_has_losses_of_zero_and_no_nan(tiny: DeepseekV4) -> None:
    ids, targets = batch(9)
    out = tiny(ids, targets=torch.full_like(targets, -100))
    assert float(out.losses["lm"].detach()) == 0.0 == float(out.losses["mtp"].detach())
    assert not reached(gradients(tiny, out.losses["lm"] + out.losses["mtp"]))
