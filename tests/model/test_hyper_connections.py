"""Hyper-connections: values of the mixing weights, the orientation of comb, and what is fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ops
from dsv4c.model.hyper_connections import HyperConnection, HyperHead
from tests.model import formulas
from tests.model.conftest import SPEC, randomise

pytestmark = pytest.mark.usefixtures("both")


def connection(seed: int = 0, **changes: Any) -> HyperConnection:
    hc = HyperConnection(SPEC.replace(**changes))
    randomise(hc, seed)
    return hc


def streams(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(2, 5, 4, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ring() -> Tensor:
    """comb logits of +20 at (0,1), (1,2), (2,3), (3,0)."""
    logits = torch.zeros(4, 4)
    logits[torch.arange(4), torch.tensor([1, 2, 3, 0])] = 20.0
    return logits


def test_neutral_parameters_give_the_neutral_weights() -> None:
    # invariant 1, B12
    hc = connection()
    torch.nn.init.zeros_(hc.base), torch.nn.init.zeros_(hc.scale)
    x = streams()
    u, post, comb = hc.pre(x)
    assert bool((post == 1.0).all())
    assert torch.equal(comb, torch.full_like(comb, 0.24999976))
    torch.testing.assert_close(u, 0.50000101 * x.sum(2), rtol=1e-6, atol=1e-6)


def test_columns_of_comb_sum_to_one_and_rows_only_nearly() -> None:
    # invariant 2
    comb = ops.sinkhorn(3 * torch.randn(500, 4, 4, generator=torch.Generator().manual_seed(1)), 20, 1e-6)
    assert float((comb.sum(-2) - 1).abs().max()) < 2e-6
    assert 1e-5 < float((comb.sum(-1) - 1).abs().max()) < 0.1


def test_comb_is_the_papers_algorithm_on_the_transposed_matrix() -> None:
    # invariant 3
    logits = torch.randn(50, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    b = logits.mT.exp()
    for _ in range(20):
        b = b / b.sum(-2, keepdim=True)
        b = b / b.sum(-1, keepdim=True)
    torch.testing.assert_close(ops.sinkhorn(logits, 20, 0.0).mT, b, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("iters", "expected"),
    [(1, [[0.637890, 0.192511], [0.362110, 0.807487]]), (20, [[0.731057, 0.268942], [0.268942, 0.731057]])],
)
def test_sinkhorn_starts_with_a_softmax_over_rows_and_one_column_pass(iters: int, expected: list[list[float]]) -> None:
    # B12
    comb = ops.sinkhorn(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), iters, 1e-6)
    torch.testing.assert_close(comb, torch.tensor(expected), rtol=0, atol=1e-6)
    if iters == 20:
        assert float((comb.sum(-1) - 1).abs().max()) < 2e-6 > float((comb.sum(-2) - 1).abs().max())


def test_the_first_index_of_comb_is_summed() -> None:
    # B12, invariant 2: new stream k = sum_j comb[j,k] old_j, so stream 1 becomes the old stream 0
    hc, x = connection(), streams()
    comb = ops.sinkhorn(ring(), 20, 1e-6).expand(2, 5, 4, 4)
    new = hc.post(torch.zeros(2, 5, 64), x, torch.ones(2, 5, 4), comb)
    torch.testing.assert_close(new, x[:, :, [3, 0, 1, 2]], rtol=0, atol=1e-4)


def test_a_random_comb_is_not_its_own_transpose() -> None:
    # invariant 2: the whole of X' = comb^T X + post y, against loops
    hc, x = connection(), streams()
    y = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
    _, post, comb = hc.pre(x)
    expected = torch.stack([formulas.hc_post(*row) for row in zip(y, x, post, comb, strict=True)])
    torch.testing.assert_close(hc.post(y, x, post, comb), expected, rtol=1e-5, atol=1e-5)
    assert float((hc.post(y, x, post, comb.mT) - expected).detach().abs().max()) > 0.1


@pytest.mark.parametrize("iters", [1, 20])
def test_pre_post_and_comb_are_those_of_the_formulas(iters: int) -> None:
    hc = connection(hc_sinkhorn_iters=iters, hc_eps=1e-3, rms_norm_eps=1e-2).double()
    config = SPEC.replace(hc_sinkhorn_iters=iters, hc_eps=1e-3, rms_norm_eps=1e-2)
    x = streams(torch.float64)
    for row in range(2):
        for ours, expected in zip(hc.pre(x[row : row + 1]), formulas.hc_pre(x[row], hc, config), strict=True):
            torch.testing.assert_close(ours[0], expected, rtol=0, atol=1e-14)


def test_post_lies_between_zero_and_two_and_pre_between_eps_and_one() -> None:
    # B12
    hc, x = connection(), streams()
    torch.nn.init.constant_(hc.base, 40.0), torch.nn.init.zeros_(hc.scale)
    u, post, _ = hc.pre(x)
    assert bool((post == 2.0).all())
    torch.testing.assert_close(u, (1 + 1e-6) * x.sum(2), rtol=1e-6, atol=1e-6)
    torch.nn.init.constant_(hc.base, -200.0)
    u, post, _ = hc.pre(x)
    assert bool((post == 0.0).all())  # no eps in post
    torch.testing.assert_close(u, 1e-6 * x.sum(2), rtol=1e-5, atol=1e-12)


def test_equal_streams_and_a_silent_block_change_nothing() -> None:
    # invariant 4
    hc = connection()
    x = streams()[:, :, :1].expand(-1, -1, 4, -1).contiguous()
    _, post, comb = hc.pre(x)
    assert float(((hc.post(torch.zeros(2, 5, 64), x, post, comb) - x) / x).detach().abs().max()) < 2e-6


def test_the_head_weighs_streams_without_sinkhorn() -> None:
    head = HyperHead(SPEC)
    randomise(head)
    head = head.double()
    x = streams(torch.float64)
    expected = torch.stack([formulas.hc_head(row, head, SPEC) for row in x])
    torch.testing.assert_close(head(x), expected, rtol=0, atol=1e-14)
    assert head.fn.shape == (4, 256) and head.base.shape == (4,) and head.scale.shape == (1,)


def test_shapes_are_those_of_the_specification(tiny: DeepseekV4) -> None:
    for layer in (*tiny.layers, *tiny.mtp):
        for hc in (layer.hc_attn, layer.hc_ffn):
            assert (hc.fn.shape, hc.base.shape, hc.scale.shape) == ((24, 256), (24,), (3,))


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_gradients_go_through_every_sinkhorn_step(iters: int) -> None:
    logits = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: ops.sinkhorn(m, iters, 1e-6), (logits,), atol=1e-8)
    assert torch.autograd.gradcheck(lambda m: ops.sinkhorn(m, iters, 1e-2), (logits,), atol=1e-8)


def test_iters_one_returns_a_tensor_of_its_own() -> None:
    # B50
    logits = torch.randn(2, 3, 4, 4)
    before = logits.clone()
    comb = ops.sinkhorn(logits, 1, 1e-6)
    assert comb.data_ptr() != logits.data_ptr() and torch.equal(logits, before)


def test_nothing_is_detached() -> None:
    hc = connection().double()
    x = streams(torch.float64)[:1, :2].clone().requires_grad_()
    y = torch.randn(1, 2, 64, dtype=torch.float64, requires_grad=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        u, post, comb = hc.pre(x)
        return hc.post(y + u, x, post, comb)

    assert torch.autograd.gradcheck(step, (x, y), fast_mode=True)
    grads = torch.autograd.grad(step(x, y).square().sum(), list(hc.parameters()))
    assert all(bool(g.ne(0).any()) for g in grads)


def test_mixing_is_fp32_in_a_bf16_model_and_inside_autocast() -> None:
    # B34, B35: bf16 streams stay bf16, the weights and the sum are fp32
    hc, head, x = connection(), HyperHead(SPEC), streams(torch.bfloat16)
    randomise(head)
    exact = hc.pre(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        inside = hc.pre(x)
        new, merged = hc.post(inside[0], x, *inside[1:]), head(x)
    assert inside[0].dtype == torch.bfloat16 == new.dtype
    assert inside[1].dtype == torch.float32 == inside[2].dtype
    # the sums are rounded once, at the end
    assert torch.equal(new, hc.post(inside[0].float(), x.float(), *inside[1:]).bfloat16())
    assert torch.equal(merged, head(x.float()).bfloat16())
    for ours, expected in zip(inside, exact, strict=True):
        assert torch.equal(ours, expected.to(ours.dtype))
    half = hc.bfloat16().pre(x)
    assert all(torch.equal(a, b) for a, b in zip(half, inside, strict=True))
