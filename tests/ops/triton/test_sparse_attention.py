"""The Triton kernels of ``dsv4::sparse_attention``: interpreted against the formula, forward and backward."""

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
from tests.ops.test_sparse_attention import arguments

PLACES = {
    "documents": pack([[7, 6], [13]], 4),
    "no entry": Packed(torch.zeros(2, 7).long(), torch.zeros(2, 0).long(), 0),
    "below the ratio": one_document(2, 3, 4),
    "one token": one_document(1, 1, 4),
    "ragged": pack([[5, 3, 6], [2, 5, 7]], 4),
}
CHOICES = {"every entry": None, "by mask": 2, "by id": 1}
EVERYWHERE = pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
EVERY_CHOICE = pytest.mark.parametrize("k", CHOICES.values(), ids=CHOICES)

MANY_TILES = pytest.mark.parametrize(
    ("n_tokens", "n_heads", "width", "window", "k"), [(20, 80, 24, 18, 10), (37, 1, 160, 1, 17)]
)


def assert_close(ours: Tensor, expected: Tensor, limit: float = 1e-5) -> None:
    assert ours.shape == expected.shape
    assert contract.relative_error(ours, expected) < limit


def assert_within_two_ulps(ours: Tensor, expected: Tensor, of_row: bool = True) -> None:
    """bf16 against fp32, in units of the last place of the largest value of the row, or of all."""
    assert ours.dtype == torch.bfloat16
    largest = (
        expected.abs().amax(-1, keepdim=True) if of_row else expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    )
    ulp = 2.0 ** (largest.log2().floor() - 7)
    assert float(((ours.float() - expected).abs() / ulp).max()) <= 2


