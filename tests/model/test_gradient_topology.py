"""What each objective's gradient reaches, and that the indexer's coefficient touches nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from fnmatch import fnmatchcase

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ops
from dsv4c.model.objectives import POLICIES
from tests.model.conftest import SPEC, batch, build, gradients, reached, same_bits, total

N = 24  # six entries, three selected


def indexer(names: set[str]) -> set[str]:
    return {n for n in names if ".indexer." in n}


def run(coefficient: float, **changes: object) -> tuple[DeepseekV4, dict[str, Tensor]]:
    model = build(SPEC.replace(indexer_kl_coef=coefficient, **changes))
    ids, targets = batch(N)
    return model, model(ids, targets=targets).losses


def test_the_indexer_coefficient_changes_no_other_gradient_by_a_bit() -> None:
    # invariant 21: 0 against 1e3
    (off, off_losses), (on, on_losses) = run(0.0), run(1e3)
    a = gradients(off, torch.stack(list(off_losses.values())).sum())
    b = gradients(on, torch.stack([v for n, v in on_losses.items() if n != "indexer_kl"]).sum())
    c = gradients(on, torch.stack(list(on_losses.values())).sum())
    outside = [n for n in a if ".indexer." not in n]
    assert same_bits({n: a[n] for n in outside}, {n: b[n] for n in outside})
    assert same_bits({n: a[n] for n in outside}, {n: c[n] for n in outside})
    assert all(torch.equal(off_losses[n], on_losses[n]) for n in off_losses)
    assert not indexer(reached(a))


def test_indexer_gradients_are_in_proportion_to_the_coefficient() -> None:
    # invariant 21: exactly, for powers of two
    (small, small_losses), (large, large_losses) = run(2.0**-7), run(2.0**10)
    one, two = gradients(small, small_losses["indexer_kl"]), gradients(large, large_losses["indexer_kl"])
    for name in indexer(set(one)):
        assert one[name] is not None and two[name] is not None
        assert torch.equal(one[name] * 2.0**17, two[name]), name


def test_the_language_loss_trains_everything_but_the_indexer() -> None:
    # B19 (a), invariant 21
    model, losses = run(1e-2)
    touched = reached(gradients(model, losses["lm"]))
    expected = {n for n in dict(model.named_parameters()) if ".indexer." not in n and not n.startswith("mtp.")}
    assert touched == expected


@pytest.mark.parametrize("reference", [False, True])
def test_the_distillation_trains_every_indexer_parameter_and_nothing_else(reference: bool) -> None:
    # B19 (b); the references differentiate, so there it is the model that has to cut the teacher's gradient
    for kind in ("joint", "selected"):
        with ops.use_reference() if reference else nullcontext():
            model, losses = run(1e-2, indexer_kl_target=kind)
        touched = reached(gradients(model, losses["indexer_kl"]))
        assert touched == indexer(set(dict(model.named_parameters())))
        assert len(touched) == 2 * 6


def test_the_teacher_is_handed_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    # section 5.1: q, entries and lse are cut in the model, whatever the operator does with a gradient
    seen: list[Tensor] = []
    original = ops.indexer_kl_target

    def recorded(q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor, *rest: object) -> Tensor:
        seen.extend((q, entries, lse))
        return original(q, entries, ids, lse, *rest)

    monkeypatch.setattr(ops, "indexer_kl_target", recorded)
    run(1e-2)
    assert len(seen) == 2 * 3 and not any(t.requires_grad for t in seen)


def test_the_gradient_of_the_sum_is_the_sum_of_the_gradients() -> None:
    # B19 (c): elementwise, and bit for bit where one objective alone reaches a parameter
    model, losses = run(1e-2)
    together = gradients(model, losses["lm"] + losses["indexer_kl"])
    lm, kl = gradients(model, losses["lm"]), gradients(model, losses["indexer_kl"])
    for name, g in together.items():
        alone = kl[name] if ".indexer." in name else lm[name]
        assert (g is None) == (alone is None)
        assert g is None or torch.equal(g, alone), name


@pytest.mark.parametrize("objective", POLICIES)
def test_every_objective_keeps_its_policy(objective: str) -> None:
    # section 9
    model, losses = run(1e-2)
    touched, names = reached(gradients(model, losses[objective])), set(dict(model.named_parameters()))
    policy = POLICIES[objective]

    def matching(patterns: tuple[str, ...]) -> set[str]:
        return {n for n in names if any(fnmatchcase(n, p) for p in patterns)}

    assert touched <= matching(policy.may)
    assert not touched & matching(policy.never)
    for pattern in policy.must:
        assert matching((pattern,)), pattern
        exempt = {n for n in matching((pattern,)) if objective == "seq_balance" and n.startswith(("layers.0.", "layers.1."))}
        assert matching((pattern,)) - exempt <= touched | exempt, pattern


def test_the_balance_loss_reaches_the_trunk_below_its_gate_and_not_the_heads() -> None:
    # section 9: gate.weight, and through x the trunk; f and bias are not differentiated
    model, losses = run(1e-2)
    touched = reached(gradients(model, losses["seq_balance"]))
    assert {f"layers.{i}.ffn.gate.weight" for i in (2, 3, 4)} | {"mtp.0.ffn.gate.weight", "embed.weight"} <= touched
    assert not {"head.weight", "norm.weight", "mtp.0.ffn.experts.w13"} & touched
    assert "layers.4.ffn.experts.w13" in touched  # through the streams that the MTP layer reads


def test_every_parameter_is_trained_by_something() -> None:
    model, losses = run(1e-2)
    assert reached(gradients(model, torch.stack(list(losses.values())).sum())) == set(dict(model.named_parameters()))


def test_with_the_coefficient_at_zero_the_indexer_is_frozen() -> None:
    model, losses = run(0.0)
    assert "indexer_kl" not in losses
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == indexer(set(dict(model.named_parameters())))


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("recompute", ["all", [2], [0, 4]])
def test_recomputation_changes_no_loss_no_gradient_and_no_count(recompute: str | list[int], low: bool) -> None:
    # B26, B45: bit for bit, in fp32 and inside bf16 autocast, whose cache of cast weights is empty in the backward
    ids, targets = batch(N)
    model = build()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        plain = model(ids, targets=targets)
        model.set_recompute(recompute)
        again = model(ids, targets=targets)
    expected = gradients(model, total(plain))
    assert all(torch.equal(again.losses[n], plain.losses[n]) for n in plain.losses)
    assert torch.equal(again.metrics["expert_load"], plain.metrics["expert_load"])
    assert same_bits(gradients(model, total(again)), expected)
    model.set_recompute("off")
    assert not any(layer.recompute for layer in model.layers)


@pytest.mark.parametrize("stage", ["dense", "indexer_warmup"])
def test_recomputation_works_in_every_stage(stage: str) -> None:
    ids, targets = batch(N)
    model = build()
    model.set_stage(stage)
    expected = gradients(model, total(model(ids, targets=targets)))
    model.set_recompute("all")
    assert same_bits(gradients(model, total(model(ids, targets=targets))), expected)


def test_recomputed_counts_are_counted_once() -> None:
    # B26: S=8, B=1, k=2 -> 16
    model = build()
    model.set_recompute("all")
    ids, targets = batch(8, rows=1)
    out = model(ids, targets=targets)
    total(out).backward()
    assert out.metrics["expert_load"][:5].sum(-1).tolist() == [16.0] * 5


@pytest.mark.parametrize("recompute", ["off", "all"])
def test_a_bias_that_moves_between_forward_and_backward_changes_no_gradient(recompute: str) -> None:
    # B44
    ids, targets = batch(N)
    model = build()
    model.set_recompute(recompute)
    expected = gradients(model, total(model(ids, targets=targets)))
    loss = total(model(ids, targets=targets))
    for layer in (*model.layers, *model.mtp):
        if not layer.ffn.gate.hashed:
            layer.ffn.gate.bias[3] += 10.0
    assert same_bits(gradients(model, loss), expected)


def test_on_the_references_too_a_bias_that_moves_changes_no_gradient() -> None:
    # B44; their sums are not formed in a fixed order
    model = build()
    model.set_recompute("all")
    ids, targets = batch(N)
    with ops.use_reference():
        expected = gradients(model, total(model(ids, targets=targets)))
        loss = total(model(ids, targets=targets))
        for layer in (*model.layers, *model.mtp):
            if not layer.ffn.gate.hashed:
                layer.ffn.gate.bias[3] += 10.0
        found = gradients(model, loss)
    for name, gradient in expected.items():
        assert gradient is None or float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


@pytest.mark.parametrize("seed", range(5))
def test_near_ties_of_the_gate_are_recomputed_alike(seed: int) -> None:
    # B45: experts one fp32 step apart
    model = build(seed=seed)
    with torch.no_grad():
        for layer in model.layers:
            weight = layer.ffn.gate.weight
            weight[1:] = weight[:1] * (1 + torch.arange(1, 8)[:, None] * 2.0**-23)
            if not layer.ffn.gate.hashed:
                layer.ffn.gate.bias.zero_()
    ids, targets = batch(N, seed=seed)
    expected = gradients(model, total(model(ids, targets=targets)))
    model.set_recompute("all")
    assert same_bits(gradients(model, total(model(ids, targets=targets))), expected)
