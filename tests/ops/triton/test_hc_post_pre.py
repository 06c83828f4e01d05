"""The Triton kernels of ``dsv4::hc_post_pre``: interpreted against what they stand for, compiled, bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4c.ops.triton import hc_post_pre as kernels
from dsv4c.ops.triton.compiled import TARGETS, Compiled, compile_for, report
from tests.ops import contract
from tests.ops.cases import transposed
from tests.ops.test_hc_post_pre import SHARED, arguments, backward_arguments, two_gradients, two_operators

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-5}  # the interpreter cuts off where the hardware rounds, here twice
dtypes = pytest.mark.parametrize("dtype", ROUNDING)
BATCHES = [(2, 3), (1, 1), (5,)]
ADDED = pytest.mark.parametrize("added", [True, False])


def in_training(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """With a small fn, as training begins: gates that are not all 0 or 1."""
    *tensors, fn, base, scale, iters, eps, norm_eps = arguments(*args, **kwargs)
    return (*tensors, (0.1 * fn).detach().requires_grad_(), base, scale, iters, eps, norm_eps)


def assert_close(ours, expected, limit):
    for a, b in zip(ours, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert contract.relative_error(a, b, 1e-2) < limit


def assert_as_the_two_operators(args, limit, added=True):
    assert_close(kernels.hc_post_pre(*contract.detached(args)), two_operators(*args), limit)
    taken = backward_arguments(args, added)
    assert_close(kernels.hc_post_pre_backward(*taken), two_gradients(args, taken[:4]), limit)


@pytest.mark.interpret
@dtypes
@ADDED
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("width", [6, 64])
def test_kernels_equal_the_two_operators(batch, width, dtype, added):
    assert_as_the_two_operators(in_training(batch, width=width, dtype=dtype, iters=2), ROUNDING[dtype], added)


@pytest.mark.interpret
def test_many_normalisations_wide_rows_and_many_tokens():
    assert_as_the_two_operators(in_training((2,), width=3000), 1e-5)
    assert_as_the_two_operators(in_training((70,), width=40, iters=2), 1e-5)


@pytest.mark.interpret
def test_other_numbers_of_streams_are_left_to_plain_torch():
    assert_as_the_two_operators(in_training((2, 3), 3), 1e-5)


@pytest.mark.interpret
def test_no_token_and_other_strides():
    empty = in_training((2, 0))
    assert [t.shape for t in kernels.hc_post_pre(*contract.detached(empty))] == [t.shape for t in two_operators(*empty)]
    taken = backward_arguments(empty)
    assert not any(t.any() for t in kernels.hc_post_pre_backward(*taken))
    args = contract.detached(in_training())
    taken = backward_arguments(args)
    loose = [[transposed(a) if isinstance(a, torch.Tensor) else a for a in x] for x in (args, taken)]
    assert_close(kernels.hc_post_pre(*loose[0]), kernels.hc_post_pre(*args), 1e-6)
    assert_close(kernels.hc_post_pre_backward(*loose[1]), kernels.hc_post_pre_backward(*taken), 1e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_token_spoils_no_other(value):
    args = [*contract.detached(in_training((7,), iters=2))]
    taken = [*backward_arguments(args)]
    others = torch.arange(7) != 2
    for operator, inputs, poisoned in ((kernels.hc_post_pre, args, 1), (kernels.hc_post_pre_backward, taken, 0)):
        bad = inputs[poisoned].clone()
        bad[2] = value
        spoilt, good = operator(*inputs[:poisoned], bad, *inputs[poisoned + 1 :]), operator(*inputs)
        for i, (a, b) in enumerate(zip(spoilt, good, strict=True)):
            if operator is kernels.hc_post_pre or i not in SHARED:
                assert torch.equal(a[others], b[others])


WIDTH = 4096
STORED = ("y", "x", "new", "u", "grad", "du", "dy", "dx")  # what has the streams' dtype; other pointers are to fp32
SCALARS = {"n_tokens": "i32", "tokens_each": "i32", "eps": "fp32", "norm_eps": "fp32"}
BACKWARD = kernels.backward_constants(WIDTH) | {"ADDED": True}
CASES = {
    "hc_post_pre": (kernels._forward_kernel, kernels.forward_constants(WIDTH, 2), kernels.WARPS, "*bf16"),
    "hc_post_pre, fp32": (kernels._forward_kernel, kernels.forward_constants(WIDTH, 4), kernels.WARPS, "*fp32"),
    "backward": (kernels._backward_kernel, BACKWARD, kernels.WARPS, "*bf16"),
    "backward, nothing else": (
        kernels._backward_kernel, BACKWARD | {"ADDED": False, "grad_ptr": None}, kernels.WARPS, "*bf16"
    ),
    "backward, fp32": (kernels._backward_kernel, BACKWARD, kernels.WARPS, "*fp32"),
    "gradient of fn": (kernels._fn_grad_kernel, kernels.fn_grad_constants(WIDTH), kernels.FN_GRAD_WARPS, "*bf16"),
    "gradient of fn, fp32": (kernels._fn_grad_kernel, kernels.fn_grad_constants(WIDTH), kernels.FN_GRAD_WARPS, "*fp32"),
}  # fmt: skip


def compiled(name: str, target: str) -> Compiled:
    kernel, constants, warps, stored = CASES[name]
    free = [a for a in kernel.arg_names if a not in constants]
    types = SCALARS | {a: stored if a[:-4] in STORED else "*fp32" for a in free if a.endswith("_ptr")}
    divisible = [a for a in free if a in ("n_tokens", "tokens_each")]
    signature = {a: types[a] for a in free}
    return replace(compile_for(kernel, signature, constants, target=target, num_warps=warps, divisible=divisible), name=name)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit_the_gpu_at_flash_widths(target):
    rows = [compiled(name, target) for name in CASES]
    print()
    report(rows)
    for c in rows:
        assert c.vgpr_spill == c.sgpr_spill == c.scratch == 0, c.name
        assert c.lds <= TARGETS[target].lds and c.num_warps <= TARGETS[target].max_warps
        assert "xf32" not in c.asm


def test_bytes_moved_at_flash_widths():
    """Floor of performance.md: 337.1 MB forward; backward less than the three that it stands for."""
    moved = kernels.bytes_moved(4096, WIDTH)
    floor = 19 * 4096 * WIDTH * 2  # every tensor of the backward once
    print(f"\nhc_post_pre: {moved['forward'] / 1e6:.1f} MB, {moved['forward'] / 337.1e6:.3f} of the floor")
    print(f"backward: {moved['backward'] / 1e6:.1f} MB, {moved['backward'] / moved['apart']:.3f} of the three apart "
          f"({moved['apart'] / 1e6:.1f} MB), {moved['backward'] / floor:.3f} of its tensors")  # fmt: skip
    assert moved["forward"] <= 1.10 * 337.1e6
    assert moved["backward"] <= 0.70 * moved["apart"]
