"""``dsv4::swiglu_clamp``: the experts' activation with the routing weight folded in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from dsv4c.ops.reference.swiglu_clamp import swiglu_clamp as formula
from dsv4c.ops.swiglu_clamp import swiglu_clamp as operator
from tests.ops import contract
from tests.ops.cases import SEARCH, dtypes, normal, seeds

swiglu_clamp = torch.ops.dsv4.swiglu_clamp
backward = torch.ops.dsv4.swiglu_clamp_backward
SHAPES = [(7, 6), (1, 1), (0, 4), (3, 0)]


def arguments(
    n: int = 7, width: int = 6, weighed: bool = True, limit: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, ...]:
    gate_up, weight = normal(seed, dtype, (n, 2 * width), (n,))
    if dtype == torch.bfloat16:
        weight = weight.detach().float().requires_grad_()
    return gate_up, weight if weighed else None, limit


@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.sampled_from((0.0, 0.5, 10.0)), dtypes, seeds)
@SEARCH
def test_operator_equals_its_formula(n, width, weighed, limit, dtype, seed):
    contract.assert_equals_formula(swiglu_clamp, formula, arguments(n, width, weighed, limit, dtype, seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighed", [True, False])
def test_empty_and_single_rows(shape, weighed):
    contract.assert_equals_formula(swiglu_clamp, formula, arguments(*shape, weighed))


def test_rows_of_more_than_one_block():
    contract.assert_equals_formula(swiglu_clamp, formula, arguments(40, 1024))


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_formula_has_the_gradient_of_its_finite_differences(limit):
    gate_up, weight, _ = arguments(4, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: formula(x, w, limit), (gate_up, weight))


@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_finds_nothing(weighed, dtype):
    opcheck(swiglu_clamp.default, arguments(weighed=weighed, dtype=dtype))


@pytest.mark.parametrize("weighed", [True, False])
def test_opcheck_finds_nothing_in_the_backward(weighed):
    args = contract.detached(arguments(weighed=weighed))
    opcheck(backward.default, (torch.ones(7, 6), *args))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(shape, weighed, dtype):
    args = arguments(*shape, weighed, dtype=dtype)
    contract.assert_functional(swiglu_clamp, args)
    contract.assert_functional(backward, (torch.ones(shape, dtype=dtype), *contract.detached(args)))


def test_inputs_of_any_strides():
    contract.assert_takes_any_strides(swiglu_clamp, arguments())


def test_incoming_gradients_of_any_strides():
    contract.assert_takes_any_gradient(swiglu_clamp, arguments())


def test_same_bits_twice():
    contract.assert_deterministic(swiglu_clamp, arguments(40, 1024))


@pytest.mark.parametrize("poisoned", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_row_spoils_no_other(poisoned, value):
    contract.assert_rows_stay_apart(swiglu_clamp, arguments(), poisoned, value)


def test_clamped_values_stand_still():
    """Invariant 27: gates of 20 and 10 are equal, -1e3 passes, and beyond the clamp the gradient is zero."""
    gate = torch.tensor([20.0, 10.0, -1e3, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 20.0, -20.0])
    x = torch.stack((gate, up), -1).requires_grad_()
    y = operator(x, None, 10.0)
    (dx,) = torch.autograd.grad(y.sum(), x)
    silu = torch.sigmoid(torch.tensor(1.0))
    assert y[0] == y[1] and torch.allclose(y[3:, 0], torch.stack((10 * silu, -10 * silu)))
    assert dx[0, 0] == 0 and dx[1, 0] > 0 and not dx[3:, 1].any()


def test_bf16_is_multiplied_in_fp32_and_rounded_once():
    gate_up, weight, limit = arguments(dtype=torch.bfloat16)
    assert torch.equal(operator(gate_up, weight, limit), operator(gate_up.float(), weight, limit).bfloat16())
