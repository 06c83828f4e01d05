"""``dsv4::indexer_select`` and its backward, which stand for rotation, scaling and choice in a joint graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from dsv4c.ops import reference
from dsv4c.ops.visibility import entry_mask
from tests.ops import contract
from tests.ops import test_indexer_topk as plain
from tests.ops.cases import SEARCH, Packed, dtypes, heads, normal, one_document, packed, seeds
from tests.ops.test_indexer_topk import by_entry

forward = torch.ops.dsv4.indexer_select
backward = torch.ops.dsv4.indexer_select_backward
PACKED, NO_ENTRY = plain.PACKED, plain.NO_ENTRY
rotations = st.sampled_from(((8, 4), (8, 8), (2, 2), (7, 4)))  # channels, and how many of them turn


class _Joint(torch.autograd.Function):
    """Forward and backward operator with what lies between them in a joint graph: of the outputs, only the ids."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        ids, scores = forward(*args)
        ctx.save_for_backward(ids, *args[:5])
        ctx.others = args[7], args[9]
        ctx.mark_non_differentiable(ids)
        return ids, scores

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(grad, *ctx.saved_tensors, *ctx.others), *(None,) * 7


def fused(*args: Any) -> tuple[Tensor, Tensor]:
    return _Joint.apply(*args)


