"""The Triton kernels of ``dsv4::route``: interpreted against the formula, compiled, bytes."""

from __future__ import annotations

import pytest
import torch

from dsv4c.ops.reference.route import route as formula
from dsv4c.ops.triton import route as kernels
from dsv4c.ops.triton.compiled import TARGETS, compile_for, report
from tests.ops import contract
from tests.ops.cases import transposed
from tests.ops.test_route import arguments

SHAPES = [(7, 9, 3), (1, 1, 1), (20, 64, 6), (5, 256, 6), (3, 4, 4)]


def sorted_by_expert(weights, ids, scores, load):
    ids, order = ids.sort(-1)
    return weights.gather(-1, order), ids, scores, load


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["bias", "none", "given"])
@pytest.mark.parametrize("masked", [True, False])
def test_kernels_equal_the_formula(shape, kind, masked):
    args = arguments(*shape, kind, masked)
    outputs = formula(*args)
    ours = kernels.route(*contract.detached(args))
    for a, b in zip(sorted_by_expert(*ours), sorted_by_expert(*outputs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert contract.relative_error(a, b) < 1e-5
    _, ids, scores, _ = outputs
    grads = contract.cotangents(outputs)
    (expected,) = contract.gradients(formula, args, grads)
    ours = kernels.route_backward(grads[0], grads[2], ids, scores.detach(), 1.5)
    assert contract.relative_error(ours, expected) < 1e-5


@pytest.mark.interpret
def test_bf16_logits_no_token_and_other_strides():
    args = contract.detached(arguments(dtype=torch.bfloat16))
    for a, b in zip(sorted_by_expert(*kernels.route(*args)), sorted_by_expert(*formula(*args)), strict=True):
        assert a.dtype == b.dtype and contract.relative_error(a, b) < 1e-5
    none = contract.detached(arguments(0))
    assert [t.shape for t in kernels.route(*none)] == [t.shape for t in formula(*none)]
    logits, *rest = contract.detached(arguments())
    for a, b in zip(kernels.route(transposed(logits), *rest), kernels.route(logits, *rest), strict=True):
        assert torch.equal(a, b)


@pytest.mark.interpret
def test_gradient_is_finite_for_every_logit():
    logits = torch.tensor([[-300.0, -104.0, -20.0, -1e-3, 0.0, 2.0, 25.0, 200.0]], requires_grad=True)  # B63
    args = (logits, None, None, None, 8, 1.5)
    _, _, scores, _ = kernels.route(*contract.detached(args))
    wide = (logits.detach().double().requires_grad_(), *args[1:])
    exact = formula(*wide)[2]
    slope = kernels.route_backward(torch.zeros(1, 8), torch.ones(1, 8), torch.arange(8)[None], scores, 1.5)
    (expected,) = torch.autograd.grad(exact.sum(), wide[0])
    assert ((scores - exact).abs() <= 2e-6 * exact + 1e-30).all()
    assert ((slope - expected).abs() <= 2e-6 * expected + 1e-30).all()


@pytest.mark.interpret
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["bias", "given"])
def test_one_bad_token_spoils_no_other_and_goes_to_experts_that_exist(value, kind):
    logits, *rest = contract.detached(arguments(kind=kind))
    bad = logits.clone()
    bad[2] = value
    others = torch.arange(7) != 2
    ours, good = kernels.route(bad, *rest), kernels.route(logits, *rest)
    assert all(torch.equal(a[others], b[others]) for a, b in zip(ours[:3], good[:3], strict=True))
    assert ((ours[1] >= 0) & (ours[1] < 9)).all() and ours[3].sum() == good[3].sum()


F, ID = "*fp32", "*i64"
SIZES = {"n_tokens": "i32", "n_experts": "i32", "route_scale": "fp32"}
OUTPUTS = {"weight_ptr": F, "id_ptr": ID, "score_ptr": F, "load_ptr": "*i32"}
CONSTANTS = kernels.constants(256, 6)
KERNELS = {
    "learned": (
        kernels._route_kernel,
        SIZES | OUTPUTS | {"logit_ptr": F, "bias_ptr": F, "real_ptr": "*i1"},
        CONSTANTS | {"given_ptr": None, "BIASED": True, "GIVEN": False, "MASKED": True},
    ),
    "hash": (
        kernels._route_kernel,
        SIZES | OUTPUTS | {"logit_ptr": F, "given_ptr": ID, "real_ptr": "*i1"},
        CONSTANTS | {"bias_ptr": None, "BIASED": False, "GIVEN": True, "MASKED": True},
    ),
    "backward": (
        kernels._backward_kernel,
        SIZES | {"dweight_ptr": F, "dscore_ptr": F, "id_ptr": ID, "score_ptr": F, "dlogit_ptr": F},
        CONSTANTS,
    ),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit_the_gpu_at_flash_widths(target, name):
    kernel, signature, constexprs = KERNELS[name]
    c = compile_for(kernel, signature, constexprs, target=target, divisible=("n_tokens", "n_experts"))
    report([c])
    assert c.vgpr_spill == c.scratch == 0 and c.lds <= TARGETS[target].lds


def test_bytes_moved_at_flash_widths():
    moved = kernels.bytes_moved(4096, 256, 6)
    print(f"\nroute: {moved}")
    assert moved["forward"] <= 1.05 * 4096 * 256 * 8  # logits in, scores out
