"""``dsv4::hadamard``: the normalised Sylvester transform of the last axis (specification, section 5).

The matrix is symmetric and orthogonal: the backward is the transform of the gradient, by the same operator.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsv4c.errors import ConfigError
from dsv4c.ops.precision import accumulator, no_autocast

_BLOCK = 4096  # rows of a block that stays in cache


def sylvester(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``H_ij = (-1)^popcount(i & j) / sqrt(n)`` [n,n]."""
    i = torch.arange(n, device=device)
    parity = i[:, None] & i[None, :]
    for shift in (16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return (1 - 2 * (parity & 1)).to(dtype) * n**-0.5


_matrix = cache(sylvester)


def check_width(n: int) -> None:
    if n < 1 or n & (n - 1):
        raise ConfigError("a Hadamard transform needs a width that is a power of two", where=f"width {n}")


def _plain(x: Tensor) -> Tensor:
    n, acc = x.shape[-1], accumulator(x)
    rows = x.reshape(-1, n)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    matrix = _matrix(n, acc, x.device)
    with no_autocast(x):
        if x.dtype == acc:
            torch.mm(rows, matrix, out=out)
        else:
            for first in range(0, len(rows), _BLOCK):
                out[first : first + _BLOCK] = torch.mm(rows[first : first + _BLOCK].to(acc), matrix)
    return out.view(x.shape)


@torch.library.custom_op("dsv4::hadamard", mutates_args=())
def hadamard(x: Tensor) -> Tensor:
    """x times the symmetric Sylvester matrix ``H_ij = (-1)^popcount(i & j) / sqrt(n)``; x [...,n], n a power of two.

    Computed in fp32 (fp64 for fp64 inputs) and rounded once to x's dtype.
    """
    check_width(x.shape[-1])
    return _plain(x)


@hadamard.register_fake
def _(x):  # type: ignore[no-untyped-def]  # schema above
    check_width(x.shape[-1])
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    pass


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
    return hadamard(grad)


hadamard.register_autograd(_backward, setup_context=_save)
