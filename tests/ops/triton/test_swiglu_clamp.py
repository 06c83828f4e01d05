"""The Triton kernels of ``dsv4::swiglu_clamp``: interpreted against the formula, compiled, bytes."""

from __future__ import annotations

import pytest
import torch

from dsv4c.ops.reference.swiglu_clamp import swiglu_clamp as formula
from dsv4c.ops.triton import swiglu_clamp as kernels
from dsv4c.ops.triton.compiled import TARGETS, compile_for, report
from tests.ops import contract
from tests.ops.cases import transposed
from tests.ops.test_swiglu_clamp import SHAPES, arguments

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # the interpreter cuts bf16 off where the hardware rounds


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [*SHAPES[:2], (5, 2100)])
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_kernels_equal_the_formula(shape, weighed, limit, dtype):
    args = arguments(*shape, weighed, limit, dtype)
    output = formula(*args)
    ours = kernels.swiglu_clamp(*contract.detached(args))
    assert (ours.shape, ours.dtype) == (output.shape, dtype)
    assert contract.relative_error(ours, output) < ROUNDING[dtype]
    grads = contract.cotangents((output,))
    expected = contract.gradients(formula, args, grads)
    ours = kernels.swiglu_clamp_backward(grads[0], *contract.detached(args))
    for a, b in zip(ours[: len(expected)], expected, strict=True):
        assert contract.relative_error(a, b) < ROUNDING[b.dtype]


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES[2:])
def test_nothing_to_do(shape):
    args = contract.detached(arguments(*shape))
    assert kernels.swiglu_clamp(*args).shape == shape
    dx, dweight = kernels.swiglu_clamp_backward(torch.ones(shape), *args)
    assert dx.shape == args[0].shape and torch.equal(dweight, torch.zeros(shape[0]))


@pytest.mark.interpret
def test_inputs_of_any_strides():
    gate_up, weight, limit = contract.detached(arguments())
    ours = kernels.swiglu_clamp(transposed(gate_up), transposed(weight), limit)
    assert torch.equal(ours, kernels.swiglu_clamp(gate_up, weight, limit))
    grad = torch.rand(7, 6)
    ours = kernels.swiglu_clamp_backward(transposed(grad), transposed(gate_up), transposed(weight), limit)
    expected = kernels.swiglu_clamp_backward(grad, gate_up, weight, limit)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.interpret
def test_one_bad_row_spoils_no_other_and_is_seen():
    gate_up, weight, limit = contract.detached(arguments())
    bad = gate_up.clone()
    bad[2] = float("nan")
    others = torch.arange(7) != 2
    ours, good = kernels.swiglu_clamp(bad, weight, limit), kernels.swiglu_clamp(gate_up, weight, limit)
    assert torch.equal(ours[others], good[others]) and ours[2].isnan().all()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit_the_gpu_at_flash_widths(target, backward):
    signature = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "width": "i32", "limit": "fp32"}
    signature |= {"grad_ptr": "*bf16", "dx_ptr": "*bf16", "dweight_ptr": "*fp32"} if backward else {"out_ptr": "*bf16"}
    kernel = kernels._backward_kernel if backward else kernels._forward_kernel
    c = compile_for(kernel, signature, kernels.constants(2048, 10.0, True), target=target, divisible=("width",))
    report([c])
    assert c.vgpr_spill == c.scratch == 0 and c.lds <= TARGETS[target].lds
    narrow = ("global_load_narrow", "global_store_narrow", "global_load_x1")
    assert not any(n in c.instructions for n in narrow)


def test_every_byte_is_moved_once():
    moved = kernels.bytes_moved(6 * 4096, 2048)
    print(f"\nswiglu_clamp of 4096 tokens with 6 experts each: {moved}")
    assert moved["forward"] <= 1.001 * 6 * 4096 * 2048 * 2 * 3
    assert moved["backward"] <= 1.001 * 6 * 4096 * 2048 * 2 * 5
