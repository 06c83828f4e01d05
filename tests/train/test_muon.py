"""Muon against an SVD in double precision, against a step by hand, and against itself one matrix at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dsv4c.errors import ConfigError
from dsv4c.train import muon
from dsv4c.train.muon import FAST, HYBRID, Muon, newton_schulz

SHAPES = [(8, 8), (16, 48), (48, 16), (1, 32), (33, 7)]


def matrices(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    result: Tensor = u @ vh
    return result


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    param = nn.Parameter(matrices(*shape, seed=seed).to(dtype))
    param.grad = matrices(*shape, seed=seed + 100).to(dtype)
    return param


@pytest.mark.parametrize("shape", SHAPES)
def test_all_ten_steps_bring_every_singular_value_near_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(newton_schulz(matrices(3, *shape)).double())
    assert (values - 1).abs().max() < 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_eight_steps_alone_reach_only_the_neighbourhood_of_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(newton_schulz(matrices(3, *shape), (FAST,) * 8).double())
    assert values.min() > 0.65
    assert values.max() < 1.2
    assert (values - 1).abs().max() > 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_the_result_is_the_polar_factor_of_a_double_precision_svd(shape: tuple[int, int]) -> None:
    x = matrices(3, *shape)
    torch.testing.assert_close(newton_schulz(x).double(), polar(x), atol=0.02, rtol=0)


def test_singular_values_a_ten_thousandth_of_the_norm_are_still_lifted() -> None:
    u, _, vh = torch.linalg.svd(matrices(12, 12).double())
    x = u @ torch.diag(torch.logspace(0, -4, 12, dtype=torch.float64)) @ vh
    values = torch.linalg.svdvals(newton_schulz(x.float()[None]).double())
    assert (values - 1).abs().max() < 0.05


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_result_does_not_depend_on_the_scale_of_the_gradient(scale: float) -> None:
    x = matrices(2, 8, 12)
    torch.testing.assert_close(newton_schulz(x * scale), newton_schulz(x), atol=1e-5, rtol=0)


def test_a_zero_matrix_stays_zero_beside_others_in_its_batch() -> None:
    x = matrices(3, 8, 12)
    x[1] = 0
    result = newton_schulz(x)
    assert result[1].count_nonzero() == 0
    assert result.isfinite().all()


def test_products_in_bf16_stay_within_the_stated_range() -> None:
    result = newton_schulz(matrices(2, 24, 32), dtype=torch.bfloat16)
    values = torch.linalg.svdvals(result.double())
    assert result.dtype == torch.bfloat16
    assert values.min() > 0.7
    assert values.max() < 1.2


@pytest.mark.parametrize("shape", [*SHAPES, (4, 12, 8), (4, 8, 12)])
def test_the_update_has_rms_0_18_whatever_the_shape(shape: tuple[int, ...]) -> None:
    param = parameter(*shape)
    before = param.detach().clone()
    Muon([param], lr=1.0, weight_decay=0.0).step()
    rms = (param - before).square().mean().sqrt()
    assert rms.item() == pytest.approx(0.18, rel=0.01)


def test_two_steps_agree_with_the_formula_by_hand() -> None:
    param = parameter(6, 10)
    lr, mu, decay = 0.01, 0.95, 0.1
    optimizer = Muon([param], lr=lr)
    expected, momentum = param.detach().double().clone(), torch.zeros(6, 10, dtype=torch.float64)
    for seed in (1, 2):
        param.grad = matrices(6, 10, seed=seed)
        momentum = mu * momentum + param.grad.double()
        direction = polar(param.grad.double() + mu * momentum)
        expected = expected * (1 - lr * decay) - lr * 0.18 * 10**0.5 * direction
        optimizer.step()
    torch.testing.assert_close(param.detach().double(), expected, atol=1e-4, rtol=0)


def test_batched_equals_one_by_one() -> None:
    shapes = [(8, 12), (12, 8), (8, 12), (3, 8, 12), (5, 8)]
    together = [parameter(*s, seed=i) for i, s in enumerate(shapes)]
    alone = [parameter(*s, seed=i) for i, s in enumerate(shapes)]
    Muon(together, lr=0.1).step()
    for param in alone:
        Muon([param], lr=0.1).step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_stack_of_experts_equals_its_experts_alone() -> None:
    stack = parameter(4, 6, 10)
    alone = [nn.Parameter(w.clone()) for w in stack.detach()]
    assert stack.grad is not None
    for expert, grad in zip(alone, stack.grad, strict=True):
        expert.grad = grad.clone()
    Muon([stack], lr=0.1).step()
    Muon(alone, lr=0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in alone]), atol=1e-6, rtol=0)


def test_row_blocks_are_orthogonalised_each_on_its_own() -> None:
    whole = parameter(2, 12, 10)
    parts = [nn.Parameter(w.clone()) for w in torch.split(whole.detach(), [4, 8], dim=1)]
    assert whole.grad is not None
    for part, grad in zip(parts, torch.split(whole.grad, [4, 8], dim=1), strict=True):
        part.grad = grad.clone()
    Muon([{"params": [whole], "row_blocks": [(4, 8)]}], lr=0.1).step()
    Muon(parts, lr=0.1).step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in parts], 1), atol=1e-6, rtol=0)


def test_cutting_batches_to_bound_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = [parameter(5, 6, 10), parameter(6, 10, seed=1)], [parameter(5, 6, 10), parameter(6, 10, seed=1)]
    Muon(a, lr=0.1).step()
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 130)
    Muon(b, lr=0.1).step()
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=0)


def test_equal_shapes_share_one_newton_schulz_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def counting(x: Tensor, steps: tuple[muon.Coefficients, ...] = HYBRID) -> Tensor:
        calls.append(tuple(x.shape))
        return newton_schulz(x, steps)

    monkeypatch.setattr(muon, "newton_schulz", counting)
    Muon([parameter(8, 12), parameter(12, 8), parameter(3, 8, 12), parameter(4, 4)]).step()
    assert calls == [(5, 8, 12), (1, 4, 4)]


def test_a_parameter_without_a_gradient_keeps_value_and_momentum() -> None:
    params = [parameter(4, 6), parameter(4, 6, seed=1)]
    optimizer = Muon(params, lr=0.1)
    optimizer.step()
    value = params[0].detach().clone()
    momentum = optimizer.state[params[0]]["momentum_buffer"].clone()
    params[0].grad = None
    optimizer.step()
    assert torch.equal(params[0], value)
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], momentum)


def test_the_momentum_of_a_bf16_parameter_is_fp32() -> None:
    param = parameter(4, 6, dtype=torch.bfloat16)
    optimizer = Muon([param])
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_bit_for_bit(dtype: torch.dtype) -> None:
    first = [parameter(4, 6, dtype=dtype), parameter(3, 4, 6, seed=1, dtype=dtype), parameter(2, 2, seed=2)]
    first[2].grad = None
    a = Muon(first, lr=0.1)
    a.step()
    second = copy.deepcopy(first)
    for p, q in zip(first, second, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    b = Muon(second, lr=0.5)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for p, q in zip(first[:2], second[:2], strict=True):
        assert torch.equal(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])
    a.step()
    b.step()
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2, 2)])
def test_a_parameter_that_is_no_matrix_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=str(tuple(shape))[1:-1]):
        Muon([nn.Parameter(torch.zeros(shape))])


@pytest.mark.parametrize("setting", [{"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": float("nan")}])
def test_a_setting_out_of_range_is_refused_by_name(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Muon([parameter(2, 2)], **setting)  # type: ignore[arg-type]  # no setting here is `steps`
