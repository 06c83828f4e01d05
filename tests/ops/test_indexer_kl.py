"""``dsv4::indexer_kl``: the distillation loss and, in the same pass, its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from dsv4c.ops.indexer_kl import indexer_kl as operator
from dsv4c.ops.reference.indexer_kl import indexer_kl as formula
from tests.ops import contract
from tests.ops.cases import SEARCH, dtypes, normal, seeds

indexer_kl = torch.ops.dsv4.indexer_kl
SHAPES = [(2, 7, 5), (1, 1, 1), (2, 0, 3), (2, 3, 0), (3, 40)]


def arguments(shape: tuple[int, ...] = (2, 7, 5), dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, ...]:
    """A teacher that is zero where there is no entry; rows without any, whole and padded rows among them."""
    (scores,) = normal(seed, dtype, shape)
    g = torch.Generator().manual_seed(seed)
    n_entries = torch.randint(0, shape[-1] + 1, shape[:-1], generator=g)
    none = torch.arange(shape[-1]) >= n_entries[..., None]
    target = torch.rand(shape, generator=g, dtype=torch.float64).masked_fill(none, 0.0)
    target = (target / target.sum(-1, keepdim=True).clamp(min=1e-30)).to(dtype)
    scores = (3 * scores).detach().masked_fill(none, float("-inf")).requires_grad_()
    return target, scores, torch.rand(shape[:-1], generator=g) < 0.8


@given(st.lists(st.integers(1, 6), max_size=2), st.integers(1, 40), dtypes, seeds)
@SEARCH
def test_operator_equals_its_formula(batch, k, dtype, seed):
    args = arguments((*batch, k), dtype, seed)
    contract.assert_equals_formula(indexer_kl, formula, args)


@pytest.mark.parametrize("shape", SHAPES)
def test_empty_and_single_rows(shape):
    contract.assert_equals_formula(indexer_kl, formula, arguments(shape))


def test_rows_of_more_than_one_block():
    contract.assert_equals_formula(indexer_kl, formula, arguments((300, 512)))


def test_formula_has_the_gradient_of_its_finite_differences():
    target, scores, real = arguments((4, 5), torch.float64)
    finite = scores.detach().clamp(min=-9.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: formula(target, s, real)[0], (finite,))


def test_gradient_of_the_same_pass_is_the_gradient_of_the_formula():
    args = arguments((6, 9), torch.float64)
    (expected,) = torch.autograd.grad(formula(*args)[0], args[1])
    assert contract.relative_error(indexer_kl(*args)[1], expected) < 1e-12


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck_finds_nothing(shape, dtype):
    opcheck(indexer_kl.default, arguments(shape, dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(shape, dtype):
    contract.assert_functional(indexer_kl, arguments(shape, dtype))


def test_inputs_of_any_strides():
    contract.assert_takes_any_strides(indexer_kl, arguments())


def test_gradient_is_multiplied_by_the_incoming_scalar():
    target, scores, real = arguments()
    loss, dscores = indexer_kl(target, scores, real)
    for grad in (torch.tensor(0.25), torch.tensor([0.25, 3.0])[0], torch.tensor(0.25).expand(2, 2)[1, 0]):
        (pulled,) = torch.autograd.grad(loss, scores, grad, retain_graph=True)
        assert torch.equal(pulled, 0.25 * dscores)


def test_same_bits_twice():
    contract.assert_deterministic(indexer_kl, arguments((300, 512)))


@pytest.mark.parametrize("poisoned", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_row_spoils_the_gradient_of_no_other(poisoned, value):
    args = [*arguments()]
    bad = args[poisoned].detach().clone()
    bad[0] = value
    spoilt = [*args[:poisoned], bad, *args[poisoned + 1 :]]
    assert torch.equal(indexer_kl(*spoilt)[1][1:], indexer_kl(*args)[1][1:])


def test_a_row_without_entries_or_of_padding_counts_for_nothing():
    target, scores, real = arguments((4, 5))
    real[:] = torch.tensor([True, True, False, True])
    scores = scores.detach().clone()
    scores[1] = float("-inf")
    loss, dscores = operator(target, scores, real)
    alone = [operator(target[i], scores[i], real[i])[0] for i in (0, 3)]
    assert contract.relative_error(loss, alone[0] + alone[1]) < 1e-6
    assert not dscores[1:3].any()


def test_a_row_of_the_gradient_sums_to_zero():
    target, scores, real = arguments((9, 17), torch.float64)
    assert operator(target, scores, real)[1].sum(-1).abs().max() < 1e-12  # invariant 22


def test_scores_equal_to_the_log_of_the_teacher_are_the_minimum():
    target = torch.rand(4, 6, dtype=torch.float64).softmax(-1)
    loss, dscores = operator(target, target.log() + 3.0, torch.ones(4, dtype=torch.bool))
    assert abs(float(loss)) < 1e-12 and dscores.abs().max() < 1e-9  # the guards of 1e-10 are what is left


def test_teacher_gets_no_gradient():
    target, scores, real = arguments()
    loss, _ = indexer_kl(target.requires_grad_(), scores, real)
    assert torch.autograd.grad(loss, target, allow_unused=True, materialize_grads=False)[0] is None
