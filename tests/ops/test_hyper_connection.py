"""``dsv4::hc_pre`` and ``dsv4::hc_post``: the residual streams before and after a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from dsv4c.ops import hyper_connection as operators
from dsv4c.ops.reference import hyper_connection as formulas
from tests.ops import contract
from tests.ops.cases import SEARCH, dtypes, normal, seeds

hc_pre, hc_post = torch.ops.dsv4.hc_pre, torch.ops.dsv4.hc_post
pre_backward, post_backward = torch.ops.dsv4.hc_pre_backward, torch.ops.dsv4.hc_post_backward
EPS = 1e-6
BATCHES = [(2, 7), (1, 1), (3,), (2, 0)]


def pre_arguments(
    batch: tuple[int, ...] = (2, 7), n: int = 4, width: int = 6, iters: int = 20, dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    parameters = torch.float32 if dtype == torch.bfloat16 else dtype
    (streams,) = normal(seed, dtype, (*batch, n, width))
    fn, base, scale = normal(seed + 1, parameters, ((2 + n) * n, n * width), ((2 + n) * n,), (3,))
    return streams, fn, base, scale, iters, EPS, EPS


def post_arguments(
    batch: tuple[int, ...] = (2, 7), n: int = 4, width: int = 6, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, ...]:
    y, streams = normal(seed, dtype, (*batch, width), (*batch, n, width))
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    return y, streams, *normal(seed + 1, wide, (*batch, n), (*batch, n, n))


ARGUMENTS = {"pre": (hc_pre, formulas.hc_pre, pre_arguments), "post": (hc_post, formulas.hc_post, post_arguments)}
both = pytest.mark.parametrize(("op", "formula", "arguments"), ARGUMENTS.values(), ids=ARGUMENTS)


@given(st.lists(st.integers(1, 5), max_size=2), st.integers(1, 5), st.integers(1, 20), st.integers(1, 21), dtypes, seeds)
@SEARCH
def test_pre_equals_its_formula(batch, n, width, iters, dtype, seed):
    contract.assert_equals_formula(hc_pre, formulas.hc_pre, pre_arguments(tuple(batch), n, width, iters, dtype, seed))


@given(st.lists(st.integers(1, 5), max_size=2), st.integers(1, 5), st.integers(1, 20), dtypes, seeds)
@SEARCH
def test_post_equals_its_formula(batch, n, width, dtype, seed):
    contract.assert_equals_formula(hc_post, formulas.hc_post, post_arguments(tuple(batch), n, width, dtype, seed))


@both
@pytest.mark.parametrize("batch", BATCHES)
def test_empty_and_single_tokens(op, formula, arguments, batch):
    contract.assert_equals_formula(op, formula, arguments(batch))


@both
def test_tokens_of_more_than_one_block(op, formula, arguments):
    contract.assert_equals_formula(op, formula, arguments((150,), width=512))


def test_formula_of_pre_has_the_gradient_of_its_finite_differences():
    *tensors, iters, eps, norm_eps = pre_arguments((3,), 2, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: formulas.hc_pre(*x, iters, eps, norm_eps)[:3], tensors)


def test_formula_of_post_has_the_gradient_of_its_finite_differences():
    assert torch.autograd.gradcheck(formulas.hc_post, post_arguments((3,), 2, 3, torch.float64))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_finds_nothing(op, formula, arguments, dtype):
    opcheck(op.default, arguments(dtype=dtype))


def backward_arguments(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    args = contract.detached(args)
    if op is hc_post:
        return torch.ones_like(args[1]), *args
    u, post, comb, z, rstd = op(*args)
    return torch.ones_like(u), torch.ones_like(post), torch.ones_like(comb), *args[:4], z, rstd, *args[4:6]


BACKWARDS = {hc_pre: pre_backward, hc_post: post_backward}


@both
def test_opcheck_finds_nothing_in_the_backward(op, formula, arguments):
    opcheck(BACKWARDS[op].default, backward_arguments(op, arguments()))


@both
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_new_contiguous_and_as_the_fake_says(op, formula, arguments, batch, dtype):
    args = arguments(batch, dtype=dtype)
    contract.assert_functional(op, args)
    contract.assert_functional(BACKWARDS[op], backward_arguments(op, args))


@both
def test_inputs_of_any_strides(op, formula, arguments):
    contract.assert_takes_any_strides(op, arguments())


@both
def test_incoming_gradients_of_any_strides(op, formula, arguments):
    contract.assert_takes_any_gradient(op, arguments())


@both
def test_same_bits_twice(op, formula, arguments):
    contract.assert_deterministic(op, arguments((150,), width=512))


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_token_spoils_no_other(op, formula, arguments, value):
    contract.assert_rows_stay_apart(op, arguments((5,)), 0, value)


def test_the_first_index_of_comb_is_summed():
    """Invariant 2 and the trap of section 1.2: untransposed, comb passes every test of shapes and sums."""
    y, streams, post, comb = post_arguments((1,), 2, 1, torch.float64)
    x, c = streams[0], comb[0]
    expected = torch.stack([post[0, k] * y[0] + c[0, k] * x[0] + c[1, k] * x[1] for k in (0, 1)])
    assert contract.relative_error(hc_post(y, streams, post, comb)[0], expected) < 1e-12


def test_at_rest_the_gates_are_those_of_a_plain_residual_net():
    """Invariant 1."""
    streams, fn, base, scale, *rest = pre_arguments()
    _, post, comb, _, _ = operators.hc_pre(streams, fn, torch.zeros_like(base), torch.zeros_like(scale), *rest)
    assert (post == 1).all() and (comb - 0.24999976).abs().max() < 1e-7


@both
def test_autocast_changes_nothing(op, formula, arguments):
    args = contract.detached(arguments())
    with torch.autocast("cpu", torch.bfloat16):
        inside = contract.results(op(*args))
    assert all(torch.equal(a, b) for a, b in zip(inside, contract.results(op(*args)), strict=True))


def test_bf16_streams_are_mixed_in_fp32_and_rounded_once():
    y, streams, post, comb = contract.detached(post_arguments(dtype=torch.bfloat16))
    assert torch.equal(hc_post(y, streams, post, comb), hc_post(y.float(), streams.float(), post, comb).bfloat16())
    pre = contract.detached(pre_arguments(dtype=torch.bfloat16))
    narrow, wide = hc_pre(*pre), hc_pre(pre[0].float(), *pre[1:])
    assert torch.equal(narrow[0], wide[0].bfloat16()) and torch.equal(narrow[2], wide[2])
