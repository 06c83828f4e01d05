"""The Triton kernels of ``dsv4::compress``: interpreted against the formula, compiled, bytes."""

from __future__ import annotations

import pytest
import torch

from dsv4c.ops.reference.compress import compress as formula
from dsv4c.ops.triton import compress as kernels
from dsv4c.ops.triton.compiled import TARGETS, compile_for, report
from tests.ops import contract
from tests.ops.cases import one_document, pack, transposed
from tests.ops.test_compress import PLACES, arguments

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # the interpreter cuts bf16 off where the hardware rounds
MANY = [*PLACES, one_document(3, 97, 4), pack([[33, 7]], 8)]


@pytest.mark.interpret
@pytest.mark.parametrize("at", MANY)
@pytest.mark.parametrize("overlap", [True, False])
def test_kernels_equal_the_formula(at, overlap):
    assert_equals_the_formula(arguments(at, overlap=overlap))


@pytest.mark.interpret
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_blocks_of_channels_and_bf16(overlap, dtype):
    assert_equals_the_formula(arguments(pack([[6, 5]], 4), 300, overlap, dtype))


def assert_equals_the_formula(args):
    overlap = args[-1]
    output = formula(*args)
    ours = kernels.compress(*contract.detached(args))
    assert (ours.shape, ours.dtype) == (output.shape, torch.float32)
    assert contract.relative_error(ours, output) < 1e-5
    grads = contract.cotangents((output,))
    expected = contract.gradients(formula, args, grads)
    *tensors, _ = contract.detached(args)
    ours = kernels.compress_backward(grads[0], *tensors, output.detach(), overlap)
    for a, b in zip(ours, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert contract.relative_error(a, b) < ROUNDING[a.dtype]


@pytest.mark.interpret
def test_inputs_of_any_strides():
    *tensors, overlap = contract.detached(arguments())
    other = [transposed(t) for t in tensors]
    assert torch.equal(kernels.compress(*other, overlap), kernels.compress(*tensors, overlap))


@pytest.mark.interpret
def test_a_bad_token_before_a_document_does_not_enter_its_first_entry():
    args = contract.detached(arguments(pack([[8, 10]], 4)))
    bad = [t.clone() for t in args[:2]]
    bad[0][0, :8] = bad[1][0, :8] = float("nan")
    ours = kernels.compress(*bad, *args[2:])
    assert torch.equal(ours[0, 2:], kernels.compress(*args)[0, 2:]) and ours[0, :2].isnan().any()


def test_longer_windows_are_left_to_plain_torch():
    args = contract.detached(arguments(one_document(1, 300, 130), overlap=False))
    assert not kernels.fits(*args[:3])
    assert contract.relative_error(kernels.compress(*args), formula(*args)) < 1e-6


SIGNATURE = {"end_ptr": "*i64", "previous_ptr": "*i1", "n_tokens": "i32", "n_entries": "i32", "width": "i32"}
SIGNATURE |= dict.fromkeys(("value_ptr", "logit_ptr", "ape_ptr", "out_ptr"), "*fp32")
BACKWARD = {"n_all": "i32", "entries_each": "i32"}
BACKWARD |= dict.fromkeys(("grad_ptr", "dvalue_ptr", "dlogit_ptr", "part_ptr"), "*fp32")


@pytest.mark.parametrize(("ratio", "width", "overlap"), [(4, 1024, True), (128, 512, False), (4, 256, True)])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit_the_gpu_at_flash_widths(target, backward, ratio, width, overlap):
    kernel, signature = kernels._forward_kernel, SIGNATURE
    if backward:
        kernel, signature = kernels._backward_kernel, SIGNATURE | BACKWARD
    divisible = [n for n, kind in signature.items() if kind == "i32"]
    constexprs = kernels.constants(ratio, width, overlap)
    c = compile_for(kernel, signature, constexprs, target=target, num_warps=4, divisible=divisible)
    report([c])
    assert c.vgpr_spill == c.scratch == 0 and c.lds <= TARGETS[target].lds


@pytest.mark.parametrize(("ratio", "width", "overlap"), [(4, 1024, True), (128, 512, False), (4, 256, True)])
def test_every_slot_is_moved_once(ratio, width, overlap):
    moved = kernels.bytes_moved(4096, ratio, width, overlap)
    print(f"\ncompress m={ratio} width={width}: {moved}")
    assert moved["forward"] <= 1.2 * 2 * 4096 * width * 4  # values and logits in; entries out
