"""``dsv4::sparse_attention``: window, selected entries and sink in one softmax."""

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
from dsv4c.ops.visibility import entry_mask
from tests.ops import contract
from tests.ops.cases import SEARCH, Packed, dtypes, heads, normal, one_document, pack, packed, seeds

sparse_attention = torch.ops.dsv4.sparse_attention
backward = torch.ops.dsv4.sparse_attention_backward
PACKED = pack([[7, 11], [18]], 4)
NO_ENTRY = Packed(torch.zeros(2, 7).long(), torch.zeros(2, 0).long(), 0)
PRUNED = pack([[17, 23], [40]], 2)  # 20 entries: of 2 that are selected, each query gathers its own


def choice(at: Packed, k: int, seed: int) -> Tensor:
    """Up to k visible entries of every query in random order, -1 for none [B,S,min(k,P)]."""
    visible = entry_mask(at.start, at.entry_end, 0)
    lots = torch.rand(visible.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(~visible, -1.0)
    best, ids = lots.topk(min(k, visible.shape[-1]), -1)
    return torch.where(best < 0, -1, ids)


def arguments(
    at: Packed = PACKED, n_heads: int = 3, width: int = 8, window: int = 5, k: int | None = 2,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """k None: every visible entry."""
    (batch, n_tokens), n_entries = at.start.shape, at.entry_end.shape[1]
    q, kv, entries, sink = normal(
        seed, dtype, (batch, n_tokens, n_heads, width), (batch, n_tokens, width), (batch, n_entries, width), (n_heads,)
    )
    if dtype == torch.bfloat16:
        sink = sink.detach().float().requires_grad_()
    ids = None if k is None else choice(at, k, seed)
    return q, kv, entries, sink, at.start, at.entry_end, ids, width**-0.5, window, at.ratio


@given(packed(), heads, st.sampled_from((1, 8)), st.integers(1, 40), st.none() | st.integers(1, 12), dtypes, seeds)
@SEARCH
def test_operator_equals_its_formula(at, n_heads, width, window, k, dtype, seed):
    args = arguments(at, n_heads, width, window, k, dtype, seed)
    contract.assert_equals_formula(sparse_attention, reference.sparse_attention, args)


@given(packed((1, 2)), heads, st.integers(1, 2), dtypes, seeds)
@SEARCH
def test_operator_equals_its_formula_where_there_are_many_entries_and_few_are_selected(at, n_heads, k, dtype, seed):
    args = arguments(at, n_heads, k=k, dtype=dtype, seed=seed)
    contract.assert_equals_formula(sparse_attention, reference.sparse_attention, args)


@pytest.mark.parametrize("n_heads", [3, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator_equals_its_formula_where_each_query_gathers_its_own(n_heads, dtype):
    """With 128 heads a block is 8 queries, and only the later ones have so many entries before them."""
    assert PRUNED.entry_end.shape[1] > PRUNES * 2
    args = arguments(PRUNED, n_heads, k=2, dtype=dtype)
    contract.assert_equals_formula(sparse_attention, reference.sparse_attention, args)


@given(st.integers(1, 3), st.integers(1, 30), heads, st.integers(1, 9), dtypes, seeds)
@SEARCH
def test_a_pure_window_equals_its_formula(batch, n_tokens, n_heads, window, dtype, seed):
    at = Packed(torch.zeros(batch, n_tokens).long(), torch.zeros(batch, 0).long(), 0)
    args = arguments(at, n_heads, 4, window, None, dtype, seed)
    contract.assert_equals_formula(sparse_attention, reference.sparse_attention, args)


@pytest.mark.parametrize("k", [None, 1])
def test_formula_has_the_gradient_of_its_finite_differences(k):
    q, kv, entries, sink, *rest = arguments(pack([[5, 4]], 4), 2, 3, 3, k, torch.float64)
    assert torch.autograd.gradcheck(lambda *inputs: reference.sparse_attention(*inputs, *rest), (q, kv, entries, sink))


@pytest.mark.parametrize("at", [PACKED, NO_ENTRY, PRUNED])
@pytest.mark.parametrize("k", [None, 2])
def test_opcheck_finds_nothing(at, k):
    opcheck(sparse_attention.default, arguments(at, k=k))


def backward_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    *tensors, scale, window, ratio = contract.detached(args)
    out, lse = sparse_attention(*contract.detached(args))
    return torch.ones_like(out), torch.ones_like(lse), *tensors, out, lse, scale, window, ratio


@pytest.mark.parametrize("at", [PACKED, NO_ENTRY, PRUNED])
def test_opcheck_finds_nothing_in_the_backward(at):
    opcheck(backward.default, backward_arguments(arguments(at)))


@pytest.mark.parametrize("at", [one_document(2, 7, 4), PACKED, NO_ENTRY, one_document(2, 3, 4), one_document(1, 1, 4)])
@pytest.mark.parametrize("k", [None, 1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(at, k, dtype):
    args = arguments(at, k=k, dtype=dtype)
    contract.assert_functional(sparse_attention, args)
    contract.assert_functional(backward, backward_arguments(args))


def test_bf16_inputs_are_summed_in_fp32_and_rounded_once():
    args = arguments(dtype=torch.bfloat16)
    out, lse = sparse_attention(*args)
    wide_out, wide_lse = sparse_attention(*(a.float() for a in args[:4]), *args[4:])
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, wide_out.bfloat16()) and torch.equal(lse, wide_lse)


@pytest.mark.parametrize("at", [PACKED, PRUNED])
@pytest.mark.parametrize("k", [None, 2])
def test_inputs_of_any_strides(at, k):
    contract.assert_takes_any_strides(sparse_attention, arguments(at, k=k))


@pytest.mark.parametrize("at", [PACKED, PRUNED])
@pytest.mark.parametrize("k", [None, 2])
def test_incoming_gradients_of_any_strides(at, k):
    contract.assert_takes_any_gradient(sparse_attention, arguments(at, k=k))


@pytest.mark.parametrize("at", [one_document(2, 36, 4), PRUNED])
@pytest.mark.parametrize("k", [None, 2])
def test_same_bits_twice(at, k):
    contract.assert_deterministic(sparse_attention, arguments(at, 128, k=k))


@pytest.mark.parametrize("at", [PACKED, PRUNED])
@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_row_spoils_no_other(at, poisoned, value):
    contract.assert_rows_stay_apart(sparse_attention, arguments(at), poisoned, value)


def test_one_bad_query_spoils_no_other():
    args = arguments()
    bad = args[0].detach().clone()
    bad[0, 8] = float("nan")
    others = torch.arange(18) != 8
    for a, b in zip(sparse_attention(bad, *args[1:]), sparse_attention(*args), strict=True):
        assert torch.equal(a[0, others], b[0, others])


def test_weights_and_sink_share_all_of_the_mass():
    """Invariant 9: with values of 1, the output is the sum of the weights, 1 - e^(sink - lse)."""
    q, kv, entries, sink, *rest = arguments(dtype=torch.float64)
    kv, entries = (torch.cat((x.detach(), torch.ones_like(x[..., :1])), -1) for x in (kv, entries))
    out, lse = sparse_attention(torch.cat((q, torch.zeros_like(q[..., :1])), -1), kv, entries, sink, *rest)
    assert contract.relative_error(out[..., -1], 1 - torch.exp(sink - lse)) < 1e-12


def test_a_sink_of_minus_infinity_is_the_plain_softmax():
    q, kv, entries, sink, *rest = arguments(dtype=torch.float64)
    out, lse = sparse_attention(q, kv, entries, torch.full_like(sink, float("-inf")), *rest)
    far, far_lse = sparse_attention(q, kv, entries, torch.full_like(sink, -1e30), *rest)
    assert torch.equal(out, far) and torch.equal(lse, far_lse)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum() + lse.sum(), (q, kv, entries)))


def test_an_unselected_entry_gets_no_gradient():
    args = arguments(one_document(1, 36, 4), k=1)
    (dentries,) = torch.autograd.grad(sparse_attention(*args)[0].sum(), args[2])
    unselected = torch.tensor([p not in args[6] for p in range(9)])
    assert unselected.any() and not dentries[0, unselected].any() and dentries[0, ~unselected].any()
