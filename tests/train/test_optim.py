"""Which optimizer trains which parameter, freezing and thawing, restoring."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dsv4c.errors import CheckpointError, ConfigError
from dsv4c.train.assignment import matrix_rows, parameter_names
from dsv4c.train.muon import Muon
from dsv4c.train.optim import OptimConfig, SplitOptimizer, build_optimizer

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (16, 8),
    "head.weight": (16, 8),
    "norm.weight": (8,),
    "hc_head.fn": (2, 16),
    "hc_head.base": (2,),
    "hc_head.scale": (1,),
    "layers.0.attn_norm.weight": (8,),
    "layers.0.hc_attn.fn": (8, 16),
    "layers.0.hc_attn.base": (8,),
    "layers.0.hc_attn.scale": (3,),
    "layers.0.attn.wq_a.weight": (4, 8),
    "layers.0.attn.wq_b.weight": (8, 4),
    "layers.0.attn.wo_a": (2, 3, 4),
    "layers.0.attn.q_norm.weight": (4,),
    "layers.0.attn.attn_sink": (2,),
    "layers.0.attn.compressor.wkv.weight": (8, 8),
    "layers.0.attn.compressor.ape": (4, 8),
    "layers.0.attn.compressor.norm.weight": (4,),
    "layers.0.attn.indexer.wq_b.weight": (4, 4),
    "layers.0.attn.indexer.weights_proj.weight": (2, 8),
    "layers.0.attn.indexer.compressor.wkv.weight": (4, 8),
    "layers.0.attn.indexer.compressor.norm.weight": (2,),
    "layers.0.ffn.gate.weight": (4, 8),
    "layers.0.ffn.experts.w13": (4, 12, 8),
    "layers.0.ffn.experts.w2": (4, 8, 6),
    "layers.0.ffn.shared_experts.w13.weight": (12, 8),
    "layers.0.ffn.shared_experts.w2.weight": (8, 6),
    "mtp.0.e_proj.weight": (8, 8),
    "mtp.0.enorm.weight": (8,),
    "mtp.0.hc_head.fn": (2, 16),
    "mtp.0.hc_head.base": (2,),
}
ADAMW = {name for name, shape in SHAPES.items() if len(shape) == 1} | {"embed.weight", "head.weight"}


class NamedModel(nn.Module):
    """The parameter names of the model with a few hundred numbers behind them, and one routing bias as a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            owner, leaf = self._owner(name)
            owner.register_parameter(leaf, nn.Parameter(torch.randn(shape, generator=generator)))
        owner, leaf = self._owner("layers.0.ffn.gate.bias")
        owner.register_buffer(leaf, torch.zeros(4))

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        module: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module, leaf

    def freeze(self, *, indexer: bool, rest: bool) -> None:
        for name, param in self.named_parameters():
            param.requires_grad_(not (indexer if ".indexer." in name else rest))

    def fill_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in self.parameters():
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = grad if param.requires_grad else None


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, algorithm: str | None = None) -> set[str]:
    names = {p: name for name, p in model.named_parameters()}
    groups = [g for g in optimizer.param_groups if algorithm in (None, g["algorithm"])]
    return {names[p] for group in groups for p in group["params"]}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def test_embedding_head_norms_mhc_vectors_and_sinks_go_to_adamw_and_the_rest_to_muon() -> None:
    model = NamedModel()
    optimizer = build_optimizer(model, OptimConfig())
    assert trained(optimizer, model, "adamw") == ADAMW
    assert trained(optimizer, model, "muon") == SHAPES.keys() - ADAMW


def test_every_parameter_is_moved_by_one_step_and_the_routing_bias_is_not() -> None:  # B28
    model = NamedModel()
    optimizer = build_optimizer(model, OptimConfig())
    before = values(model)
    model.fill_gradients(1)
    optimizer.step()
    assert changed(model, before) == SHAPES.keys()
    bias = model.get_buffer("layers.0.ffn.gate.bias")
    assert not any(p is bias for group in optimizer.param_groups for p in group["params"])
    assert bias.count_nonzero() == 0


def test_the_split_step_equals_adamw_and_muon_run_by_hand() -> None:
    model, twin = NamedModel(), NamedModel()
    optimizer = build_optimizer(model, OptimConfig(lr=0.01))
    params = parameter_names(twin)
    vectors = [p for name, p in params.items() if name in ADAMW and p.ndim == 1]
    tables = [params["embed.weight"], params["head.weight"]]
    matrices = {name: p for name, p in params.items() if name not in ADAMW}
    adamw = torch.optim.AdamW(
        [*vectors, *tables], weight_decay=0.1, lr=0.01, betas=(0.9, 0.95), eps=1e-20,
    )  # fmt: skip
    rows = [matrix_rows(name, params) for name in matrices]
    muon = Muon([{"params": list(matrices.values()), "row_blocks": rows}], lr=0.01)
    for seed in (1, 2):
        for m in (model, twin):
            m.fill_gradients(seed)
        optimizer.step()
        adamw.step()
        muon.step()
    for name, value in values(model).items():
        torch.testing.assert_close(value, params[name].detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("decay_vectors", "expected"), [(False, 0.0), (True, 0.1)])
