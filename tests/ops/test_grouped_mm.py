"""``dsv4::grouped_mm``: one matrix product per expert over rows sorted by expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from dsv4c.ops import reference
from tests.ops import contract
from tests.ops.cases import SEARCH, dtypes, normal, seeds

grouped_mm = torch.ops.dsv4.grouped_mm
backward = torch.ops.dsv4.grouped_mm_backward
# Widths of 16 bytes and others: the first take the library's kernel, the others the loop.
WIDTHS = [(8, 16), (5, 6), (8, 3), (1, 1)]


def arguments(
    rows: list[int], d: int = 8, o: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, ...]:
    """Groups with these numbers of rows."""
    x, weight = normal(seed, dtype, (sum(rows), d), (len(rows), o, d))
    return x, weight, torch.tensor(rows).cumsum(0).int()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.sampled_from(WIDTHS), dtypes, seeds)
@SEARCH
def test_operator_equals_its_formula(rows, widths, dtype, seed):
    contract.assert_equals_formula(grouped_mm, reference.grouped_mm, arguments(rows, *widths, dtype, seed))


def test_formula_has_the_gradient_of_its_finite_differences():
    x, weight, ends = arguments([2, 0, 3], 3, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: reference.grouped_mm(a, b, ends), (x, weight))


@pytest.mark.parametrize("widths", WIDTHS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_finds_nothing(widths, dtype):
    opcheck(grouped_mm.default, arguments([3, 0, 4], *widths, dtype))


@pytest.mark.parametrize("widths", WIDTHS[:2])
def test_opcheck_finds_nothing_in_the_backward(widths):
    x, weight, ends = contract.detached(arguments([3, 0, 4], *widths))
    opcheck(backward.default, (torch.ones(7, widths[1]), x, weight, ends))


@pytest.mark.parametrize("rows", [[3, 0, 4], [7], [0, 0], [1, 0, 0]])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(rows, widths, dtype):
    args = arguments(rows, *widths, dtype)
    contract.assert_functional(grouped_mm, args)
    contract.assert_functional(backward, (torch.ones(sum(rows), widths[1], dtype=dtype), *contract.detached(args)))


@pytest.mark.parametrize("widths", WIDTHS[:2])
def test_inputs_of_any_strides(widths):
    contract.assert_takes_any_strides(grouped_mm, arguments([3, 0, 4], *widths))


@pytest.mark.parametrize("widths", WIDTHS[:2])
def test_incoming_gradients_of_any_strides(widths):
    contract.assert_takes_any_gradient(grouped_mm, arguments([3, 0, 4], *widths))


@pytest.mark.parametrize("widths", WIDTHS[:2])
def test_same_bits_twice(widths):
    contract.assert_deterministic(grouped_mm, arguments([3, 0, 4], *widths))


@pytest.mark.parametrize("widths", WIDTHS[:2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_token_spoils_no_other(widths, value):
    contract.assert_rows_stay_apart(grouped_mm, arguments([3, 0, 4], *widths), 0, value)


@pytest.mark.parametrize("widths", WIDTHS[:2])
def test_one_bad_token_spoils_the_weight_gradient_of_its_own_expert_only(widths):
    x, weight, ends = arguments([3, 0, 4], *widths)
    bad = x.detach().clone()
    bad[0] = float("nan")
    (dweight,) = torch.autograd.grad(grouped_mm(bad, weight, ends).nan_to_num().sum(), weight)
    assert dweight[0].isnan().any() and dweight[1:].isfinite().all()


@pytest.mark.parametrize("widths", WIDTHS[:2])
def test_an_expert_without_rows_gets_a_gradient_of_zeros(widths):
    x, weight, ends = arguments([3, 0, 4], *widths)
    (dweight,) = torch.autograd.grad(grouped_mm(x, weight, ends).sum(), weight)
    assert torch.equal(dweight[1], torch.zeros_like(dweight[1])) and (dweight[[0, 2]] != 0).all()
