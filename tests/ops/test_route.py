"""``dsv4::route``: scores, choice, weights and load of the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from dsv4c.ops.reference.route import route as formula
from dsv4c.ops.route import route as operator
from tests.ops import contract
from tests.ops.cases import SEARCH, dtypes, normal, seeds

route = torch.ops.dsv4.route
backward = torch.ops.dsv4.route_backward


def arguments(
    n: int = 7, n_experts: int = 9, k: int = 3, kind: str = "bias", masked: bool = True,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """kind: "bias" and "none" for a learned router with and without one, "given" for a hash router."""
    logits, bias = normal(seed, dtype, (n, n_experts), (n_experts,))
    g = torch.Generator().manual_seed(seed)
    given_ids = torch.rand(n, n_experts, generator=g).argsort(-1)[:, :k]
    real = torch.rand(n, generator=g) < 0.7
    return (
        (5 * logits).detach().requires_grad_(),
        0.1 * bias.detach().float() if kind == "bias" else None,
        given_ids if kind == "given" else None,
        real if masked else None,
        k,
        1.5,
    )


kinds = st.sampled_from(("bias", "none", "given"))


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 6), kinds, st.booleans(), dtypes, seeds)
@SEARCH
def test_operator_equals_its_formula(n, n_experts, k, kind, masked, dtype, seed):
    args = arguments(n, n_experts, min(k, n_experts), kind, masked, dtype, seed)
    contract.assert_equals_formula(route, formula, args)


@pytest.mark.parametrize("kind", ["bias", "given"])
@pytest.mark.parametrize("n", [0, 1])
def test_empty_and_single_tokens(n, kind):
    contract.assert_equals_formula(route, formula, arguments(n, kind=kind))


@pytest.mark.parametrize("kind", ["bias", "given"])
def test_formula_has_the_gradient_of_its_finite_differences(kind):
    logits, *rest = arguments(4, 5, 2, kind, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: formula(x, *rest)[0:3:2], (logits,))


@pytest.mark.parametrize("kind", ["bias", "none", "given"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_finds_nothing(kind, dtype):
    opcheck(route.default, arguments(kind=kind, dtype=dtype))


def backward_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    weights, ids, scores, _ = operator(*contract.detached(args))
    return torch.ones_like(weights), torch.ones_like(scores), ids, scores, 1.5


def test_opcheck_finds_nothing_in_the_backward():
    opcheck(backward.default, backward_arguments(arguments()))


@pytest.mark.parametrize("kind", ["bias", "none", "given"])
@pytest.mark.parametrize("n", [7, 1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(kind, n, dtype):
    args = arguments(n, kind=kind, dtype=dtype)
    contract.assert_functional(route, args)
    contract.assert_functional(backward, backward_arguments(args))


@pytest.mark.parametrize("kind", ["bias", "given"])
def test_inputs_of_any_strides(kind):
    contract.assert_takes_any_strides(route, arguments(kind=kind))


def test_incoming_gradients_of_any_strides():
    contract.assert_takes_any_gradient(route, arguments())


def test_same_bits_twice():
    contract.assert_deterministic(route, arguments(300, 30))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_token_spoils_no_other(value):
    args = arguments(kind="given")  # so that the load stays what it was: the experts do not depend on the logits
    bad = args[0].detach().clone()
    bad[0] = value
    for a, b in zip(operator(bad, *args[1:]), operator(*args), strict=True):
        assert torch.equal(a[1:], b[1:])


def test_gradient_is_finite_for_every_logit():
    logits = torch.tensor([[-300.0, -104.0, -20.0, 0.0, 2.0, 25.0, 200.0]], requires_grad=True)  # B63
    weights, _, scores, _ = operator(logits, None, None, None, 7, 1.5)
    (slope,) = torch.autograd.grad(scores.sum(), logits, retain_graph=True)
    assert torch.allclose(scores[0, 1:6], torch.tensor([2.6e-23, 4.53999e-5, 0.832555, 1.458399, 5.0]), atol=1e-9)
    assert torch.allclose(slope[0, 1:6], torch.tensor([1.3e-23, 2.26999e-5, 0.300281, 0.301974, 0.1]), atol=1e-6)
    assert torch.autograd.grad(weights.square().sum(), logits)[0].isfinite().all()


def test_all_experts_of_a_token_out_of_reach():
    logits = torch.full((1, 4), -300.0, requires_grad=True)
    weights, _, _, _ = operator(logits, None, None, None, 2, 1.5)
    assert weights.isfinite().all()
    assert torch.autograd.grad(weights.sum(), logits)[0].isfinite().all()


def test_bias_chooses_and_never_weighs():
    logits, _, _, real, k, scale = arguments(dtype=torch.float64)
    far = torch.tensor([0, 100, 0, 0, 100, 0, 0, 0, 100.0])
    weights, ids, scores, _ = operator(logits, far, None, real, k, scale)
    assert torch.equal(ids.sort(-1).values, torch.tensor([1, 4, 8]).expand(7, 3))
    chosen = scores.gather(-1, ids)
    assert contract.relative_error(weights, chosen / chosen.sum(-1, keepdim=True) * scale) < 1e-12


def test_two_close_logits_are_told_apart_under_autocast():
    """Invariant 24: in bf16 both scores are 1.1484375 and the wrong expert would be chosen."""
    logits, bias = torch.tensor([[1.0, 1.0078125]]), torch.tensor([0.001, 0.0])
    with torch.autocast("cpu", torch.bfloat16):
        weights, ids, scores, _ = operator(logits, bias, None, None, 1, 1.5)
    assert ids.item() == 1 and weights.dtype == scores.dtype == torch.float32
    assert torch.allclose(scores, torch.tensor([[1.14597631, 1.14846814]]))


def test_load_counts_real_tokens_only():
    logits, bias, _, real, k, scale = arguments(20)
    _, ids, _, load = operator(logits, bias, None, real, k, scale)
    assert torch.equal(load, torch.bincount(ids[real].flatten(), minlength=9))
    assert load.sum() == 3 * real.sum()
