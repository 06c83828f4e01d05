"""``dsv4::hc_post_pre`` and its backward: the streams after one block and before the next, in one pass each way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from dsv4c.ops.reference import hc_post_pre as formula
from tests.ops import contract
from tests.ops.cases import SEARCH, dtypes, incoming, normal, seeds, transposed

hc_post_pre, backward = torch.ops.dsv4.hc_post_pre, torch.ops.dsv4.hc_post_pre_backward
EPS = 1e-6
BATCHES = [(2, 7), (1, 1), (3,), (2, 0), (37,)]
STORED = [torch.float32, torch.bfloat16, torch.float64]
ADDED = pytest.mark.parametrize("added", [True, False])
SHARED = (4, 5, 6)  # fn, base and scale, which no token owns


def arguments(
    batch: tuple[int, ...] = (2, 7), n: int = 4, width: int = 6, iters: int = 20, dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    y, streams = normal(seed, dtype, (*batch, width), (*batch, n, width))
    post, comb = normal(seed + 1, wide, (*batch, n), (*batch, n, n))
    fn, base, scale = normal(seed + 2, wide, ((2 + n) * n, n * width), ((2 + n) * n,), (3,))
    return y, streams, post, comb, fn, base, scale, iters, EPS, EPS


def two_operators(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """What the operator stands for."""
    new_streams = torch.ops.dsv4.hc_post(y, streams, post, comb)
    return (new_streams, *torch.ops.dsv4.hc_pre(new_streams, *rest))


def backward_arguments(args: tuple[Any, ...], added: bool = True) -> tuple[Any, ...]:
    args = contract.detached(args)
    outputs = hc_post_pre(*args)
    grads = contract.cotangents(outputs)[:4]
    return (*(grads if added else (None, *grads[1:])), *args[:4], outputs[0], *args[4:7], *outputs[4:], *args[7:9])


def two_gradients(args: tuple[Any, ...], grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """The gradients that autograd gives the two operators."""
    outputs = two_operators(*args)
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=False) if g is not None]
    return torch.autograd.grad([o for o, _ in pairs], args[:7], [g for _, g in pairs])


def assert_close(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], limit: float) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    contract.assert_same_gradients(ours, expected, limit)


batches, widths = st.lists(st.integers(1, 6), max_size=2), st.integers(1, 40)


@pytest.mark.parametrize("expected", [two_operators, formula])
@given(batches, st.integers(1, 5), widths, st.integers(1, 21), dtypes, seeds)
@SEARCH
def test_operator_equals_what_it_stands_for(expected, batch, n, width, iters, dtype, seed):
    args = contract.detached(arguments(tuple(batch), n, width, iters, dtype, seed))
    for a, b in zip(hc_post_pre(*args), expected(*args), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert contract.relative_error(a, b) <= contract.FORWARD[dtype]


@ADDED
@given(batches, st.integers(1, 5), widths, st.integers(1, 21), dtypes, seeds)
@SEARCH
def test_backward_equals_the_gradients_of_what_it_stands_for(added, batch, n, width, iters, dtype, seed):
    args = arguments(tuple(batch), n, width, iters, dtype, seed)
    taken = backward_arguments(args, added)
    assert_close(backward(*taken), two_gradients(args, taken[:4]), contract.GRADIENT[dtype])


@ADDED
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", STORED)
def test_few_tokens_and_many(batch, dtype, added):
    args = arguments(batch, width=70, dtype=dtype)
    taken = backward_arguments(args, added)
    limit = contract.GRADIENT.get(dtype, 2**-8)
    assert_close(hc_post_pre(*contract.detached(args)), contract.detached(two_operators(*args)), limit)
    assert_close(backward(*taken), two_gradients(args, taken[:4]), limit)


def test_tokens_of_more_than_one_thread():
    args = arguments((600,), width=512)
    taken = backward_arguments(args)
    assert_close(hc_post_pre(*contract.detached(args)), contract.detached(two_operators(*args)), 1e-6)
    assert_close(backward(*taken), two_gradients(args, taken[:4]), 1e-5)


def test_bf16_streams_are_rounded_where_the_two_operators_round_them():
    """New streams bit for bit; backward both terms of their gradient, and the sum: all that follows has the same bits."""
    args = arguments((9,), width=64, dtype=torch.bfloat16)
    assert torch.equal(hc_post_pre(*contract.detached(args))[0], two_operators(*args)[0])
    taken = backward_arguments(args)
    ours, expected = backward(*taken), two_gradients(args, taken[:4])
    for a, b in zip(ours[:4], expected[:4], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", STORED)
def test_opcheck_finds_nothing(dtype):
    args = contract.detached(arguments(dtype=dtype))
    opcheck(hc_post_pre.default, args)
    for added in (True, False):
        opcheck(backward.default, backward_arguments(args, added))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", STORED)
def test_outputs_are_new_contiguous_and_as_the_fake_says(batch, dtype):
    args = contract.detached(arguments(batch, dtype=dtype))
    contract.assert_functional(hc_post_pre, args)
    for added in (True, False):
        contract.assert_functional(backward, backward_arguments(args, added))


def test_inputs_of_any_strides():
    args = contract.detached(arguments())
    contract.assert_takes_any_strides(hc_post_pre, args)
    taken = backward_arguments(args)
    loose = [transposed(a) if isinstance(a, Tensor) else a for a in taken]
    assert_close(backward(*loose), backward(*taken), 1e-6)


@pytest.mark.parametrize("kind", ["of stride 0", "expanded", "transposed"])
def test_incoming_gradients_of_any_strides(kind):
    taken = backward_arguments(arguments())
    loose = [incoming(g.shape, g.dtype)[kind] for g in taken[:4]]
    tight = [g.contiguous() for g in loose]
    assert_close(backward(*loose, *taken[4:]), backward(*tight, *taken[4:]), 1e-6)


def test_same_bits_twice():
    args = contract.detached(arguments((600,), width=64))
    contract.assert_deterministic(hc_post_pre, args)
    contract.assert_deterministic(backward, backward_arguments(args))


@pytest.mark.parametrize("poisoned", range(4))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_token_spoils_no_other(poisoned, value):
    args = [*contract.detached(arguments((21,)))]
    bad = args[poisoned].clone()
    bad[5] = value
    others = torch.arange(21) != 5
    spoilt = hc_post_pre(*args[:poisoned], bad, *args[poisoned + 1 :])
    for a, b in zip(spoilt, hc_post_pre(*args), strict=True):
        assert torch.equal(a[others], b[others])


@pytest.mark.parametrize("poisoned", range(9))
def test_one_bad_token_spoils_the_gradient_of_no_other(poisoned):
    taken = [*backward_arguments(arguments((21,)))]
    bad = taken[poisoned].clone()
    bad[5] = float("nan")
    others = torch.arange(21) != 5
    spoilt = backward(*taken[:poisoned], bad, *taken[poisoned + 1 :])
    for i, (a, b) in enumerate(zip(spoilt, backward(*taken), strict=True)):
        assert i in SHARED or torch.equal(a[others], b[others])


def test_autocast_changes_nothing():
    args = contract.detached(arguments())
    taken = backward_arguments(args)
    with torch.autocast("cpu", torch.bfloat16):
        inside = (*hc_post_pre(*args), *backward(*taken))
    assert all(torch.equal(a, b) for a, b in zip(inside, (*hc_post_pre(*args), *backward(*taken)), strict=True))
