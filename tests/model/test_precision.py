"""fp32 where the specification says so: parameters through casts, routing in bf16 and autocast, dtypes of the streams."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4c import DeepseekV4, ops
from dsv4c.config import LayerKind
from dsv4c.model.attention import Attention
from dsv4c.model.block import Block
from dsv4c.model.moe import Gate, MoE
from dsv4c.model.precision import linear_wide, wide
from dsv4c.torch_compat import inductor_settings
from tests.model.conftest import SPEC, batch, build, gradients, outputs, randomise, reached, total

FP32_SUFFIXES = ("attn_sink", ".ape", ".fn", ".base", ".scale", "norm.weight", "gate.bias")
CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16()": lambda m: m.bfloat16(),
    "half()": lambda m: m.half(),
    "to(bfloat16)": lambda m: m.to(torch.bfloat16),
    "to(bfloat16), float(), half()": lambda m: m.to(torch.bfloat16).float().half(),
    "to(cpu, bfloat16)": lambda m: m.to("cpu", torch.bfloat16),
}


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {n: t for n, t in model.state_dict(keep_vars=True).items() if t.is_floating_point()}


def is_fp32(name: str) -> bool:
    return name.endswith(FP32_SUFFIXES)


@pytest.mark.parametrize("cast", CASTS)
def test_fp32_parameters_keep_dtype_and_value_through_casts(tiny: DeepseekV4, cast: str) -> None:
    model = CASTS[cast](copy.deepcopy(tiny))
    before, after = floats(tiny), floats(model)
    low = torch.float16 if "half" in cast else torch.bfloat16
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert value.dtype == (torch.float32 if is_fp32(name) else low), name
        if is_fp32(name):
            assert torch.equal(value, before[name]), name
    assert {n.rsplit(".", 1)[1] for n in after if is_fp32(n)} == {
        "attn_sink", "ape", "fn", "base", "scale", "weight", "bias"
    }  # fmt: skip


def test_moving_to_another_device_keeps_them_too(tiny: DeepseekV4) -> None:
    model = copy.deepcopy(tiny).to(device="meta", dtype=torch.bfloat16)
    for name, value in floats(model).items():
        assert value.device.type == "meta"
        assert value.dtype == (torch.float32 if is_fp32(name) else torch.bfloat16), name
    plain = copy.deepcopy(tiny).to(device="meta")
    assert all(value.dtype == torch.float32 for value in floats(plain).values())


def test_gradients_of_fp32_parameters_stay_with_them(tiny: DeepseekV4) -> None:
    model = copy.deepcopy(tiny)
    ids, targets = batch(9)
    total(model(ids, targets=targets)).backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.bfloat16()
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert p.grad.dtype == p.dtype
            assert not is_fp32(name) or torch.equal(p.grad, before[name])


def test_double_widens_everything(tiny: DeepseekV4) -> None:
    model = copy.deepcopy(tiny).double()
    assert all(value.dtype == torch.float64 for value in floats(model).values())
    model.bfloat16()
    assert all(v.dtype == torch.float32 and torch.equal(v, floats(tiny)[n]) for n, v in floats(model).items() if is_fp32(n))


def test_copies_and_state_dicts_keep_them(tiny: DeepseekV4) -> None:
    model = copy.deepcopy(copy.deepcopy(tiny).bfloat16())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = build(seed=1).bfloat16()
    loaded.load_state_dict(torch.load(file))
    for name, value in floats(loaded).items():
        assert value.dtype == floats(model)[name].dtype and torch.equal(value, floats(model)[name]), name
        assert not is_fp32(name) or torch.equal(value, floats(tiny)[name]), name


def test_without_the_setting_they_follow() -> None:
    model = build(SPEC.replace(keep_fp32_parameters=False)).bfloat16()
    assert all(value.dtype == torch.bfloat16 for value in floats(model).values())
    ids, targets = batch(9)
    assert all(bool(loss.isfinite()) for loss in model(ids, targets=targets).losses.values())


def setting(name: str, module: nn.Module) -> tuple[nn.Module, Any]:
    """A module as it is, in bf16, or inside bf16 autocast."""
    if name == "bf16":
        return module.bfloat16(), nullcontext()
    return module, torch.autocast("cpu", torch.bfloat16) if name == "autocast" else nullcontext()


@pytest.mark.parametrize("where", ["fp32", "bf16", "autocast"])
def test_a_near_tie_is_decided_in_fp32(where: str) -> None:
    # B31, B35: weights [1, 1.001] held in fp32 tie in bf16
    for weights, bias, expected in (((1.0, 1.001), (0.0, 0.0), 1), ((1.001, 1.0), (0.0, 0.0), 0)):
        gate = Gate(SPEC.replace(n_routed_experts=2, num_experts_per_tok=1, hidden_size=2), LayerKind("swa", "learned", 0))
        gate.weight.data = torch.tensor([[w, 0.0] for w in weights])
        gate.bias.copy_(torch.tensor(bias))
        x = torch.tensor([[1.0, 0.0]])
        module, region = setting("fp32" if where == "bf16" else where, gate)  # the weight itself is held in fp32
        with region:
            routing = module(x.bfloat16() if where == "bf16" else x, torch.zeros(1).long())
        assert routing.ids.tolist() == [[expected]]
        assert routing.scores.dtype == torch.float32 == routing.weights.dtype


@pytest.mark.parametrize("where", ["fp32", "bf16", "autocast"])
def test_two_experts_of_one_bf16_score_are_told_apart(where: str) -> None:
    # invariant 24: logits 1 and 1.0078125, both exact in bf16
    config = SPEC.replace(n_routed_experts=2, num_experts_per_tok=1)
    gate = Gate(config, LayerKind("swa", "learned", 0))
    torch.nn.init.zeros_(gate.weight)
    gate.weight.data[:, 0] = torch.tensor([1.0, 1.0078125])
    gate.bias.copy_(torch.tensor([0.001, 0.0]))
    x = torch.zeros(1, 64)
    x[0, 0] = 1.0
    module, region = setting(where, gate)
    with region:
        routing = module(x.to(module.weight.dtype), torch.zeros(1).long())
    expected = torch.tensor([[1.14597631, 1.14846814]])
    torch.testing.assert_close(routing.scores, expected, rtol=0, atol=2e-7)
    assert routing.ids.tolist() == [[1]]
    assert gate.bias.dtype == torch.float32


@pytest.mark.parametrize("router", ["learned", "hash"])
@pytest.mark.parametrize("where", ["bf16", "autocast"])
def test_scores_and_weights_are_those_of_fp32(router: str, where: str) -> None:
    # B31, B35: inside and outside alike, for both routers
    gate = Gate(SPEC, LayerKind("swa", router, 0))  # type: ignore[arg-type]
    randomise(gate)
    gate.weight.data = gate.weight.data.bfloat16().float()
    x, ids = torch.randn(40, 64).bfloat16(), torch.arange(40)
    expected = gate(x.float(), ids)
    module, region = setting(where, gate)
    with region:
        routing = module(x, ids)
    for a, b in zip(routing, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_the_gate_is_fp32_in_a_traced_graph_inside_autocast() -> None:
    # B35: the region without autocast survives tracing
    gate = Gate(SPEC, LayerKind("swa", "learned", 0))
    randomise(gate)
    x, ids = torch.randn(40, 64), torch.zeros(40).long()
    expected = gate(x, ids)
    with torch.autocast("cpu", torch.bfloat16):
        routing = torch.compile(gate, backend="aot_eager", fullgraph=True)(x, ids)
    for a, b in zip(routing, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


OPERATORS = [
    "compress", "grouped_mm", "hadamard", "hc_post", "hc_pre", "indexer_kl", "indexer_kl_target", "indexer_topk", "rope",
    "route", "sparse_attention", "swiglu_clamp",
]  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_does_not_reach_into_an_operator(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # B35: the same results from the same inputs inside and outside; without care the products of a kernel are lowered
    original, calls = getattr(ops, name), []

    def recorded(*args: Any) -> Any:
        result = original(*args)
        calls.append((args, result))
        return result

    monkeypatch.setattr(ops, name, recorded)
    model, (ids, targets) = build(), batch(24)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(ids, targets=targets)
        assert calls
    for args, inside in calls:
        outside = original(*args)
        for a, b in zip(_tensors(inside), _tensors(outside), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


class _Products(TorchDispatchMode):
    """Dtype and shape of the result of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.append((out.dtype, tuple(out.shape)))
        return out


