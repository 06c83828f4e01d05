"""``dsv4::sparse_attention_derotated`` and its backward, which stand for attention and inverse rotation in a joint graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from dsv4c.ops import reference
from dsv4c.ops.sparse_attention import PRUNES
from tests.ops import contract
from tests.ops import test_sparse_attention as plain
from tests.ops.cases import SEARCH, Packed, dtypes, heads, normal, one_document, pack, packed, seeds

forward = torch.ops.dsv4.sparse_attention_derotated
backward = torch.ops.dsv4.sparse_attention_derotated_backward
PACKED, NO_ENTRY, PRUNED = plain.PACKED, plain.NO_ENTRY, plain.PRUNED
rotations = st.sampled_from(((8, 4), (8, 8), (2, 2), (7, 4)))  # channels, and how many of them turn


class _Joint(torch.autograd.Function):
    """Forward and backward operator with what lies between them in a joint graph: of the outputs, only o' and lse."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        outputs = forward(*args)
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)), *outputs)
        ctx.others, ctx.chosen = args[7:10], args[6] is not None
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, cos, sin, out, lse = ctx.saved_tensors
        ids = inputs.pop() if ctx.chosen else None
        return *backward(grad, grad_lse, *inputs, ids, out, lse, *ctx.others, cos, sin), *(None,) * 8


def fused(*args: Any) -> tuple[Tensor, Tensor]:
    return _Joint.apply(*args)


def unfused(*args: Any) -> tuple[Tensor, Tensor]:
    """The two operators that a pass finds."""
    out, lse = torch.ops.dsv4.sparse_attention(*args[:10])
    return torch.ops.dsv4.rope(out, *args[10:], True), lse


def arguments(
    at: Packed = PACKED, n_heads: int = 3, width: int = 8, window: int = 5, k: int | None = 2,
    dtype: torch.dtype = torch.float32, seed: int = 0, rotary: int = 4,
) -> tuple[Any, ...]:  # fmt: skip
    table = torch.float64 if dtype == torch.float64 else torch.float32
    (angle,) = normal(seed + 1, table, (*at.start.shape, rotary // 2), trains=False)
    return *plain.arguments(at, n_heads, width, window, k, dtype, seed), angle.cos(), angle.sin()


def backward_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    args = contract.detached(args)
    out, lse = forward(*args)
    grad, grad_lse = normal(9, torch.float64, tuple(out.shape), tuple(lse.shape), trains=False)
    return grad.to(out.dtype), grad_lse.to(lse.dtype), *args[:7], out, lse, *args[7:]


@given(packed(), heads, rotations, st.integers(1, 40), st.none() | st.integers(1, 12), dtypes, seeds)
@SEARCH
def test_operators_equal_the_formula(at, n_heads, rotation, window, k, dtype, seed):
    width, rotary = rotation
    args = arguments(at, n_heads, width, window, k, dtype, seed, rotary)
    contract.assert_equals_formula(fused, reference.sparse_attention_derotated, args)


@given(packed(), heads, rotations, st.none() | st.integers(1, 12), dtypes, seeds)
@SEARCH
def test_operators_equal_the_operators_that_they_stand_for(at, n_heads, rotation, k, dtype, seed):
    width, rotary = rotation
    contract.assert_equals_formula(fused, unfused, arguments(at, n_heads, width, 6, k, dtype, seed, rotary))


@given(st.integers(1, 3), st.integers(1, 30), heads, st.integers(1, 9), dtypes, seeds)
@SEARCH
def test_operators_equal_the_formula_of_a_pure_window(batch, n_tokens, n_heads, window, dtype, seed):
    at = Packed(torch.zeros(batch, n_tokens).long(), torch.zeros(batch, 0).long(), 0)
    args = arguments(at, n_heads, 4, window, None, dtype, seed, 2)
    contract.assert_equals_formula(fused, reference.sparse_attention_derotated, args)


@given(packed((1, 2)), heads, st.integers(1, 2), dtypes, seeds)
@SEARCH
def test_operators_equal_the_formula_where_many_entries_and_few_are_selected(at, n_heads, k, dtype, seed):
    contract.assert_equals_formula(fused, unfused, arguments(at, n_heads, k=k, dtype=dtype, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_equal_the_formula_where_each_query_gathers_its_own(dtype):
    assert PRUNED.entry_end.shape[1] > PRUNES * 2
    contract.assert_equals_formula(fused, reference.sparse_attention_derotated, arguments(PRUNED, k=2, dtype=dtype))


@pytest.mark.parametrize("at", [PACKED, NO_ENTRY, PRUNED])
@pytest.mark.parametrize("k", [None, 2])
def test_opcheck_finds_nothing(at, k):
    args = contract.detached(arguments(at, k=k))
    opcheck(forward.default, args)
    opcheck(backward.default, backward_arguments(args))


@pytest.mark.parametrize(
    "at", [one_document(2, 7, 4), PACKED, NO_ENTRY, PRUNED, one_document(2, 3, 4), one_document(1, 1, 4), pack([[0]], 4)]
)
@pytest.mark.parametrize("k", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(at, k, dtype):
    """The gradient, which is rotated where it is in cache, is not changed either."""
    args = arguments(at, k=k, dtype=dtype)
    contract.assert_functional(forward, args)
    contract.assert_functional(backward, backward_arguments(args))


def test_bf16_inputs_are_summed_and_rotated_in_fp32_and_rounded_once():
    args = contract.detached(arguments(dtype=torch.bfloat16))
    out, lse = forward(*args)
    wide_out, wide_lse = forward(*(a.float() for a in args[:4]), *args[4:])
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, wide_out.bfloat16()) and torch.equal(lse, wide_lse)


@pytest.mark.parametrize("k", [None, 2])
def test_inputs_of_any_strides(k):
    contract.assert_takes_any_strides(fused, arguments(k=k))


@pytest.mark.parametrize("k", [None, 2])
def test_incoming_gradients_of_any_strides(k):
    contract.assert_takes_any_gradient(fused, arguments(k=k))


@pytest.mark.parametrize("at", [PACKED, PRUNED])
@pytest.mark.parametrize("k", [None, 2])
def test_same_bits_twice(at, k):
    contract.assert_deterministic(fused, arguments(at, 128, k=k))


@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_row_spoils_no_other(poisoned, value):
    contract.assert_rows_stay_apart(fused, arguments(), poisoned, value)


@pytest.mark.parametrize("poisoned", [0, 10, 11])
def test_one_bad_token_spoils_no_other(poisoned):
    """A query or an angle that is NaN."""
    args = contract.detached(arguments())
    spoilt = [a.clone() if isinstance(a, Tensor) else a for a in args]
    spoilt[poisoned][0, 8] = float("nan")
    others = torch.arange(18) != 8
    for a, b in zip(forward(*spoilt), forward(*args), strict=True):
        assert torch.equal(a[0, others], b[0, others])


def test_one_bad_gradient_spoils_no_other_query():
    grad, *rest = backward_arguments(arguments())
    bad = grad.clone()
    bad[0, 8] = float("nan")
    others = torch.arange(18) != 8
    spoilt, good = backward(bad, *rest)[0], backward(grad, *rest)[0]
    assert torch.equal(spoilt[0, others], good[0, others]) and spoilt[0, 8].isnan().any()


def test_the_channels_in_front_of_the_rotated_ones_are_those_of_attention():
    args = contract.detached(arguments())
    assert torch.equal(forward(*args)[0][..., :4], torch.ops.dsv4.sparse_attention(*args[:10])[0][..., :4])