def turning(at: Packed, channels: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(*at.start.shape, channels // 2, generator=torch.Generator().manual_seed(3))
    return angle.cos(), angle.sin()


@pytest.mark.interpret
@EVERYWHERE
@EVERY_CHOICE
def test_kernel_equals_the_formula(at, k):
    args = contract.detached(arguments(at, k=k))
    for ours, expected in zip(kernels.sparse_attention(*args), reference.sparse_attention(*args), strict=True):
        assert_close(ours, expected)


@pytest.mark.interpret
def test_more_entries_asked_for_than_there_are():
    args = contract.detached(arguments(pack([[5, 3, 6]], 4), k=9))
    assert_close(kernels.sparse_attention(*args)[0], reference.sparse_attention(*args)[0])
    assert_same_gradients(args)


@pytest.mark.interpret
@MANY_TILES
def test_more_than_one_tile_of_heads_channels_and_keys(n_tokens, n_heads, width, window, k):
    args = contract.detached(arguments(one_document(1, n_tokens, 1), n_heads, width, window, k))
    for ours, expected in zip(kernels.sparse_attention(*args), reference.sparse_attention(*args), strict=True):
        assert_close(ours, expected)


@pytest.mark.interpret
@EVERY_CHOICE
@pytest.mark.parametrize(("width", "channels"), [(8, 4), (160, 64), (24, 24)])
def test_output_turned_back_in_the_same_pass(width, channels, k):
    at = PLACES["documents"]
    args, angles = contract.detached(arguments(at, 3, width, k=k)), turning(at, channels)
    out, lse = kernels.sparse_attention(*args, *angles)
    expected, expected_lse = reference.sparse_attention(*args)
    assert_close(out, reference.rope(expected, *angles, True))
    assert_close(lse, expected_lse)


@pytest.mark.interpret
@EVERY_CHOICE
def test_bf16_within_two_units_of_the_last_place(k):
    q, kv, entries, sink, *rest = contract.detached(arguments(dtype=torch.bfloat16, k=k))
    out, lse = kernels.sparse_attention(q, kv, entries, sink, *rest)
    expected, expected_lse = reference.sparse_attention(q.float(), kv.float(), entries.float(), sink, *rest)
    assert_within_two_ulps(out, expected)
    assert_close(lse, expected_lse)


@pytest.mark.interpret
def test_inputs_of_any_strides():
    args = contract.detached(arguments(k=2))
    other: list[Any] = [transposed(a) if isinstance(a, Tensor) else a for a in args]
    for ours, expected in zip(kernels.sparse_attention(*other), reference.sparse_attention(*args), strict=True):
        assert_close(ours, expected)


@pytest.mark.interpret
def test_a_sink_of_minus_infinity_is_the_plain_softmax():
    q, kv, entries, sink, *rest = contract.detached(arguments(k=2))
    args = (q, kv, entries, torch.full_like(sink, float("-inf")), *rest)
    for ours, expected in zip(kernels.sparse_attention(*args), reference.sparse_attention(*args), strict=True):
        assert_close(ours, expected)


@pytest.mark.interpret
def test_one_bad_query_spoils_no_other():
    args = contract.detached(arguments())
    bad = args[0].clone()
    bad[0, 8] = float("nan")
    others = torch.arange(18) != 8
    for a, b in zip(kernels.sparse_attention(bad, *args[1:]), kernels.sparse_attention(*args), strict=True):
        assert torch.equal(a[0, others], b[0, others]) and torch.equal(a[1], b[1])


def formula_gradients(
    args: tuple[Any, ...], grad: Tensor, grad_lse: Tensor, angles: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    inputs = [a.detach().clone().requires_grad_() for a in args[:4]]
    out, lse = reference.sparse_attention(*inputs, *args[4:])
    if angles:
        out = reference.rope(out, *angles, True)
    return torch.autograd.grad([out, lse], inputs, [grad, grad_lse])


def cotangents(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    return torch.randn(args[0].shape, generator=g), torch.randn(args[0].shape[:3], generator=g)


def assert_same_gradients(args: tuple[Any, ...], angles: tuple[Tensor, ...] = ()) -> None:
    grad, grad_lse = cotangents(args)
    out, lse = kernels.sparse_attention(*args, *angles)
    ours = backward.sparse_attention_backward(grad, grad_lse, *args[:7], out, lse, *args[7:], *angles)
    contract.assert_same_gradients(ours, formula_gradients(args, grad, grad_lse, angles), 1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize("place", ["documents", "no entry", "one token"])
@EVERY_CHOICE
def test_gradients_equal_the_formula_s(place, k):
    assert_same_gradients(contract.detached(arguments(PLACES[place], k=k)))


@pytest.mark.interpret
@MANY_TILES
def test_gradients_over_more_than_one_tile(n_tokens, n_heads, width, window, k):
    assert_same_gradients(contract.detached(arguments(one_document(1, n_tokens, 1), n_heads, width, window, k)))


@pytest.mark.interpret
@EVERY_CHOICE
@pytest.mark.parametrize(("width", "channels"), [(8, 4), (160, 8)])
def test_gradients_of_the_output_turned_back(width, channels, k):
    at = pack([[3, 7]], 2)
    assert_same_gradients(contract.detached(arguments(at, 3, width, k=k)), turning(at, channels))


@pytest.mark.interpret
@EVERY_CHOICE
def test_gradients_of_bf16_inputs(k):
    """Against fp32 arithmetic on the same values: the weights enter the products as bf16, which is truncated here.

    In units of the largest gradient, since the terms of a small one are larger than it is.
    """
    args = contract.detached(arguments(PLACES["documents"], dtype=torch.bfloat16, k=k))
    grad, grad_lse = cotangents(args)
    grad = grad.bfloat16()
    wide = (*(a.float() for a in args[:4]), *args[4:])
    out, lse = reference.sparse_attention(*wide)
    ours = backward.sparse_attention_backward(grad, grad_lse, *args[:7], out.bfloat16(), lse, *args[7:])
    *expected, expected_sink = formula_gradients(wide, grad.float(), grad_lse)
    for a, b in zip(ours[:3], expected, strict=True):
        assert_within_two_ulps(a, b, of_row=False)
    assert ours[3].dtype == torch.float32
    assert contract.relative_error(ours[3], expected_sink) < 2**-7


@pytest.mark.interpret
def test_gradients_have_the_same_bits_twice():
    args = contract.detached(arguments(one_document(1, 9, 4), k=1))
    grad, grad_lse = cotangents(args)
    out, lse = kernels.sparse_attention(*args)
    first, second = (backward.sparse_attention_backward(grad, grad_lse, *args[:7], out, lse, *args[7:]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("at", [one_document(2, 5, 4), Packed(torch.zeros(2, 5).long(), torch.zeros(2, 1).long(), 0)])
def test_gradients_of_inputs_of_any_strides_are_contiguous(at):
    args = contract.detached(arguments(at, k=1))
    grads, outputs = cotangents(args), kernels.sparse_attention(*args)
    other: list[Any] = [transposed(a) if isinstance(a, Tensor) else a for a in args]
    expected = backward.sparse_attention_backward(*grads, *args[:7], *outputs, *args[7:])
    ours = backward.sparse_attention_backward(*grads, *other[:7], *outputs, *other[7:])
    assert all(a.is_contiguous() and torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.interpret
def test_incoming_gradients_of_stride_0():
    args = contract.detached(arguments(one_document(1, 9, 4), k=1))
    out, lse = kernels.sparse_attention(*args)
    loose = torch.ones(()).expand(out.shape), torch.zeros(()).expand(lse.shape)
    ours, expected = (
        backward.sparse_attention_backward(*grads, *args[:7], out, lse, *args[7:])
        for grads in (loose, tuple(g.contiguous() for g in loose))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_bytes_moved_at_flash_widths():
    """Floor of performance.md: 552 MB, in which ids have 4 bytes and there is no selection by bytes."""
    moved = kernels.bytes_moved(1, 4096, 64, 512, 1024, 512, 128)
    print(f"\nsparse_attention: {moved['memory'] / 1e6:.1f} MB, {moved['memory'] / 552e6:.3f} of the floor", moved)
    assert moved["memory"] <= 1.10 * 552e6


def test_bytes_moved_by_the_backward_at_flash_widths():
    """Floor: 1103 MB. q and dO are read again by every tile of 64 keys that they can see: a bound, not a bar."""
    moved = backward.bytes_moved(1, 4096, 64, 512, 1024, 512, 128)
    total = sum(moved.values())
    print(f"\nsparse_attention_backward: {total / 1e6:.1f} MB, {total / 1103e6:.2f} of the floor", moved)
    assert total <= 8 * 1103e6
