"""``dsv4::rope``: the rotation of the last channels, forward and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from dsv4c.ops import reference
from tests.ops import contract
from tests.ops.cases import SEARCH, dtypes, heads, normal, seeds, transposed

rope, rope_ = torch.ops.dsv4.rope, torch.ops.dsv4.rope_


def arguments(
    batch: int = 2, n_tokens: int = 7, n_heads: int | None = 3, width: int = 12, rotary: int = 8,
    dtype: torch.dtype = torch.float32, inverse: bool = False, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """x [B,S,H,c], or [B,S,c] where n_heads is None, and tables at random angles."""
    shape = (batch, n_tokens, width) if n_heads is None else (batch, n_tokens, n_heads, width)
    (x,) = normal(seed, dtype, shape)
    angle = 100 * torch.rand(batch, n_tokens, rotary // 2, generator=torch.Generator().manual_seed(seed))
    return x, angle.cos(), angle.sin(), inverse


@given(
    st.integers(1, 3), st.integers(1, 9), st.none() | heads, st.integers(0, 5), st.integers(1, 4), dtypes,
    st.booleans(), seeds,
)  # fmt: skip
@SEARCH
def test_operator_equals_its_formula(batch, n_tokens, n_heads, plain, pairs, dtype, inverse, seed):
    args = arguments(batch, n_tokens, n_heads, plain + 2 * pairs, 2 * pairs, dtype, inverse, seed)
    contract.assert_equals_formula(rope, reference.rope, args)


@pytest.mark.parametrize("n_heads", [None, 3])
@pytest.mark.parametrize("inverse", [False, True])
def test_formula_has_the_gradient_of_its_finite_differences(n_heads, inverse):
    x, cos, sin, _ = arguments(1, 3, n_heads, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda y: reference.rope(y, cos.double(), sin.double(), inverse), (x,))


@pytest.mark.parametrize("n_heads", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_finds_nothing(n_heads, dtype):
    opcheck(rope.default, arguments(n_heads=n_heads, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(2, 7, 3), (2, 7, None), (2, 0, 3), (1, 1, 1)])
def test_outputs_are_new_contiguous_and_as_the_fake_says(dtype, shape):
    contract.assert_functional(rope, arguments(*shape, dtype=dtype))


def test_whole_width_may_rotate():
    args = arguments(width=8, rotary=8)
    contract.assert_functional(rope, args)
    contract.assert_equals_formula(rope, reference.rope, args)


@pytest.mark.parametrize("n_heads", [None, 3])
def test_inputs_of_any_strides(n_heads):
    contract.assert_takes_any_strides(rope, arguments(n_heads=n_heads))


@pytest.mark.parametrize("n_heads", [None, 3])
def test_incoming_gradients_of_any_strides(n_heads):
    contract.assert_takes_any_gradient(rope, arguments(n_heads=n_heads))


def test_same_bits_twice():
    contract.assert_deterministic(rope, arguments())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_row_spoils_no_other(value):
    contract.assert_rows_stay_apart(rope, arguments(), 0, value)


def test_the_inverse_brings_back_the_input():
    x, cos, sin, _ = arguments(dtype=torch.float64)
    # The tables are rounded to fp32, so that cos^2 + sin^2 is 1 to 1e-7.
    assert contract.relative_error(rope(rope(x, cos, sin, False), cos, sin, True), x) < 2e-7


def test_plain_channels_are_copied_bit_for_bit():
    x, cos, sin, inverse = arguments(dtype=torch.bfloat16)
    assert torch.equal(rope(x, cos, sin, inverse)[..., :4], x[..., :4])


def test_bf16_is_rotated_in_fp32_and_rounded_once():
    x, cos, sin, inverse = arguments(dtype=torch.bfloat16)
    exact = reference.rope(x.detach().double(), cos.double(), sin.double(), inverse)
    assert torch.equal(rope(x, cos, sin, inverse), exact.float().bfloat16())


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of x as views: of other orders of memory, of odd offsets and steps, of half of a larger tensor."""
    wide = torch.cat((x, x), -1)
    odd = torch.cat((x.new_zeros(*x.shape[:-1], 1), x), -1)[..., 1:]
    spaced = x.repeat_interleave(2, -1)[..., ::2]
    return {"dense": x.clone(), "transposed": transposed(x), "half": wide[..., : x.shape[-1]], "odd": odd, "spaced": spaced}


@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 2)))
@pytest.mark.parametrize("n_heads", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("inverse", [False, True])
def test_in_place_is_the_functional_operator(layout, n_heads, dtype, inverse):
    x, cos, sin, _ = contract.detached(arguments(n_heads=n_heads, dtype=dtype))
    expected, y = rope(x, cos, sin, inverse), layouts(x)[layout]
    assert rope_(y, cos, sin, inverse) is None
    assert contract.relative_error(y, expected) <= contract.FORWARD[torch.float32]  # vectors round differently


def test_in_place_touches_nothing_but_the_last_channels():
    x, cos, sin, inverse = contract.detached(arguments(width=12, rotary=8))
    larger = torch.full((2, 7, 3, 20), float("nan"))
    larger[..., 8:16] = x[..., 4:]
    rope_(larger[..., 4:16], cos, sin, inverse)
    assert larger[..., :8].isnan().all() and larger[..., 16:].isnan().all()
    assert torch.equal(larger[..., 8:16], rope(x, cos, sin, inverse)[..., 4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 7, 3), (2, 7, None), (2, 0, 3)])
def test_opcheck_finds_nothing_in_place(shape, dtype):
    opcheck(rope_.default, contract.detached(arguments(*shape, dtype=dtype)))


def test_in_place_tells_autograd_that_x_has_changed():
    x, cos, sin, inverse = contract.detached(arguments())
    w = torch.ones_like(x, requires_grad=True)
    product = w * x
    rope_(x, cos, sin, inverse)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("given", ["leaf", "result"])
def test_in_place_refuses_what_requires_a_gradient(given):
    x, cos, sin, inverse = arguments()
    x = x if given == "leaf" else x * 1
    with pytest.raises(RuntimeError, match="use dsv4::rope, or rope_ on"):
        rope_(x, cos, sin, inverse)


def test_in_place_refuses_it_in_compiled_code_too():
    x, cos, sin, inverse = arguments()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        rope_(y, cos, sin, inverse)
        return y

    with pytest.raises(Exception, match="use dsv4::rope, or rope_ on"):
        step(x)


def test_in_place_in_compiled_code_is_the_functional_operator():
    x, cos, sin, inverse = contract.detached(arguments())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        rope_(y, cos, sin, inverse)
        return y

    assert torch.equal(step(x), rope(x + 1, cos, sin, inverse))
