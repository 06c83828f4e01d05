"""The bias that balances the load: who changes it, by how much, and who does not."""

from __future__ import annotations

import pytest
import torch

from dsv4c.model.moe import Gate
from tests.model.conftest import SPEC, batch, build, gradients, outputs, total

HASH_THEN_LEARNED = SPEC.replace(
    num_hidden_layers=3, compress_ratios=(0, 0, 0), num_nextn_predict_layers=0, num_hash_layers=1, indexer_kl_coef=0.0,
    n_routed_experts=4,
)  # fmt: skip


def test_the_bias_moves_against_the_load_and_hash_layers_do_not_stop_it() -> None:
    # B27: counts [4,2,2,0] at rate 1e-3
    model = build(HASH_THEN_LEARNED)
    before = {n: b.clone() for n, b in model.named_buffers()}
    model.update_router_bias(torch.tensor([[4.0, 2.0, 2.0, 0.0]] * 3))
    for i in (1, 2):
        delta = model.layers[i].ffn.gate.bias - before[f"layers.{i}.ffn.gate.bias"]
        torch.testing.assert_close(delta, torch.tensor([-1e-3, 0.0, 0.0, 1e-3]), rtol=0, atol=1e-7)
    assert torch.equal(model.layers[0].ffn.gate.tid2eid, before["layers.0.ffn.gate.tid2eid"])


def test_two_steps_on_equal_tokens_move_the_bias_twice() -> None:
    # B28: all tokens equal, so k experts get everything; the bias is no parameter, is saved, is fp32
    model = build(HASH_THEN_LEARNED)
    ids = torch.full((1, 8), 5)
    before = model.layers[1].ffn.gate.bias.clone()
    load = model(ids, targets=ids).metrics["expert_load"]
    for _ in range(2):
        model.update_router_bias(load)
    expected = before + 2e-3 * torch.sign(load[1].mean() - load[1])
    torch.testing.assert_close(model.layers[1].ffn.gate.bias, expected, rtol=0, atol=1e-7)
    assert load[1].sum() == 16
    name = "layers.1.ffn.gate.bias"
    assert name in model.state_dict() and name not in dict(model.named_parameters())
    bias = model.layers[1].ffn.gate.bias
    assert bias.dtype == torch.float32 and not bias.requires_grad


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_changes_no_bias(training: bool) -> None:
    # B28: not in evaluation either
    model = build(HASH_THEN_LEARNED).train(training)
    before = {n: b.clone() for n, b in model.named_buffers()}
    ids, targets = batch(9)
    total(model(ids, targets=targets)).backward()
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_the_mtp_layer_is_balanced_too() -> None:
    model = build(SPEC)
    ids, targets = batch(9)
    load = model(ids, targets=targets).metrics["expert_load"]
    assert load.shape == (6, 8)
    before = model.mtp[0].ffn.gate.bias.clone()
    model.update_router_bias(load)
    expected = before + 1e-3 * torch.sign(load[5].mean() - load[5])
    torch.testing.assert_close(model.mtp[0].ffn.gate.bias, expected, rtol=0, atol=1e-7)


def test_the_load_counts_the_tokens_that_were_sent() -> None:
    # B26, B43: S B k for every layer, and what the routers chose
    model = build(SPEC)
    ids, targets = batch(10)
    loads: list[torch.Tensor] = []
    routings = outputs(model, Gate, lambda: loads.append(model(ids, targets=targets).metrics["expert_load"]))
    counts = torch.stack([r.ids.flatten().bincount(minlength=8) for r in routings[:5]]).float()
    assert torch.equal(loads[0][:5], counts)
    assert loads[0].sum(-1).tolist() == [40.0] * 5 + [36.0]  # the MTP layer has one position less in every row


def test_the_balance_objective_trains_the_gate_in_proportion_to_its_coefficient() -> None:
    # B25
    ids, targets = batch(12)
    grads = {}
    for coefficient in (0.5, 2.0):
        model = build(SPEC.replace(seq_balance_loss_coef=coefficient))
        grads[coefficient] = gradients(model, model(ids, targets=targets).losses["seq_balance"])
    for name in ("layers.2.ffn.gate.weight", "mtp.0.ffn.gate.weight"):
        assert bool(grads[0.5][name].any())
        assert torch.equal(grads[0.5][name] * 4, grads[2.0][name])
    assert "seq_balance" not in build(SPEC.replace(seq_balance_loss_coef=0.0))(ids, targets=targets).losses


def test_forced_balance_is_even_and_leaves_the_bias_alone() -> None:
    model = build(SPEC.replace(force_balanced_routing=True))
    ids, targets = batch(12)
    load = model(ids, targets=targets).metrics["expert_load"]
    assert bool((load[:5] == 6.0).all())  # 24 tokens, 2 of 8 experts each
    before = model.layers[2].ffn.gate.bias.clone()
    model.update_router_bias(torch.rand(6, 8))
    assert torch.equal(model.layers[2].ffn.gate.bias, before)
