"""``dsv4::indexer_kl_target``: what the indexer is taught. A constant: it has no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from dsv4c.ops import reference
from tests.ops import contract
from tests.ops.cases import SEARCH, Packed, dtypes, heads, normal, one_document, pack, packed, seeds
from tests.ops.test_sparse_attention import choice

indexer_kl_target = torch.ops.dsv4.indexer_kl_target
PACKED = pack([[7, 11], [18]], 4)
NO_ENTRY = one_document(2, 3, 4)


def arguments(
    at: Packed = PACKED, n_heads: int = 3, width: int = 8, k: int = 2, dtype: torch.dtype = torch.float32,
    joint: bool = True, seed: int = 0, trains: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """``joint``: with the log-sum-exp of an attention over window, entries and sink (target B), else target A."""
    (batch, n_tokens), n_entries = at.start.shape, at.entry_end.shape[1]
    shapes = (batch, n_tokens, n_heads, width), (batch, n_entries, width), (batch, n_tokens, width), (n_heads,)
    q, entries, kv, sink = normal(seed, dtype, *shapes, trains=trains)
    ids, scale = choice(at, k, seed), width**-0.5
    lse = None
    if joint:
        rest = (sink, at.start, at.entry_end, ids, scale, 5, at.ratio)
        _, lse = reference.sparse_attention(q, kv, entries, *rest)
    return q, entries, ids, lse, scale, at.ratio


@given(packed(), heads, st.sampled_from((1, 8)), st.integers(1, 12), dtypes, st.booleans(), seeds)
@SEARCH
def test_operator_equals_its_formula(at, n_heads, width, k, dtype, joint, seed):
    args = arguments(at, n_heads, width, k, dtype, joint, seed)
    ours, expected = indexer_kl_target(*args), reference.indexer_kl_target(*args)
    assert contract.relative_error(ours, expected) <= contract.FORWARD[dtype]


@given(packed(), st.integers(1, 12), st.booleans(), seeds)
@SEARCH
def test_rows_sum_to_one_and_rows_without_entries_are_zero(at, k, joint, seed):
    args = arguments(at, k=k, joint=joint, seed=seed)
    target, has_entry = indexer_kl_target(*args), (args[2] >= 0).any(-1)
    assert not target[~has_entry].any() and not target[args[2] < 0].any()
    assert (target.sum(-1)[has_entry] - 1).abs().max() < 1e-6 if has_entry.any() else True


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("at", [PACKED, NO_ENTRY])
@pytest.mark.parametrize("trains", [True, False])
def test_opcheck_finds_nothing(at, joint, trains):
    opcheck(indexer_kl_target.default, arguments(at, joint=joint, trains=trains))


@pytest.mark.parametrize("formula", [indexer_kl_target, reference.indexer_kl_target])
@pytest.mark.parametrize("joint", [True, False])
def test_the_teacher_is_a_constant_of_what_it_is_made_of(formula, joint):
    """No gradient is cut in silence where one was wanted: a loss of the teacher alone cannot be differentiated."""
    target = formula(*arguments(joint=joint, trains=True))
    assert not target.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        target.sum().backward()


@pytest.mark.parametrize("at", [one_document(2, 7, 4), PACKED, NO_ENTRY, one_document(1, 1, 4), one_document(1, 4, 4)])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(at, joint, dtype):
    contract.assert_functional(indexer_kl_target, arguments(at, k=9, joint=joint, dtype=dtype))


@pytest.mark.parametrize("joint", [True, False])
def test_inputs_of_any_strides(joint):
    contract.assert_takes_any_strides(indexer_kl_target, arguments(joint=joint))


@pytest.mark.parametrize("joint", [True, False])
def test_same_bits_twice(joint):
    contract.assert_deterministic(indexer_kl_target, arguments(one_document(2, 36, 4), 128, joint=joint))


@pytest.mark.parametrize("poisoned", [0, 1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_row_spoils_no_other(poisoned, value):
    contract.assert_rows_stay_apart(indexer_kl_target, arguments(), poisoned, value)


def test_one_bad_query_spoils_no_other():
    args = arguments()
    bad = args[0].clone()
    bad[0, 8] = float("nan")
    others = torch.arange(18) != 8
    assert torch.equal(indexer_kl_target(bad, *args[1:])[0, others], indexer_kl_target(*args)[0, others])


def test_both_targets_are_one_for_a_single_head():
    """Invariant 23: how much of a head's mass reaches the entries matters only between heads."""
    q, entries, ids, lse, scale, ratio = arguments(n_heads=1, dtype=torch.float64)
    joint, selected = (indexer_kl_target(q, entries, ids, x, scale, ratio) for x in (lse, None))
    assert contract.relative_error(joint, selected) < 1e-12


def test_a_head_that_looks_at_its_window_counts_little_in_the_joint_target_only():
    """Invariant 23: raising one head's window mass lowers its share in target B and leaves target A alone."""
    q, entries, ids, lse, scale, ratio = arguments(n_heads=2, dtype=torch.float64)
    busy = lse.clone()
    busy[..., 0] += 20.0
    joint = indexer_kl_target(q, entries, ids, busy, scale, ratio)
    alone = indexer_kl_target(q[:, :, 1:], entries, ids, lse[..., 1:], scale, ratio)
    assert contract.relative_error(joint, alone) < 1e-7
