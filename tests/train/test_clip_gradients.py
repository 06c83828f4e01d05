"""Gradient norms by group, and clipping of the global one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsv4c.train.optim import clip_gradients

NAMES = (
    "embed.weight",
    "head.weight",
    "norm.weight",
    "layers.0.attn_norm.weight",
    "layers.0.hc_attn.fn",
    "layers.0.attn.wq_b.weight",
    "layers.0.attn.indexer.wq_b.weight",
    "layers.0.ffn.gate.weight",
    "layers.0.ffn.experts.w13",
    "mtp.0.attn.wq_b.weight",
)


def model_with_gradients() -> nn.Module:
    """A module with a parameter of each group, and a random gradient in each."""
    generator = torch.Generator().manual_seed(0)
    root = nn.Module()
    for name in NAMES:
        module = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        param = nn.Parameter(torch.zeros(4, 8))
        param.grad = torch.randn(4, 8, generator=generator)
        module.register_parameter(leaf, param)
    return root


def test_gradient_norms_by_group_add_up_to_the_global_norm() -> None:
    model = model_with_gradients()
    norms = clip_gradients(model, None)
    assert norms.keys() - {"global"} == {
        "attention", "indexer", "moe", "router", "hyper_connections", "embedding", "norms", "mtp",
    }  # fmt: skip
    expected = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    assert norms["global"] == pytest.approx(expected, rel=1e-6)
    assert sum(v**2 for k, v in norms.items() if k != "global") == pytest.approx(norms["global"] ** 2, rel=1e-9)
    router = model.get_parameter("layers.0.ffn.gate.weight").grad
    assert router is not None
    assert norms["router"] == pytest.approx(router.norm().item(), rel=1e-6)


def test_clipping_scales_to_the_given_norm_and_reports_the_norm_before() -> None:
    model = model_with_gradients()
    before = clip_gradients(model, None)
    rest = (before["global"] ** 2 - before["indexer"] ** 2) ** 0.5
    limit = min(rest, before["indexer"]) / 4
    assert clip_gradients(model, limit)["global"] == pytest.approx(before["global"])
    after = clip_gradients(model, None)
    assert after["indexer"] == pytest.approx(limit, rel=1e-6)
    assert (after["global"] ** 2 - after["indexer"] ** 2) ** 0.5 == pytest.approx(limit, rel=1e-6)


def test_the_size_of_the_indexers_gradient_does_not_scale_the_others() -> None:  # B19, invariant 21
    def clipped(indexer_scale: float) -> dict[str, torch.Tensor]:
        model = model_with_gradients()
        for name, p in model.named_parameters():
            if ".indexer." in name:
                p.grad.mul_(indexer_scale)
        clip_gradients(model, 0.5)
        return {n: p.grad for n, p in model.named_parameters() if ".indexer." not in n}

    small, large = clipped(1e-3), clipped(1e3)
    assert all(torch.equal(small[n], large[n]) for n in small)


@pytest.mark.parametrize("max_norm", [None, 1e9])
def test_gradients_below_the_limit_keep_every_bit(max_norm: float | None) -> None:
    model = model_with_gradients()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    clip_gradients(model, max_norm)
    assert all(torch.equal(before[n], p.grad) for n, p in model.named_parameters() if p.grad is not None)


def test_bf16_gradients_are_summed_in_higher_precision() -> None:
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.full_like(model.weight, 1.0078125)
    assert clip_gradients(model, None)["global"] == pytest.approx(64 * 1.0078125, rel=1e-6)


def test_a_frozen_group_is_absent_rather_than_zero() -> None:
    model = model_with_gradients()
    model.get_parameter("layers.0.attn.indexer.wq_b.weight").grad = None
    assert "indexer" not in clip_gradients(model, None)


def test_a_sharded_model_can_replace_the_sum() -> None:
    model = model_with_gradients()
    alone = clip_gradients(model, None)
    four = clip_gradients(model, None, reduce=lambda squares: 4 * squares)
    assert four == pytest.approx({name: 2 * norm for name, norm in alone.items()})


def test_a_norm_that_is_not_finite_is_reported_and_clips_nothing() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    norms = clip_gradients(model, 0.1)
    assert norms["global"] != norms["global"]
    assert model.weight.grad[0, 0] == 1.0
