"""The Triton kernel of ``dsv4::rope``: interpreted against the formula, compiled, instructions and bytes."""

from __future__ import annotations

import pytest
import torch

from dsv4c.ops.reference.rope import rope as formula
from dsv4c.ops.triton import rope as kernels
from dsv4c.ops.triton.compiled import TARGETS, Compiled, compile_for, report, wave_instructions
from tests.ops import contract
from tests.ops.cases import transposed
from tests.ops.test_rope import arguments

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # the interpreter cuts bf16 off where the hardware rounds
SHAPES = [(2, 7, 3, 12, 8), (2, 7, None, 12, 8), (1, 1, 1, 4, 4), (1, 3, 64, 20, 6), (3, 5, 32, 96, 64), (2, 0, 3, 12, 8)]
ROWS, HEADS, WIDTH, ROTARY = 4096 * 64, 64, 512, 64


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_kernel_equals_the_formula(shape, inverse, dtype):
    x, cos, sin, _ = contract.detached(arguments(*shape, dtype=dtype))
    ours, expected = kernels.rope(x, cos, sin, inverse), formula(x, cos, sin, inverse)
    assert (ours.shape, ours.dtype) == (expected.shape, dtype)
    assert contract.relative_error(ours, expected) < ROUNDING[dtype]
    assert torch.equal(ours[..., : -shape[-1]], x[..., : -shape[-1]])


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
def test_in_place_turns_what_is_given_up(shape):
    x, cos, sin, inverse = contract.detached(arguments(*shape))
    given = x.clone()
    assert kernels.rope_in_place(given, cos, sin, inverse) is given
    assert torch.equal(given, kernels.rope(x, cos, sin, inverse))


@pytest.mark.interpret
def test_inputs_of_any_strides():
    x, cos, sin, inverse = contract.detached(arguments())
    ours = kernels.rope(transposed(x), transposed(cos), transposed(sin), inverse)
    assert torch.equal(ours, kernels.rope(x, cos, sin, inverse))


@pytest.mark.interpret
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_token_spoils_no_other(value):
    x, cos, sin, inverse = contract.detached(arguments())
    bad = x.clone()
    bad[0, 3] = value
    others = torch.arange(7) != 3
    ours, good = kernels.rope(bad, cos, sin, inverse), kernels.rope(x, cos, sin, inverse)
    assert torch.equal(ours[0, others], good[0, others]) and torch.equal(ours[1], good[1])


def compiled(target: str, copy: bool) -> Compiled:
    signature = {"x_ptr": "*bf16", "out_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "n_rows": "i32"}
    constexprs = kernels.constants(HEADS, WIDTH, ROTARY, True, copy)
    return compile_for(kernels._rope_kernel, signature, constexprs, target=target, num_warps=1, divisible=("n_rows",))


@pytest.mark.parametrize("copy", [False, True], ids=["in place", "copy"])
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_fits_the_gpu_at_flash_widths(target, copy):
    c = compiled(target, copy)
    report([c])
    assert c.vgpr_spill == c.sgpr_spill == c.scratch == c.lds == 0
    narrow = [n for n in c.instructions if n.startswith("global") and not n.endswith("x4")]
    assert not narrow and "barrier" not in c.instructions


@pytest.mark.parametrize(("target", "limit"), [("gfx942", 3.5e6), ("gfx950", 1.8e6)])
def test_instructions_of_the_whole_tensor_in_place(target, limit):
    """Bar of performance.md, section 5c."""
    block = kernels.constants(HEADS, WIDTH, ROTARY, True, False)["BLOCK_R"]
    issued = wave_instructions(compiled(target, copy=False), ROWS // block)
    print(f"\nrope in place on {target}: {issued / 1e6:.2f}M wave instructions")
    assert issued <= limit


@pytest.mark.parametrize(("copy", "floor"), [(False, 68.2e6), (True, 537.9e6)], ids=["in place", "copy"])
def test_bytes_moved_at_flash_widths(copy, floor):
    """Floors 1b and 1a of performance.md."""
    moved = kernels.bytes_moved(ROWS, HEADS, WIDTH, ROTARY, copy=copy)
    print(f"\nrope: {moved / 1e6:.1f} MB, {moved / floor:.3f} of the floor")
    assert moved <= 1.10 * floor
