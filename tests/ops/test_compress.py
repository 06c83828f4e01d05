"""``dsv4::compress``: windows of tokens pooled to entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from dsv4c.ops.compress import compress as operator
from dsv4c.ops.reference.compress import compress as formula
from tests.ops import contract
from tests.ops.cases import SEARCH, Packed, dtypes, normal, one_document, pack, packed, seeds

compress = torch.ops.dsv4.compress
backward = torch.ops.dsv4.compress_backward
PACKED = pack([[7, 11], [18]], 4)
PLACES = [PACKED, one_document(2, 3, 4), one_document(1, 4, 4), one_document(1, 1, 4), pack([[5, 9, 8], [13, 2, 7]], 4)]


def arguments(
    at: Packed = PACKED, c: int = 3, overlap: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, ...]:
    width = 2 * c if overlap else c
    shape = (*at.start.shape, width)
    values, logits, ape = normal(seed, dtype, shape, shape, (at.ratio, width))
    if dtype == torch.bfloat16:
        ape = ape.detach().float().requires_grad_()
    last = at.entry_end.clamp(max=shape[1] - 1)
    has_previous = (last - at.start.gather(1, last)) >= 2 * at.ratio - 1
    return values, logits, ape, at.entry_end, has_previous, overlap


@given(packed((1, 4, 8)), st.integers(1, 5), st.booleans(), dtypes, seeds)
@SEARCH
def test_operator_equals_its_formula(at, c, overlap, dtype, seed):
    contract.assert_equals_formula(compress, formula, arguments(at, c, overlap, dtype, seed))


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("overlap", [True, False])
def test_places_with_no_entry_with_one_and_ragged(at, overlap):
    contract.assert_equals_formula(compress, formula, arguments(at, overlap=overlap))


def test_entries_of_more_than_one_block():
    contract.assert_equals_formula(compress, formula, arguments(one_document(2, 300, 4), 256))


@pytest.mark.parametrize("overlap", [True, False])
def test_formula_has_the_gradient_of_its_finite_differences(overlap):
    values, logits, ape, *rest = arguments(pack([[9, 4]], 4), 2, overlap, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: formula(*x, *rest), (values, logits, ape))


@pytest.mark.parametrize("at", PLACES[:2])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_finds_nothing(at, overlap, dtype):
    opcheck(compress.default, arguments(at, overlap=overlap, dtype=dtype))


def backward_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    *tensors, overlap = contract.detached(args)
    out = operator(*tensors, overlap)
    return torch.ones_like(out), *tensors, out, overlap


@pytest.mark.parametrize("overlap", [True, False])
def test_opcheck_finds_nothing_in_the_backward(overlap):
    opcheck(backward.default, backward_arguments(arguments(overlap=overlap)))


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(at, overlap, dtype):
    args = arguments(at, overlap=overlap, dtype=dtype)
    contract.assert_functional(compress, args)
    contract.assert_functional(backward, backward_arguments(args))


@pytest.mark.parametrize("overlap", [True, False])
def test_inputs_of_any_strides(overlap):
    contract.assert_takes_any_strides(compress, arguments(overlap=overlap))


@pytest.mark.parametrize("overlap", [True, False])
def test_incoming_gradients_of_any_strides(overlap):
    contract.assert_takes_any_gradient(compress, arguments(overlap=overlap))


def test_same_bits_twice():
    contract.assert_deterministic(compress, arguments(one_document(2, 300, 4), 256))


@pytest.mark.parametrize("poisoned", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_row_spoils_no_other(poisoned, value):
    contract.assert_rows_stay_apart(compress, arguments(), poisoned, value)


def test_a_bad_token_before_a_document_does_not_enter_its_first_entry():
    args = arguments(pack([[8, 10]], 4))
    bad = [t.detach().clone() for t in args[:2]]
    bad[0][0, :8] = bad[1][0, :8] = float("nan")
    assert torch.equal(operator(*bad, *args[2:])[0, 2:], operator(*args)[0, 2:])


def test_entries_that_are_not_there_are_zero_and_give_no_gradient():
    args = arguments(pack([[7, 3]], 4))
    assert args[3].tolist() == [[3, 10]]
    out = operator(*args)
    assert not out[0, 1].any()
    assert not any(g.any() for g in torch.autograd.grad(out[0, 1].sum(), args[:3]))


def test_flat_gates_pool_to_the_mean():
    """Invariant 14."""
    values, logits, ape, *rest = arguments(one_document(1, 12, 4), dtype=torch.float64)
    out = operator(values, torch.zeros_like(logits), torch.zeros_like(ape), *rest)
    windows = values.unflatten(1, (3, 4))
    before, now = windows[..., :3], windows[..., 3:]
    assert torch.allclose(out[0, 0], now[0, 0].mean(0))
    assert torch.allclose(out[0, 1:], torch.cat((before[0, :2], now[0, 1:]), 1).mean(1))


def test_tokens_after_the_last_window_change_nothing():
    """Invariant 16."""
    args = arguments(one_document(1, 11, 4))
    values = args[0].detach().clone()
    values[:, 8:] = 7.0
    assert torch.equal(operator(values, *args[1:]), operator(*args))