@pytest.mark.parametrize("where", ["bf16", "autocast"])
def test_the_gate_has_one_product_and_it_is_fp32(where: str) -> None:
    # B33: no second product in another dtype, used or not
    gate = Gate(SPEC, LayerKind("swa", "learned", 0))
    randomise(gate)
    module, region = setting(where, gate)
    with _Products() as products, region:
        module(torch.randn(7, 64).bfloat16(), torch.zeros(7).long())
    assert products.seen == [(torch.float32, (7, 8))]


@contextmanager
def _low(model: DeepseekV4, where: str) -> Iterator[DeepseekV4]:
    module, region = setting(where, model)
    with region:
        yield module  # type: ignore[misc]


@pytest.mark.parametrize("where", ["bf16", "autocast"])
@pytest.mark.parametrize("train", [True, False])
def test_streams_are_bf16_after_every_block_and_losses_fp32(where: str, train: bool) -> None:
    # B34: fp32 routing weights do not promote the streams
    ids, targets = batch(21)
    with _low(build(), where) as model:
        found: list[Any] = []
        seen = outputs(model, Block, lambda: found.append(model(ids, targets=targets) if train else model(ids)))
        routings = outputs(model, Gate, lambda: model(ids, targets=targets))
        parts = [outputs(model, kind, lambda: model(ids, targets=targets)) for kind in (Attention, MoE)]
    assert len(seen) == 5
    assert all(y.dtype == torch.bfloat16 for part in parts for y, _ in part)
    assert all(streams.dtype == torch.bfloat16 for streams, _ in seen)
    assert all(r.scores.dtype == torch.float32 == r.weights.dtype for r in routings)
    if not train:
        assert found[0].logits.dtype == torch.float32
        return
    assert all(loss.dtype == torch.float32 and bool(loss.isfinite()) for loss in found[0].losses.values())
    grads = gradients(model, total(found[0]))
    assert reached(grads) == set(dict(model.named_parameters()))
    assert all(g is not None and bool(g.isfinite().all()) for g in grads.values())


