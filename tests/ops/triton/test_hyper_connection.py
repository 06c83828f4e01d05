"""The Triton kernels of ``dsv4::sinkhorn``, ``hc_pre``, ``hc_post``: interpreted against the formulas, compiled, bytes."""

from __future__ import annotations

import pytest
import torch

from dsv4c.ops.reference import hyper_connection as formulas
from dsv4c.ops.reference.sinkhorn import sinkhorn as formula
from dsv4c.ops.triton import hc_post, hc_pre
from dsv4c.ops.triton import sinkhorn as normalisations
from dsv4c.ops.triton.compiled import TARGETS, Compiled, compile_for, report, wave_instructions
from tests.ops import contract
from tests.ops.cases import normal, transposed
from tests.ops.test_hyper_connection import EPS, post_arguments, pre_arguments

BATCHES = [(2, 3), (1, 1), (5,)]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # the interpreter cuts bf16 off where the hardware rounds
dtypes = pytest.mark.parametrize("dtype", ROUNDING)


def assert_close(ours, expected, dtype):
    for a, b in zip(ours, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert contract.relative_error(a, b) < ROUNDING[a.dtype if a.dtype == dtype else torch.float32]


@pytest.mark.interpret
@pytest.mark.parametrize(("batch", "iters"), [((2, 7), 1), ((1, 1), 2), ((67,), 2), ((9,), 20)])
def test_normalisations_equal_the_formula(batch, iters):
    logits, grad = normal(0, torch.float32, (*batch, 4, 4), (*batch, 4, 4))
    expected = formula(2 * logits, iters, EPS)
    (dlogits,) = torch.autograd.grad(expected, logits, grad)
    ours = normalisations.sinkhorn((2 * logits).detach(), iters, EPS)
    assert_close((ours,), (expected,), torch.float32)
    ours = 2 * normalisations.sinkhorn_backward(grad.detach(), (2 * logits).detach(), iters, EPS)
    assert_close((ours,), (dlogits,), torch.float32)


@pytest.mark.interpret
@dtypes
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("width", [6, 64])
def test_pre_equals_the_formula(batch, width, dtype):
    args = pre_arguments(batch, 4, width, dtype=dtype)
    outputs = formulas.hc_pre(*args)
    assert_close(hc_pre.hc_pre(*contract.detached(args)), outputs, dtype)
    grads = contract.cotangents(outputs)
    expected = contract.gradients(formulas.hc_pre, args, grads)
    z, rstd = outputs[3:]
    ours = hc_pre.hc_pre_backward(*grads[:3], *contract.detached(args)[:4], z, rstd, *args[4:6])
    assert_close(ours, expected, dtype)


@pytest.mark.interpret
@dtypes
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("width", [6, 64])
def test_post_equals_the_formula(batch, width, dtype):
    args = post_arguments(batch, 4, width, dtype)
    output = formulas.hc_post(*args)
    assert_close((hc_post.hc_post(*contract.detached(args)),), (output,), dtype)
    grads = contract.cotangents((output,))
    ours = hc_post.hc_post_backward(grads[0], *contract.detached(args))
    assert_close(ours, contract.gradients(formulas.hc_post, args, grads), dtype)


@pytest.mark.interpret
def test_rows_wider_than_a_block_of_channels():
    post = contract.detached(post_arguments((2,), 4, 5000))
    grad = torch.ones_like(post[1])
    assert_close((hc_post.hc_post(*post),), (formulas.hc_post(*post),), torch.float32)
    expected = contract.gradients(formulas.hc_post, post_arguments((2,), 4, 5000), [grad])
    assert_close(hc_post.hc_post_backward(grad, *post), expected, torch.float32)
    streams, fn, *rest = pre_arguments((2,), 4, 3000)
    pre = (streams, (0.02 * fn).detach().requires_grad_(), *rest)  # as training begins: gates that are not all 0 or 1
    outputs = hc_pre.hc_pre(*contract.detached(pre))
    assert_close(outputs, formulas.hc_pre(*pre), torch.float32)
    grads = contract.cotangents(outputs)
    ours = hc_pre.hc_pre_backward(*grads[:3], *contract.detached(pre)[:4], *outputs[3:], 20, EPS)
    assert_close(ours, contract.gradients(formulas.hc_pre, pre, grads), torch.float32)


@pytest.mark.interpret
def test_other_numbers_of_streams_are_left_to_plain_torch():
    pre, post = pre_arguments((2, 3), 3), post_arguments((2, 3), 3)
    assert_close(hc_pre.hc_pre(*contract.detached(pre)), formulas.hc_pre(*pre), torch.float32)
    assert_close((hc_post.hc_post(*contract.detached(post)),), (formulas.hc_post(*post),), torch.float32)


@pytest.mark.interpret
def test_no_token_and_other_strides():
    empty = contract.detached(pre_arguments((2, 0)))
    assert [t.shape for t in hc_pre.hc_pre(*empty)] == [t.shape for t in formulas.hc_pre(*empty)]
    assert hc_post.hc_post(*contract.detached(post_arguments((2, 0)))).shape == (2, 0, 4, 6)
    args = contract.detached(pre_arguments())
    other = [transposed(a) if isinstance(a, torch.Tensor) else a for a in args]
    assert_close(hc_pre.hc_pre(*other), formulas.hc_pre(*args), torch.float32)


@pytest.mark.interpret
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_token_spoils_no_other(value):
    streams, *rest = contract.detached(pre_arguments((7,)))
    bad = streams.clone()
    bad[2] = value
    others = torch.arange(7) != 2
    for a, b in zip(hc_pre.hc_pre(bad, *rest), hc_pre.hc_pre(streams, *rest), strict=True):
        assert torch.equal(a[others], b[others])


F, B = "*fp32", "*bf16"
WIDTH = 4096
SINKHORN = {"logit_ptr": F, "out_ptr": F, "n_tokens": "i32", "eps": "fp32"}
PARAMETERS = {"base_ptr": F, "scale_ptr": F}
KERNELS = {
    "sinkhorn": (normalisations._sinkhorn_kernel, SINKHORN, normalisations.constants(20), 1),
    "sinkhorn backward": (
        normalisations._sinkhorn_backward_kernel,
        SINKHORN | {"grad_ptr": F, "total_ptr": F},
        normalisations.constants(20),
        1,
    ),
    "hc_pre": (
        hc_pre._forward_kernel,
        PARAMETERS | {"x_ptr": B, "u_ptr": B, "n_tokens": "i32", "eps": "fp32", "norm_eps": "fp32"}
        | dict.fromkeys(("fn_ptr", "post_ptr", "logit_ptr", "z_ptr", "rstd_ptr"), F),
        hc_pre.forward_constants(WIDTH),
        hc_pre.FORWARD_WARPS,
    ),
    "hc_pre, gradient of pre": (
        hc_pre._pre_grad_kernel,
        PARAMETERS | {"du_ptr": B, "x_ptr": B}
        | dict.fromkeys(("dpost_ptr", "dmatrix_ptr", "z_ptr", "rstd_ptr", "da_ptr", "dp_ptr", "shrink_ptr"), F),
        hc_pre.pre_grad_constants(WIDTH),
        hc_pre.PRE_GRAD_WARPS,
    ),
    "hc_pre, gradient of streams": (
        hc_pre._stream_grad_kernel,
        PARAMETERS | {"du_ptr": B, "x_ptr": B, "dx_ptr": B, "n_tokens": "i32", "tokens_each": "i32", "eps": "fp32"}
        | dict.fromkeys(("fn_ptr", "z_ptr", "dp_ptr", "shrink_ptr", "part_ptr"), F),
        hc_pre.stream_grad_constants(WIDTH),
        hc_pre.STREAM_GRAD_WARPS,
    ),
    "hc_post": (
        hc_post._forward_kernel,
        {"y_ptr": B, "x_ptr": B, "out_ptr": B, "post_ptr": F, "comb_ptr": F},
        hc_post.constants(WIDTH, backward=False),
        hc_post.FORWARD_WARPS,
    ),
    "hc_post backward": (
        hc_post._backward_kernel,
        dict.fromkeys(("grad_ptr", "y_ptr", "x_ptr", "dy_ptr", "dx_ptr"), B)
        | dict.fromkeys(("post_ptr", "comb_ptr", "dpost_ptr", "dcomb_ptr"), F),
        hc_post.constants(WIDTH, backward=True),
        hc_post.BACKWARD_WARPS,
    ),
}  # fmt: skip


def compiled(name: str, target: str) -> Compiled:
    kernel, signature, constexprs, warps = KERNELS[name]
    divisible = [n for n in ("n_tokens", "tokens_each") if n in signature]
    return compile_for(kernel, signature, constexprs, target=target, num_warps=warps, divisible=divisible)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_fit_the_gpu_at_flash_widths(name):
    for target, gpu in TARGETS.items():
        c = compiled(name, target)
        report([c])
        assert c.vgpr_spill == c.scratch == 0
        assert c.lds <= gpu.lds and c.num_warps <= gpu.max_warps


@pytest.mark.parametrize("target", TARGETS)
def test_a_token_is_normalised_within_its_lane(target):
    c = compiled("sinkhorn", target)
    assert c.lds == 0 and "barrier" not in c.instructions and "ds" not in c.instructions
    # The compiler runs two of the 19 rounds in one trip of its loop.
    issued = wave_instructions(c, 1, [9.5])
    print(f"\nsinkhorn on {target}: {issued} wave instructions for 64 tokens")
    assert issued <= 2100


def test_bytes_moved_at_flash_widths():
    """Floors of performance.md: 169.7 MB before a block, 302.3 MB after it, 738.2 MB for both gradients."""
    pre, post = hc_pre.bytes_moved(4096, WIDTH), hc_post.bytes_moved(4096, WIDTH)
    for name, moved, floor in (
        ("hc_pre", pre["forward"], 169.7e6),
        ("hc_post", post["forward"], 302.3e6),
        ("gradients", pre["backward"] + post["backward"], 738.2e6),
    ):
        print(f"\n{name}: {moved / 1e6:.1f} MB, {moved / floor:.3f} of the floor")
    assert pre["forward"] <= 1.10 * 169.7e6
    assert post["forward"] <= 1.10 * 302.3e6
