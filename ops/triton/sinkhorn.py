"""Triton kernels of ``dsv4::sinkhorn`` for n = 4: one token to a lane, its 16 elements in 16 registers.

Nothing crosses lanes, so that a normalisation is additions and products alone; a reciprocal is the square of a reciprocal
root, which is one instruction where a division is ten.  The backward writes the 156 sums of a token to a buffer that only
its own lane reads again, and goes back through the normalisations by multiplying them in: no matrix is stored.
"""

# Kernels are written in Triton's language, which has no annotations for its values and grows tuples.
# mypy: disable-error-code="no-untyped-def, assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4c.ops.sinkhorn import normalised, normalised_backward


@triton.jit
def load_row(ptr, tokens, row, there):
    """The four elements [T] of a row of the tokens' 4 x 4 matrices."""
    at = tokens.to(tl.int64)[:, None] * 16 + row * 4 + tl.arange(0, 4)[None, :]
    x = tl.load(ptr + at, mask=there[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [tokens.shape[0], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def store_row(ptr, tokens, row, there, x0, x1, x2, x3):
    """The inverse of :func:`load_row`."""
    at = tokens.to(tl.int64)[:, None] * 16 + row * 4 + tl.arange(0, 4)[None, :]
    x = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [tokens.shape[0], 4])
    tl.store(ptr + at, x, mask=there[:, None])


@triton.jit
def _load(ptr, tokens, there):
    x = ()
    for row in tl.static_range(4):
        x = x + load_row(ptr, tokens, row, there)  # the compiler knows no unpacking
    return x


@triton.jit
def _sums(c, ROWS: tl.constexpr):
    """The four sums of rows, or of columns."""
    total = ()
    for i in tl.static_range(4):
        if ROWS:  # noqa: SIM108  # two short lines
            s = (c[4 * i] + c[4 * i + 1]) + (c[4 * i + 2] + c[4 * i + 3])
        else:
            s = (c[i] + c[4 + i]) + (c[8 + i] + c[12 + i])
        total = total + (s,)
    return total


@triton.jit
def _normalise(c, eps, ROWS: tl.constexpr):
    """``C / (sums + eps)`` and ``sums + eps``."""
    sums = _sums(c, ROWS)
    total, inverse, out = (), (), ()
    for i in tl.static_range(4):
        s = sums[i] + eps
        root = tl.rsqrt(s)
        total = total + (s,)
        inverse = inverse + (root * root,)
    for i in tl.static_range(16):
        out = out + (c[i] * inverse[i // 4 if ROWS else i % 4],)
    return out, total


@triton.jit
def _softmax(logits):
    """Over every row of four."""
    out = ()
    for row in tl.static_range(4):
        a, b, c, d = logits[4 * row], logits[4 * row + 1], logits[4 * row + 2], logits[4 * row + 3]
        peak = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
        a, b, c, d = tl.exp(a - peak), tl.exp(b - peak), tl.exp(c - peak), tl.exp(d - peak)
        inverse = 1.0 / ((a + b) + (c + d))
        out = out + (a * inverse, b * inverse, c * inverse, d * inverse)
    return out


@triton.jit
def _add(c, eps):
    out = ()
    for i in tl.static_range(16):
        out = out + (c[i] + eps,)
    return out


@triton.jit
def _sinkhorn_kernel(logit_ptr, out_ptr, n_tokens, eps, ITERS: tl.constexpr, BLOCK_T: tl.constexpr):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = tokens < n_tokens
    c = _add(_softmax(_load(logit_ptr, tokens, there)), eps)
    c, _ = _normalise(c, eps, False)
    for _ in range(ITERS - 1):
        c, _ = _normalise(c, eps, True)
        c, _ = _normalise(c, eps, False)
    for row in tl.static_range(4):
        store_row(out_ptr, tokens, row, there, c[4 * row], c[4 * row + 1], c[4 * row + 2], c[4 * row + 3])


@triton.jit
def _back(g, c, total_ptr, tokens, there, n_tokens, ROWS: tl.constexpr):
    """With g the gradient of log C: ``g = g' - C' sum(g')`` and ``C = C' (s + eps)``."""
    pulled = _sums(g, ROWS)
    totals, before, passed = (), (), ()
    for i in tl.static_range(4):
        totals = totals + (tl.load(total_ptr + i * n_tokens + tokens, mask=there, other=1.0),)
    for i in tl.static_range(16):
        passed = passed + (g[i] - c[i] * pulled[i // 4 if ROWS else i % 4],)
        before = before + (c[i] * totals[i // 4 if ROWS else i % 4],)
    return passed, before


@triton.jit
def _keep(total_ptr, total, tokens, there, n_tokens):
    for i in tl.static_range(4):
        tl.store(total_ptr + i * n_tokens + tokens, total[i], mask=there)


@triton.jit
def _sinkhorn_backward_kernel(
    grad_ptr, logit_ptr, total_ptr, out_ptr, n_tokens, eps, ITERS: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = tokens < n_tokens
    c = _add(_softmax(_load(logit_ptr, tokens, there)), eps)
    c, total = _normalise(c, eps, False)
    _keep(total_ptr, total, tokens, there, n_tokens)
    for step in range(ITERS - 1):
        at = total_ptr + (8 * step + 4) * n_tokens
        c, total = _normalise(c, eps, True)
        _keep(at, total, tokens, there, n_tokens)
        c, total = _normalise(c, eps, False)
        _keep(at + 4 * n_tokens, total, tokens, there, n_tokens)
    grad = _load(grad_ptr, tokens, there)
    g = ()
    for i in tl.static_range(16):
        g = g + (grad[i] * c[i],)
    for back in range(ITERS - 1):
        at = total_ptr + (8 * (ITERS - 2 - back) + 4) * n_tokens
        g, c = _back(g, c, at + 4 * n_tokens, tokens, there, n_tokens, False)
        g, c = _back(g, c, at, tokens, there, n_tokens, True)
    g, c = _back(g, c, total_ptr, tokens, there, n_tokens, False)
    softmax = _softmax(_load(logit_ptr, tokens, there))
    logit_grads = ()
    for i in tl.static_range(16):
        logit_grads = logit_grads + (g[i] / (softmax[i] + eps) * softmax[i],)
    pulled = _sums(logit_grads, True)
    for row in tl.static_range(4):
        d = ()
        for k in tl.static_range(4):
            d = d + (logit_grads[4 * row + k] - softmax[4 * row + k] * pulled[row],)
        store_row(out_ptr, tokens, row, there, d[0], d[1], d[2], d[3])


def constants(iters: int) -> dict[str, Any]:
    """The compile-time arguments of both kernels: as many tokens as a wave has lanes."""
    return {"ITERS": iters, "BLOCK_T": 64}


def fits(logits: Tensor) -> bool:
    """Whether the kernels take these: 4 x 4 matrices in fp32."""
    return logits.shape[-1] == 4 and logits.dtype == torch.float32


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """The operator (:mod:`dsv4c.ops.sinkhorn`); in plain torch where n is not 4."""
    if not fits(logits):
        return normalised(logits, iters, eps)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    n_tokens = logits.numel() // 16
    if n_tokens:
        grid = (triton.cdiv(n_tokens, 64),)
        _sinkhorn_kernel[grid](logits.contiguous(), out, n_tokens, eps, **constants(iters), num_warps=1)
    return out


def sinkhorn_backward(grad: Tensor, logits: Tensor, iters: int, eps: float) -> Tensor:
    """The gradient of the logits."""
    if not fits(logits):
        return normalised_backward(grad, logits, iters, eps)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    n_tokens = logits.numel() // 16
    if n_tokens:
        totals = torch.empty((8 * iters - 4, n_tokens), dtype=torch.float32, device=logits.device)
        _sinkhorn_backward_kernel[(triton.cdiv(n_tokens, 64),)](
            grad.contiguous(), logits.contiguous(), totals, out, n_tokens, eps, **constants(iters), num_warps=1
        )
    return out


def bytes_moved(n_tokens: int, iters: int = 20) -> dict[str, int]:
    """What a launch loads and stores; of the backward the sums, which a cache holds, are most."""
    return {"forward": n_tokens * 16 * 4 * 2, "backward": n_tokens * (16 * 4 * 4 + (8 * iters - 4) * 4 * 2)}
