"""fp8 and FP4 against explicit tables, and decoding of what was encoded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4c.errors import WeightsError
from dsv4c.weights.quant import (
    decode_fp4,
    decode_fp8,
    encode_fp4,
    encode_fp8,
    fp4_scale_shape,
    fp8_scale_shape,
    scale_values,
)

ONE = torch.tensor([[127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
SIZES = st.tuples(st.integers(1, 300), st.integers(1, 150).map(lambda n: 2 * n))


def e4m3(byte: int) -> float:
    """The value of an OCP e4m3 byte: s.eeee.mmm, bias 7, no infinities, 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def power_of_two_scales(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    codes = torch.randint(100, 150, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return codes.view(torch.float8_e8m0fnu)


def test_every_fp8_byte_decodes_to_its_value() -> None:
    codes = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    values = decode_fp8(codes.view(torch.float8_e4m3fn)[None], torch.ones(1, 2))[0]
    assert values.tolist() == [e4m3(b) for b in codes.tolist()]
    assert values.max() == 448


def test_fp8_is_the_ocp_format_and_saturates_where_it_should() -> None:  # B58
    bytes_ = torch.tensor([[0x38, 0x80]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    one, zero = decode_fp8(bytes_, ONE)[0]
    assert (float(one), float(zero), bool(torch.signbit(zero))) == (1.0, 0.0, True)
    codes, scale = encode_fp8(torch.tensor([[300.0, -1e-12, 448.0]]))
    assert scale_values(scale).item() == 1.0
    assert codes.float().tolist() == [[288.0, 0.0, 448.0]]


def test_every_fp4_code_decodes_to_its_value_low_nibble_first() -> None:
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    decoded = decode_fp4(packed, ONE)[0]
    assert decoded.tolist() == values + [-v for v in values]
    assert bool(torch.signbit(decoded[8]))
    assert torch.equal(decode_fp4(packed.view(torch.int8), ONE), decoded[None])


def test_fp4_rounds_to_nearest_and_ties_to_even() -> None:
    weight = torch.tensor([[0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, -0.75, 6.0, -0.2]])
    expected = [[0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -1.0, 6.0, -0.0]]
    assert decode_fp4(*encode_fp4(weight)).tolist() == expected


def test_a_scale_is_the_smallest_power_of_two_that_holds_the_block() -> None:
    for largest, scale in ((448.0, 1.0), (448.5, 2.0), (224.0, 0.5), (0.0, 1.0)):
        assert scale_values(encode_fp8(torch.tensor([[largest, 0.0]]))[1]).item() == scale
    for largest, scale in ((6.0, 1.0), (6.1, 2.0), (3.0, 0.5), (0.0, 1.0)):
        assert scale_values(encode_fp4(torch.tensor([[largest, 0.0]]))[1]).item() == scale


@given(size=SIZES, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_fp8_element_has_the_scale_of_its_block(size: tuple[int, int], seed: int) -> None:
    torch.manual_seed(seed)
    codes = torch.randn(size).to(torch.float8_e4m3fn)
    scale = torch.rand(fp8_scale_shape(size))
    row, column = seed * 7919 % size[0], seed * 104729 % size[1]
    decoded = decode_fp8(codes, scale)
    assert decoded.shape == size
    for r, c in ((0, 0), (row, column), (size[0] - 1, size[1] - 1)):
        assert decoded[r, c] == codes[r, c].float() * scale[r // 128, c // 128]


@given(size=SIZES, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_fp4_element_has_the_scale_of_its_group(size: tuple[int, int], seed: int) -> None:
    torch.manual_seed(seed)
    packed = torch.randint(0, 256, (size[0], size[1] // 2), dtype=torch.uint8)
    scale = power_of_two_scales(fp4_scale_shape(size), seed)
    ones = torch.full_like(scale.view(torch.uint8), 127)
    decoded = decode_fp4(packed, scale)
    plain = decode_fp4(packed, ones)
    factor = scale.float().repeat_interleave(32, 1)[:, : size[1]]
    assert decoded.shape == size
    assert torch.equal(decoded, plain * factor)


@given(size=SIZES, seed=st.integers(0, 99), kind=st.sampled_from(["fp8", "fp4"]))
@settings(max_examples=40, deadline=None)
def test_encoding_what_was_decoded_changes_no_value(size: tuple[int, int], seed: int, kind: str) -> None:
    torch.manual_seed(seed)
    encode, decode = (encode_fp8, decode_fp8) if kind == "fp8" else (encode_fp4, decode_fp4)
    values = decode(*encode(torch.randn(size) * 10.0 ** (seed % 7 - 3)))
    codes, scale = encode(values)
    again, scale_again = encode(decode(codes, scale))
    assert torch.equal(decode(codes, scale), values)
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(scale.view(torch.uint8), scale_again.view(torch.uint8))
    assert torch.equal(values.bfloat16().float(), values)  # why bf16 is lossless where scales are powers of two


def test_a_scale_that_is_nan_is_refused() -> None:
    bad = torch.tensor([[255]], dtype=torch.uint8)
    with pytest.raises(WeightsError, match="not finite"):
        decode_fp4(torch.zeros(1, 1, dtype=torch.uint8), bad)
    with pytest.raises(WeightsError, match="not finite"):
        encode_fp8(torch.tensor([[float("inf")]]))
    with pytest.raises(WeightsError, match="cannot pack 3 inputs"):
        encode_fp4(torch.ones(1, 3))
