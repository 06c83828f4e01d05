"""``dsv4::sinkhorn``: the normalisations of the residual mixing matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from dsv4c.ops import reference
from tests.ops import contract
from tests.ops.cases import SEARCH, dtypes, normal, seeds

sinkhorn = torch.ops.dsv4.sinkhorn
backward = torch.ops.dsv4.sinkhorn_backward
EPS = 1e-6
SHAPES = [(2, 7, 4, 4), (1, 1, 4, 4), (5, 4, 4), (4, 4), (2, 7, 1, 1), (0, 4, 4)]


@given(st.lists(st.integers(1, 5), max_size=2), st.integers(1, 5), st.integers(1, 21), dtypes, seeds)
@SEARCH
def test_operator_equals_its_formula(batch, n, iters, dtype, seed):
    args = (*normal(seed, dtype, (*batch, n, n)), iters, EPS)
    contract.assert_equals_formula(sinkhorn, reference.sinkhorn, args)


@pytest.mark.parametrize("iters", [1, 20])
def test_formula_has_the_gradient_of_its_finite_differences(iters):
    (logits,) = normal(0, torch.float64, (2, 3, 3))
    assert torch.autograd.gradcheck(lambda m: reference.sinkhorn(m, iters, EPS), (logits,))


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_opcheck_finds_nothing(shape):
    opcheck(sinkhorn.default, (*normal(0, torch.float32, shape), 20, EPS))


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_opcheck_finds_nothing_in_the_backward(shape):
    logits, grad = normal(0, torch.float32, shape, shape, trains=False)
    opcheck(backward.default, (grad, logits, 20, EPS))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iters", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(shape, iters, dtype):
    logits, grad = normal(0, dtype, shape, shape)
    contract.assert_functional(sinkhorn, (logits, iters, EPS))
    contract.assert_functional(backward, (grad.detach(), logits.detach(), iters, EPS))


def test_inputs_of_any_strides():
    contract.assert_takes_any_strides(sinkhorn, (*normal(0, torch.float32, (2, 7, 4, 4)), 20, EPS))


def test_incoming_gradients_of_any_strides():
    contract.assert_takes_any_gradient(sinkhorn, (*normal(0, torch.float32, (2, 7, 4, 4)), 20, EPS))


def test_same_bits_twice():
    contract.assert_deterministic(sinkhorn, (*normal(0, torch.float32, (2, 7, 4, 4)), 20, EPS))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_row_spoils_no_other(value):
    contract.assert_rows_stay_apart(sinkhorn, (*normal(0, torch.float32, (3, 5, 4, 4)), 20, EPS), 0, value)


def test_the_last_step_is_over_columns():
    (logits,) = normal(0, torch.float64, (9, 4, 4))
    comb = sinkhorn(3 * logits, 20, EPS)
    assert (comb.sum(-2) - 1).abs().max() < 2e-6  # invariant 2
    assert (comb.sum(-1) - 1).abs().max() > 1e-4


def test_one_matrix_alone_leaves_the_incoming_gradient_as_it_was():
    logits, grad = normal(0, torch.float32, (1, 1, 4, 4), (1, 1, 4, 4))
    before = grad.detach().clone()
    torch.autograd.grad(sinkhorn(logits, 20, EPS), logits, grad.detach())
    assert torch.equal(grad, before)
