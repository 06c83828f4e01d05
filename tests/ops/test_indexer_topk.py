"""``dsv4::indexer_topk``: the indexer's scores and its choice of entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import Library, opcheck

from dsv4c.ops import reference
from dsv4c.ops.visibility import entry_mask
from tests.ops import contract
from tests.ops.cases import SEARCH, Packed, dtypes, heads, normal, one_document, pack, packed, seeds

indexer_topk = torch.ops.dsv4.indexer_topk
backward = torch.ops.dsv4.indexer_topk_backward
PACKED = pack([[7, 11], [18]], 4)
NO_ENTRY = one_document(2, 3, 4)

# opcheck adds the sums of the outputs up in place, beginning with the first, and an int64 sum cannot take an fp32 one: an
# operator whose ids come first cannot be checked with inputs that require gradients. Its outputs in the other order can.
_library = Library("dsv4_tests", "DEF")
_library.define("scores_first(Tensor q, Tensor k, Tensor w, Tensor s, Tensor e, int topk, int ratio) -> (Tensor, Tensor)")
_library.impl("scores_first", lambda *args: indexer_topk(*args)[::-1], "CompositeImplicitAutograd")
scores_first = torch.ops.dsv4_tests.scores_first


def arguments(
    at: Packed = PACKED, n_heads: int = 3, width: int = 8, topk: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, ...]:
    (batch, n_tokens), n_entries = at.start.shape, at.entry_end.shape[1]
    shapes = (batch, n_tokens, n_heads, width), (batch, n_entries, width), (batch, n_tokens, n_heads)
    return *normal(seed, dtype, *shapes), at.start, at.entry_end, topk, at.ratio


def by_entry(ids: Tensor, values: Tensor, n_entries: int) -> Tensor:
    """Values of the selected entries at their entry's place [B,S,P], 0 elsewhere: the order of a choice is not defined."""
    table = values.new_zeros(*ids.shape[:2], n_entries + 1)
    return table.scatter(-1, torch.where(ids < 0, n_entries, ids), values.masked_fill(ids < 0, 0.0))[..., :n_entries]


def trained(operator: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Gradients of a loss that weighs every selected score by its entry."""
    ids, scores = operator(*args)
    table = by_entry(ids, scores, args[1].shape[1])
    weights = torch.randn(table.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad((table * weights.to(table.dtype)).sum(), args[:3])


@given(packed(), heads, st.sampled_from((1, 8)), st.integers(1, 12), dtypes, seeds)
@SEARCH
def test_operator_equals_its_formula(at, n_heads, width, topk, dtype, seed):
    args = arguments(at, n_heads, width, topk, dtype, seed)
    (ids, scores), (expected_ids, expected) = indexer_topk(*args), reference.indexer_topk(*args)
    assert ids.dtype == torch.int64 and torch.equal(ids < 0, expected_ids < 0)
    assert contract.relative_error(scores, expected) <= contract.FORWARD[dtype]
    n_entries = at.entry_end.shape[1]
    ours, theirs = by_entry(ids, scores, n_entries), by_entry(expected_ids, expected, n_entries)
    assert contract.relative_error(ours, theirs) <= contract.FORWARD[dtype]
    ours, theirs = trained(indexer_topk, args), trained(reference.indexer_topk, args)
    contract.assert_same_gradients(ours, theirs, contract.GRADIENT[dtype])


@given(packed(), st.integers(1, 12), seeds)
@SEARCH
def test_a_choice_is_distinct_visible_and_as_large_as_it_can_be(at, topk, seed):
    ids, scores = indexer_topk(*arguments(at, topk=topk, seed=seed))
    visible = entry_mask(at.start, at.entry_end, 0)
    chosen = by_entry(ids, torch.ones_like(scores), at.entry_end.shape[1])
    assert torch.equal((ids >= 0).sum(-1), visible.sum(-1).clamp(max=min(topk, at.entry_end.shape[1])))  # invariant 20
    assert torch.equal(chosen.sum(-1), (ids >= 0).sum(-1)) and not chosen[~visible].any()
    assert torch.equal(scores == float("-inf"), ids < 0)


def test_formula_has_the_gradient_of_its_finite_differences():
    q, k, w, *rest = arguments(one_document(1, 9, 4), 2, 3, dtype=torch.float64)

    def scores(*inputs: Tensor) -> Tensor:
        ids, values = reference.indexer_topk(*inputs, *rest)
        return values.masked_fill(ids < 0, 0.0)

    assert torch.autograd.gradcheck(scores, (q, k, w))


@pytest.mark.parametrize("at", [PACKED, NO_ENTRY])
@pytest.mark.parametrize("topk", [2, 9])
def test_opcheck_finds_nothing(at, topk):
    args = arguments(at, topk=topk)
    opcheck(indexer_topk.default, contract.detached(args))
    opcheck(indexer_topk.default, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    opcheck(scores_first.default, args, test_utils="test_aot_dispatch_dynamic")


def backward_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, w, *_, ratio = contract.detached(args)
    ids, scores = indexer_topk(*args)
    return torch.randn(scores.shape).to(scores.dtype), ids, q, k, w, ratio


@pytest.mark.parametrize("at", [PACKED, NO_ENTRY])
def test_opcheck_finds_nothing_in_the_backward(at):
    opcheck(backward.default, backward_arguments(arguments(at)))


@pytest.mark.parametrize("at", [one_document(2, 7, 4), PACKED, NO_ENTRY, one_document(1, 1, 4), one_document(1, 4, 4)])
@pytest.mark.parametrize("topk", [2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(at, topk, dtype):
    args = arguments(at, topk=topk, dtype=dtype)
    contract.assert_functional(indexer_topk, args)
    contract.assert_functional(backward, backward_arguments(args))


def test_ids_are_not_differentiable_and_scores_are():
    ids, scores = indexer_topk(*arguments())
    assert not ids.requires_grad and scores.requires_grad


def test_bf16_inputs_give_fp32_scores_of_the_same_values():
    args = arguments(dtype=torch.bfloat16)
    ids, scores = indexer_topk(*args)
    wide = indexer_topk(*(a.float() for a in args[:3]), *args[3:])
    assert scores.dtype == torch.float32 and torch.equal(ids, wide[0]) and torch.equal(scores, wide[1])


def test_inputs_of_any_strides():
    contract.assert_takes_any_strides(indexer_topk, arguments())


def test_incoming_gradients_of_any_strides():
    contract.assert_takes_any_gradient(indexer_topk, arguments())


@pytest.mark.parametrize("topk", [2, 9])
def test_same_bits_twice(topk):
    contract.assert_deterministic(indexer_topk, arguments(one_document(2, 36, 4), 128, topk=topk))


@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_row_spoils_no_other(poisoned, value):
    contract.assert_rows_stay_apart(indexer_topk, arguments(), poisoned, value)


def test_one_bad_query_spoils_no_other():
    args = arguments()
    bad = args[0].detach().clone()
    bad[0, 8] = float("nan")
    others = torch.arange(18) != 8
    for a, b in zip(indexer_topk(bad, *args[1:]), indexer_topk(*args), strict=True):
        assert torch.equal(a[0, others], b[0, others])


def test_entries_that_are_not_selected_get_no_gradient():
    args = arguments(one_document(1, 36, 4), topk=1)
    ids, scores = indexer_topk(*args)
    (dk,) = torch.autograd.grad(scores[ids >= 0].sum(), args[1])
    unselected = torch.tensor([p not in ids for p in range(9)])
    assert unselected.any() and not dk[0, unselected].any()
