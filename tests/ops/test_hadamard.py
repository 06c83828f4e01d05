"""``dsv4::hadamard``: the normalised Sylvester transform."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from dsv4c.errors import ConfigError
from dsv4c.ops.hadamard import hadamard as operator
from dsv4c.ops.reference.hadamard import hadamard as formula
from tests.ops import contract
from tests.ops.cases import SEARCH, dtypes, normal, seeds

hadamard = torch.ops.dsv4.hadamard
SHAPES = [(2, 7, 8), (2, 3, 5, 16), (1, 1), (4,), (2, 0, 4), (0, 8)]


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(0, 7), dtypes, seeds)
@SEARCH
def test_operator_equals_its_formula(batch, log_n, dtype, seed):
    contract.assert_equals_formula(hadamard, formula, normal(seed, dtype, (*batch, 2**log_n)))


@pytest.mark.parametrize("shape", SHAPES)
def test_empty_and_single_rows(shape):
    contract.assert_equals_formula(hadamard, formula, normal(0, torch.float32, shape))


def test_formula_has_the_gradient_of_its_finite_differences():
    assert torch.autograd.gradcheck(formula, normal(0, torch.float64, (3, 8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_finds_nothing(dtype):
    opcheck(hadamard.default, tuple(normal(0, dtype, (2, 7, 8))))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(shape, dtype):
    contract.assert_functional(hadamard, normal(0, dtype, shape))


def test_inputs_of_any_strides():
    contract.assert_takes_any_strides(hadamard, normal(0, torch.float32, (2, 7, 8)))


def test_incoming_gradients_of_any_strides():
    contract.assert_takes_any_gradient(hadamard, normal(0, torch.float32, (2, 7, 8)))


def test_same_bits_twice():
    contract.assert_deterministic(hadamard, normal(0, torch.float32, (2, 7, 128)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_row_spoils_no_other(value):
    contract.assert_rows_stay_apart(hadamard, normal(0, torch.float32, (3, 7, 8)), 0, value)


def test_matrix_is_symmetric_and_its_own_inverse():
    """Invariant 17."""
    matrix = operator(torch.eye(128, dtype=torch.float64))
    assert (matrix @ matrix.T - torch.eye(128)).abs().max() <= 3e-16
    assert torch.equal(matrix, matrix.T) and torch.equal(matrix[0], torch.full((128,), 128**-0.5, dtype=torch.float64))


def test_bf16_is_summed_in_fp32_and_rounded_once_also_under_autocast():
    (x,) = normal(0, torch.float32, (5, 128), trains=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(operator(x.bfloat16()), operator(x.bfloat16().float()).bfloat16())
        assert contract.relative_error(operator(x), formula(x.double())) < 1e-6


@pytest.mark.parametrize("n", [0, 3, 12])
def test_other_widths_are_refused(n):
    with pytest.raises(ConfigError, match="power of two"):
        operator(torch.zeros(2, n))
