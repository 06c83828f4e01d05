"""The Triton kernels of ``dsv4::sparse_attention_derotated``: interpreted against the formula, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c.ops import reference
from dsv4c.ops.triton import sparse_attention as kernels
from dsv4c.ops.triton import sparse_attention_backward as backward
from tests.ops import contract
from tests.ops.cases import Packed, one_document, pack, transposed
from tests.ops.test_sparse_attention_derotated import arguments

PLACES = {
    "documents": pack([[3, 6], [9]], 2),
    "no entry": Packed(torch.zeros(2, 7).long(), torch.zeros(2, 0).long(), 0),
    "one token": one_document(1, 1, 4),
}
CHOICES = {"every entry": None, "by mask": 2, "by id": 1}
EVERY_CHOICE = pytest.mark.parametrize("k", CHOICES.values(), ids=CHOICES)


def cotangents(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    return torch.randn(args[0].shape, generator=g).to(args[0].dtype), torch.randn(args[0].shape[:3], generator=g)


def gradients(args: tuple[Any, ...], grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
    out, lse = kernels.sparse_attention_derotated(*args)
    return backward.sparse_attention_derotated_backward(grad, grad_lse, *args[:7], out, lse, *args[7:])


def assert_equals_formula(args: tuple[Any, ...], limit: float = 1e-5) -> None:
    """In fp32 arithmetic on the same values."""
    inputs = [a.detach().float().requires_grad_() for a in args[:4]]
    expected = reference.sparse_attention_derotated(*inputs, *args[4:])
    for ours, theirs in zip(kernels.sparse_attention_derotated(*args), expected, strict=True):
        assert contract.relative_error(ours, theirs) < limit
    grad, grad_lse = cotangents(args)
    theirs = torch.autograd.grad(expected, inputs, [grad.float(), grad_lse])
    contract.assert_same_gradients(gradients(args, grad, grad_lse), theirs, limit)


@pytest.mark.interpret
@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
@EVERY_CHOICE
def test_kernels_equal_the_formula(at, k):
    assert_equals_formula(contract.detached(arguments(at, k=k)))


@pytest.mark.interpret
@pytest.mark.parametrize(("width", "rotary"), [(8, 8), (160, 8), (160, 40)])
def test_rotated_channels_that_do_not_fill_a_tile(width, rotary):
    assert_equals_formula(contract.detached(arguments(pack([[3, 7]], 2), 3, width, k=2, rotary=rotary)))


@pytest.mark.interpret
@pytest.mark.parametrize("n_heads", [16, 20])
@EVERY_CHOICE
def test_a_step_of_the_backward_whose_rows_are_of_one_query_and_of_two(n_heads, k):
    assert_equals_formula(contract.detached(arguments(pack([[3, 7]], 2), n_heads, k=k)))


@pytest.mark.interpret
@EVERY_CHOICE
def test_bf16_inputs(k):
    """The weights and the rotated gradient enter the products as bf16, which is truncated here."""
    assert_equals_formula(contract.detached(arguments(PLACES["documents"], k=k, dtype=torch.bfloat16)), 2**-6)


@pytest.mark.interpret
def test_inputs_and_gradients_of_any_strides():
    args = contract.detached(arguments(one_document(2, 9, 4), k=1))
    other = tuple(transposed(a) if isinstance(a, Tensor) else a for a in args)
    loose = torch.full((), 0.75).expand(args[0].shape), torch.full((), 0.5).expand(args[0].shape[:3])
    expected = gradients(args, *(g.contiguous() for g in loose))
    assert all(a.is_contiguous() and torch.equal(a, b) for a, b in zip(gradients(other, *loose), expected, strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("poisoned", [0, 10, 11])
def test_one_bad_token_spoils_no_other(poisoned):
    args = contract.detached(arguments())
    spoilt = [a.clone() if isinstance(a, Tensor) else a for a in args]
    spoilt[poisoned][0, 8] = float("nan")
    others = torch.arange(18) != 8
    ours, good = kernels.sparse_attention_derotated(*spoilt), kernels.sparse_attention_derotated(*args)
    assert all(torch.equal(a[0, others], b[0, others]) and torch.equal(a[1], b[1]) for a, b in zip(ours, good, strict=True))