def unfused(
    q: Tensor, k: Tensor, w: Tensor, cos: Tensor, sin: Tensor, start: Tensor, entry_end: Tensor, temperature: float,
    topk: int, ratio: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operators that a pass finds, without the two transforms."""
    turned = torch.ops.dsv4.rope(q, cos, sin, False)
    return torch.ops.dsv4.indexer_topk(turned, k, w * temperature, start, entry_end, topk, ratio)


def arguments(
    at: Packed = PACKED, n_heads: int = 3, width: int = 8, topk: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0,
    rotary: int = 4,
) -> tuple[Any, ...]:  # fmt: skip
    table = torch.float64 if dtype == torch.float64 else torch.float32
    (angle,) = normal(seed + 1, table, (*at.start.shape, rotary // 2), trains=False)
    q, k, w, start, entry_end, topk, ratio = plain.arguments(at, n_heads, width, topk, dtype, seed)
    return q, k, w, angle.cos(), angle.sin(), start, entry_end, (width * n_heads) ** -0.5, topk, ratio


def backward_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, w, cos, sin, _, _, temperature, _, ratio = contract.detached(args)
    ids, scores = forward(*contract.detached(args))
    (grad,) = normal(9, scores.dtype, tuple(scores.shape), trains=False)
    return grad, ids, q, k, w, cos, sin, temperature, ratio


def assert_equal(other: Any, args: tuple[Any, ...]) -> None:
    dtype, n_entries = args[0].dtype, args[1].shape[1]
    (ids, scores), (expected_ids, expected) = fused(*args), other(*args)
    assert ids.dtype == torch.int64 and torch.equal(ids < 0, expected_ids < 0)
    assert contract.relative_error(scores, expected) <= contract.FORWARD[dtype]
    ours, theirs = by_entry(ids, scores, n_entries), by_entry(expected_ids, expected, n_entries)
    assert contract.relative_error(ours, theirs) <= contract.FORWARD[dtype]
    contract.assert_same_gradients(plain.trained(fused, args), plain.trained(other, args), contract.GRADIENT[dtype])


@given(packed(), heads, rotations, st.integers(1, 12), dtypes, seeds)
@SEARCH
def test_operators_equal_the_formula(at, n_heads, rotation, topk, dtype, seed):
    width, rotary = rotation
    assert_equal(reference.indexer_select, arguments(at, n_heads, width, topk, dtype, seed, rotary))


@given(packed((1, 2, 4)), heads, rotations, st.integers(1, 12), dtypes, seeds)
@SEARCH
def test_operators_equal_the_operators_that_they_stand_for(at, n_heads, rotation, topk, dtype, seed):
    width, rotary = rotation
    assert_equal(unfused, arguments(at, n_heads, width, topk, dtype, seed, rotary))


@given(packed(), st.integers(1, 12), seeds)
@SEARCH
def test_a_choice_is_distinct_visible_and_as_large_as_it_can_be(at, topk, seed):
    ids, scores = forward(*contract.detached(arguments(at, topk=topk, seed=seed)))
    visible = entry_mask(at.start, at.entry_end, 0)
    chosen = by_entry(ids, torch.ones_like(scores), at.entry_end.shape[1])
    assert torch.equal((ids >= 0).sum(-1), visible.sum(-1).clamp(max=min(topk, at.entry_end.shape[1])))  # invariant 20
    assert torch.equal(chosen.sum(-1), (ids >= 0).sum(-1)) and not chosen[~visible].any()
    assert torch.equal(scores == float("-inf"), ids < 0)


def test_two_hadamard_transforms_change_neither_scores_nor_gradients():
    """Why the operator has none: <Hq, Hk> = <q, k>."""
    args = arguments(dtype=torch.float64)

    def transformed(q: Tensor, k: Tensor, w: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        start, entry_end, temperature, topk, ratio = rest
        q, k = torch.ops.dsv4.hadamard(torch.ops.dsv4.rope(q, cos, sin, False)), torch.ops.dsv4.hadamard(k)
        return torch.ops.dsv4.indexer_topk(q, k, w * temperature, start, entry_end, topk, ratio)

    assert_equal(transformed, args)


@pytest.mark.parametrize("at", [PACKED, NO_ENTRY])
@pytest.mark.parametrize("topk", [2, 9])
def test_opcheck_finds_nothing(at, topk):
    args = contract.detached(arguments(at, topk=topk))
    opcheck(forward.default, args)
    opcheck(backward.default, backward_arguments(args))


@pytest.mark.parametrize("at", [one_document(2, 7, 4), PACKED, NO_ENTRY, one_document(1, 1, 4), one_document(1, 4, 4)])
@pytest.mark.parametrize("topk", [2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(at, topk, dtype):
    """The queries, which are rotated where they are in cache, are not changed either."""
    args = arguments(at, topk=topk, dtype=dtype)
    contract.assert_functional(forward, args)
    contract.assert_functional(backward, backward_arguments(args))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_query_at_all(shape):
    at = Packed(torch.zeros(shape).long(), torch.zeros(shape[0], 1).long(), 4)
    args = arguments(at)
    contract.assert_functional(forward, args)
    assert not backward(*backward_arguments(args))[1].any()


def test_bf16_inputs_give_fp32_scores_of_the_same_values():
    args = contract.detached(arguments(dtype=torch.bfloat16))
    ids, scores = forward(*args)
    wide = forward(*(a.float() for a in args[:3]), *args[3:])
    assert scores.dtype == torch.float32 and torch.equal(ids, wide[0]) and torch.equal(scores, wide[1])


def test_inputs_of_any_strides():
    contract.assert_takes_any_strides(fused, arguments())


def test_incoming_gradients_of_any_strides():
    contract.assert_takes_any_gradient(fused, arguments())


@pytest.mark.parametrize("topk", [2, 9])
def test_same_bits_twice(topk):
    contract.assert_deterministic(fused, arguments(one_document(2, 36, 4), 128, topk=topk))


@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_row_spoils_no_other(poisoned, value):
    contract.assert_rows_stay_apart(fused, arguments(), poisoned, value)


@pytest.mark.parametrize("poisoned", [0, 2, 3, 4])
def test_one_bad_token_spoils_no_other(poisoned):
    """A query, a weight or an angle that is NaN."""
    args = contract.detached(arguments())
    spoilt = [a.clone() if isinstance(a, Tensor) else a for a in args]
    spoilt[poisoned][0, 8] = float("nan")
    others = torch.arange(18) != 8
    for a, b in zip(forward(*spoilt), forward(*args), strict=True):
        assert torch.equal(a[0, others], b[0, others])


def test_entries_that_are_not_selected_get_no_gradient():
    args = arguments(one_document(1, 36, 4), topk=1)
    ids, scores = fused(*args)
    (dk,) = torch.autograd.grad(scores[ids >= 0].sum(), args[1])
    unselected = torch.tensor([p not in ids for p in range(9)])
    assert unselected.any() and not dk[0, unselected].any()
