"""Root-mean-square norms: fp32 inside, one cast at the end."""

from __future__ import annotations

import torch

from dsv4c.model.norms import RMSNorm, rms


def test_the_norm_is_the_input_over_its_root_mean_square() -> None:
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(rms(x, 0.0), x / 2.5, rtol=1e-15, atol=0)
    torch.testing.assert_close(rms(x, 2.75), x / 3.0, rtol=1e-15, atol=0)


def test_the_weight_is_applied_before_the_only_rounding() -> None:
    # specification, section 0: w * x / rms in fp32, then one cast; rounding the norm first gives other bf16 values
    torch.manual_seed(0)
    norm, x = RMSNorm(256, 1e-6), torch.randn(64, 256, dtype=torch.bfloat16)
    norm.weight.data.normal_(1.0, 0.3)
    once = (x.float() / torch.sqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * norm.weight).bfloat16()
    twice = rms(x, 1e-6).bfloat16() * norm.weight.bfloat16()
    result = norm(x)
    assert result.dtype == torch.bfloat16
    assert float((result != once).float().mean()) < 1e-3
    assert float((result != twice).float().mean()) > 0.1


def test_a_zero_vector_has_a_zero_norm_and_a_finite_gradient() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    RMSNorm(8, 1e-6)(x).sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_the_norm_is_not_lowered_by_autocast() -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(64, 1e-6), torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        inside = norm(x)
    assert torch.equal(inside, norm(x))
