"""The Triton kernels of ``dsv4::indexer_select``: interpreted against the formula, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c.ops import reference
from dsv4c.ops.triton import indexer_topk as kernels
from dsv4c.ops.triton import indexer_topk_backward as backward
from tests.ops import contract
from tests.ops.cases import one_document, pack, transposed
from tests.ops.test_indexer_select import arguments
from tests.ops.test_indexer_topk import by_entry

PLACES = {
    "documents": pack([[3, 6], [9]], 2),
    "no entry": one_document(2, 3, 4),
    "one token": one_document(1, 1, 4),
}
EVERYWHERE = pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)


def gradients(args: tuple[Any, ...], grad: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    q, k, w, cos, sin, _, _, temperature, _, ratio = args
    return backward.indexer_select_backward(grad, ids, q, k, w, cos, sin, temperature, ratio)


def assert_equals_formula(args: tuple[Any, ...], limit: float = 1e-5) -> None:
    """In fp32 arithmetic on the same values; the gradients are of the formula's choice."""
    inputs = [a.detach().float().requires_grad_() for a in args[:3]]
    (ids, scores), (chosen, expected) = kernels.indexer_select(*args), reference.indexer_select(*inputs, *args[3:])
    assert ids.dtype == torch.int64 and torch.equal(ids < 0, chosen < 0)
    n_entries = args[1].shape[1]
    ours, theirs = by_entry(ids, scores, n_entries), by_entry(chosen, expected.detach(), n_entries)
    assert contract.relative_error(ours, theirs) < limit
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    theirs = torch.autograd.grad(expected, inputs, grad.masked_fill(chosen < 0, 0.0))
    grad = grad.masked_fill(chosen < 0, float("nan"))  # where nothing was selected, the gradient is not to be looked at
    contract.assert_same_gradients(gradients(args, grad, chosen), theirs, limit)


@pytest.mark.interpret
@EVERYWHERE
@pytest.mark.parametrize("topk", [1, 9])
def test_kernels_equal_the_formula(at, topk):
    assert_equals_formula(contract.detached(arguments(at, topk=topk)))


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("n_tokens", "n_heads", "width", "rotary"), [(6, 80, 24, 24), (5, 1, 160, 8), (5, 3, 160, 80), (9, 16, 128, 64)]
)
def test_more_than_one_tile_of_heads_and_of_channels_that_turn(n_tokens, n_heads, width, rotary):
    assert_equals_formula(contract.detached(arguments(one_document(1, n_tokens, 1), n_heads, width, 4, rotary=rotary)))


@pytest.mark.interpret
def test_bf16_inputs():
    """Every entry is selected, since the rotated queries enter the products as bf16, which is truncated here."""
    assert_equals_formula(contract.detached(arguments(PLACES["documents"], topk=9, dtype=torch.bfloat16)), 2**-6)


@pytest.mark.interpret
def test_inputs_and_gradients_of_any_strides_and_the_same_bits_twice():
    args = contract.detached(arguments(PLACES["documents"]))
    other = tuple(transposed(a) if isinstance(a, Tensor) else a for a in args)
    ids, scores = kernels.indexer_select(*args)
    for a, b in zip(kernels.indexer_select(*other), (ids, scores), strict=True):
        assert torch.equal(a, b)
    loose = torch.full((), 0.75).expand(scores.shape)
    expected = gradients(args, loose.contiguous(), ids)
    for ours in (gradients(args, loose, ids), gradients(other, loose, transposed(ids))):
        assert all(a.is_contiguous() and torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("poisoned", [0, 2, 3, 4])
def test_one_bad_token_spoils_no_other(poisoned):
    args = contract.detached(arguments(one_document(1, 10, 4)))
    spoilt = [a.clone() if isinstance(a, Tensor) else a for a in args]
    spoilt[poisoned][0, 8] = float("nan")
    others = torch.arange(10) != 8
    ours, good = kernels.indexer_select(*spoilt), kernels.indexer_select(*args)
    assert all(torch.equal(a[0, others], b[0, others]) for a, b in zip(ours, good, strict=True))