@pytest.mark.parametrize("where", ["bf16", "autocast"])
def test_low_precision_stays_near_fp32(tiny: DeepseekV4, where: str) -> None:
    ids, targets = batch(21)
    exact = tiny(ids, targets=targets).losses
    with _low(copy.deepcopy(tiny), where) as model:
        low = model(ids, targets=targets).losses
    for name in ("lm", "mtp", "seq_balance"):
        assert abs(float(low[name].detach()) / float(exact[name].detach()) - 1) < 0.05, name


def test_the_fp32_product_is_the_same_inside_autocast() -> None:
    # B35: autocast lowers products of explicit fp32 inputs
    x, w = torch.randn(5, 64), torch.randn(8, 64)
    outside = linear_wide(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ w.T).dtype == torch.bfloat16
        inside = linear_wide(x, w)
    assert inside.dtype == torch.float32 and torch.equal(inside, outside)


def test_widening_keeps_the_rounding_that_came_before() -> None:
    # B36
    assert float(wide(torch.tensor(1.001).bfloat16())) == 1.0
    assert wide(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


def test_a_compiled_round_trip_through_bf16_keeps_its_rounding_where_casts_are_emulated() -> None:
    # B36: Inductor leaves the round trip out unless told otherwise, so parity of choices has to be tested with this setting
    with inductor_settings(emulate_precision_casts=True):
        compiled = torch.compile(lambda x: wide(x.bfloat16()) * 1.0, fullgraph=True)
        assert float(compiled(torch.tensor(1.001))) == 1.0
