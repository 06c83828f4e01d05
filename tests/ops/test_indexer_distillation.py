"""``dsv4::indexer_distillation``: teacher, loss and gradient of the indexer in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4c.ops import reference
from dsv4c.ops.indexer_distillation import plain
from tests.ops import contract, test_indexer_kl_target
from tests.ops.cases import SEARCH, Packed, dtypes, heads, normal, one_document, pack, packed, seeds

indexer_distillation = torch.ops.dsv4.indexer_distillation
PACKED = pack([[7, 11], [18]], 4)
PLACES = [PACKED, one_document(2, 3, 4), one_document(1, 1, 4), one_document(1, 4, 4)]
BOTH = pytest.mark.parametrize("joint", [True, False])


def arguments(
    at: Packed = PACKED, n_heads: int = 3, width: int = 8, k: int = 2, dtype: torch.dtype = torch.float32,
    joint: bool = True, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Scores of every slot that has an entry; some queries are padding."""
    q, entries, ids, lse, scale, ratio = test_indexer_kl_target.arguments(at, n_heads, width, k, dtype, joint, seed)
    (scores,) = normal(seed + 1, torch.float64 if dtype == torch.float64 else torch.float32, ids.shape, trains=False)
    real = torch.rand(ids.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.8
    return q, entries, ids, lse, (3 * scores).masked_fill(ids < 0, float("-inf")), real, scale, ratio


def two_operators(
    q: Tensor, entries: Tensor, ids: Tensor, lse: Tensor | None, scores: Tensor, real: Tensor, scale: float, ratio: int
) -> tuple[Tensor, Tensor]:
    """What the operator stands for."""
    return torch.ops.dsv4.indexer_kl(torch.ops.dsv4.indexer_kl_target(q, entries, ids, lse, scale, ratio), scores, real)


def assert_equal(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], limit: float) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert contract.relative_error(a, b) <= limit


@pytest.mark.parametrize("formula", [two_operators, reference.indexer_distillation])
@given(packed(), heads, st.sampled_from((1, 8)), st.integers(1, 12), dtypes, st.booleans(), seeds)
@SEARCH
def test_operator_equals_what_it_stands_for(formula, at, n_heads, width, k, dtype, joint, seed):
    args = arguments(at, n_heads, width, k, dtype, joint, seed)
    assert_equal(indexer_distillation(*args), formula(*args), contract.FORWARD[dtype])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_output_is_the_gradient_that_autograd_gives_the_two_operators(joint, dtype):
    args = [*arguments(one_document(2, 36, 4), k=7, joint=joint, dtype=dtype)]
    dscores = indexer_distillation(*args)[1]
    args[4].requires_grad_()
    (expected,) = torch.autograd.grad(two_operators(*args)[0], args[4])
    assert contract.relative_error(dscores, expected) <= contract.GRADIENT[dtype]


@BOTH
@pytest.mark.parametrize("at", PLACES)
def test_few_tokens_and_few_entries(at, joint):
    args = arguments(at, k=9, joint=joint)
    assert_equal(indexer_distillation(*args), two_operators(*args), 1e-6)


def test_no_query_and_no_slot():
    q, entries, ids, lse, scores, real, *rest = arguments()
    none = slice(0, 0)
    for args in (
        (q[:, none], entries, ids[:, none], lse[:, none], scores[:, none], real[:, none], *rest),
        (q, entries[:, none], ids[..., none], lse, scores[..., none], real, *rest),
    ):
        loss, dscores = indexer_distillation(*args)
        assert loss == 0 and dscores.shape == args[4].shape


@BOTH
@pytest.mark.parametrize("at", PLACES[:2])
def test_opcheck_finds_nothing(at, joint):
    opcheck(indexer_distillation.default, arguments(at, joint=joint))


@BOTH
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(at, joint, dtype):
    contract.assert_functional(indexer_distillation, arguments(at, k=9, joint=joint, dtype=dtype))


@BOTH
def test_inputs_of_any_strides(joint):
    contract.assert_takes_any_strides(indexer_distillation, arguments(joint=joint))


@BOTH
def test_expanded_inputs(joint):
    q, entries, ids, lse, scores, real, *rest = arguments(one_document(1, 18, 4), joint=joint)
    q, scores, real = q[:, :, :1].expand(3, -1, 4, -1), scores.expand(3, -1, -1), real.expand(3, -1)
    lse = None if lse is None else lse[:, :, :1].expand(3, -1, 4)
    args = q, entries.expand(3, -1, -1), ids.expand(3, -1, -1), lse, scores, real
    tight = [None if a is None else a.contiguous() for a in args]
    assert_equal(indexer_distillation(*args, *rest), indexer_distillation(*tight, *rest), 1e-6)


@BOTH
def test_same_bits_twice(joint):
    contract.assert_deterministic(indexer_distillation, arguments(one_document(2, 36, 4), 128, k=9, joint=joint))


@pytest.mark.parametrize("poisoned", [0, 1, 3, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_row_spoils_the_gradient_of_no_other(poisoned, value):
    args = arguments()
    bad = args[poisoned].clone()
    bad[0] = value
    spoilt = (*args[:poisoned], bad, *args[poisoned + 1 :])
    assert torch.equal(indexer_distillation(*spoilt)[1][1:], indexer_distillation(*args)[1][1:])


def test_one_bad_query_is_seen_and_spoils_the_gradient_of_no_other():
    q, *rest = arguments()
    rest[4] = torch.ones_like(rest[4])
    bad = q.clone()
    bad[0, 10] = float("nan")
    others = torch.arange(18) != 10
    loss, dscores = indexer_distillation(bad, *rest)
    assert torch.equal(dscores[0, others], indexer_distillation(q, *rest)[1][0, others])
    assert loss.isnan() and dscores[0, 10].isnan().any()


def test_autocast_changes_nothing():
    args = arguments()
    with torch.autocast("cpu", torch.bfloat16):
        inside = indexer_distillation(*args)
    assert all(torch.equal(a, b) for a, b in zip(inside, indexer_distillation(*args), strict=True))


class _Made(TorchDispatchMode):
    """How many tensors of this shape operations make anew."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += isinstance(result, Tensor) and result.shape == self.shape and not func.is_view
        return result


def test_no_teacher_of_all_queries_is_made():
    """What is made of the size of the scores is their gradient alone."""
    args = arguments(one_document(1, 1024, 4), k=200)
    with _Made(args[4].shape) as made:
        ours = plain(*args)
    assert made.count == 1
    assert_equal(ours, two_operators(*args), 1e-6)