def test_weight_decay_of_vectors_follows_the_setting(decay_vectors: bool, expected: float) -> None:
    model = NamedModel()
    optimizer = build_optimizer(model, OptimConfig(decay_vectors=decay_vectors))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert {found[n] for n, s in SHAPES.items() if len(s) == 1} == {expected}
    assert {found[n] for n, s in SHAPES.items() if len(s) > 1} == {0.1}


def test_fp32_parameters_never_share_a_group_with_lower_precision_ones() -> None:
    model = NamedModel()
    for name, param in model.named_parameters():
        if len(SHAPES[name]) > 1 and "hc_" not in name:
            param.data = param.data.bfloat16()
    optimizer = build_optimizer(model, OptimConfig())
    dtypes = [{p.dtype for p in group["params"]} for group in optimizer.param_groups]
    assert all(len(d) == 1 for d in dtypes)
    assert {torch.float32, torch.bfloat16} == set.union(*dtypes)
    model.fill_gradients(0)
    optimizer.step()
    assert model.get_parameter("layers.0.hc_attn.fn").dtype == torch.float32


def test_the_indexer_has_groups_of_its_own_with_its_own_learning_rate() -> None:
    model = NamedModel()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, indexer_lr_scale=3.0))
    names = {p: name for name, p in model.named_parameters()}
    optimizer.set_lr(0.5)
    for group in optimizer.param_groups:
        inside = {".indexer." in names[p] for p in group["params"]}
        assert inside == {group["name"].split(".")[1] == "indexer"}
        assert group["lr"] == pytest.approx(0.15 if inside == {True} else 0.05)


def test_frozen_parameters_join_when_thawed_and_keep_their_state_when_frozen_again() -> None:
    model = NamedModel()
    model.freeze(indexer=True, rest=False)
    optimizer = build_optimizer(model, OptimConfig())
    indexer = {n for n in SHAPES if ".indexer." in n}
    assert trained(optimizer, model) == SHAPES.keys() - indexer
    groups = [g["name"] for g in optimizer.param_groups]
    model.fill_gradients(0)
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict()["state"])

    model.freeze(indexer=False, rest=True)
    came, went = optimizer.refresh(model)
    assert set(came) == indexer
    assert set(went) == SHAPES.keys() - indexer
    assert [g["name"] for g in optimizer.param_groups] == groups
    before = values(model)
    model.fill_gradients(1)
    optimizer.step()
    assert changed(model, before) == indexer

    model.freeze(indexer=False, rest=False)
    optimizer.refresh(model)
    assert trained(optimizer, model) == SHAPES.keys()
    for name, state in kept.items():
        for key, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][name][key], value), (name, key)


def test_a_gradient_left_from_before_the_freeze_is_never_applied() -> None:
    model = NamedModel()
    optimizer = build_optimizer(model, OptimConfig())
    model.fill_gradients(0)
    for name, param in model.named_parameters():
        param.requires_grad_(".indexer." not in name)
    optimizer.refresh(model)
    assert all(p.grad is None for n, p in model.named_parameters() if ".indexer." in n)


def test_schedulers_of_torch_drive_both_optimizers_through_the_shared_groups() -> None:
    model = NamedModel()
    optimizer = build_optimizer(model, OptimConfig(lr=1.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model.fill_gradients(0)
    optimizer.step()
    scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    before = values(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert changed(model, before) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_bit_for_bit(dtype: torch.dtype) -> None:
    a = NamedModel().to(dtype)
    first = build_optimizer(a, OptimConfig(lr=0.01))
    a.fill_gradients(0)
    first.step()
    first.set_lr(0.3)
    b = copy.deepcopy(a)
    second = build_optimizer(b, OptimConfig(lr=0.7))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, optimizer in ((a, first), (b, second)):
        model.fill_gradients(1)
        optimizer.step()
    assert changed(a, values(b)) == set()
    for name, state in first.state_dict()["state"].items():
        for key, value in state.items():
            other = second.state_dict()["state"][name][key]
            assert other.dtype == value.dtype
            assert torch.equal(other, value)


def test_a_state_of_another_model_is_refused_by_name() -> None:
    model = NamedModel()
    optimizer = build_optimizer(model, OptimConfig())
    state = optimizer.state_dict()
    state["state"]["layers.7.attn.wq_a.weight"] = {}
    with pytest.raises(CheckpointError, match=r"layers\.7\.attn\.wq_a\.weight"):
        optimizer.load_state_dict(state)


def test_zero_grad_drops_the_gradients_of_both() -> None:
    model = NamedModel()
    optimizer = build_optimizer(model, OptimConfig())
    model.fill_gradients(0)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


def test_a_model_of_vectors_alone_needs_no_muon() -> None:
    model = nn.LayerNorm(4)
    assert [g["algorithm"] for g in SplitOptimizer(model, OptimConfig()).param_groups] == ["adamw"]


@pytest.mark.parametrize(
    "setting",
    [{"lr": 0.0}, {"lr": float("nan")}, {"betas": (0.9, 1.5)}, {"weight_decay": -1}, {"grad_clip": 0}, {"eps": "1e-8"}],
)
def test_a_setting_that_cannot_be_meant_is_refused_by_name(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        OptimConfig(**setting)  # type: ignore[arg-type]  # wrong on purpose
