"""The Sylvester transform, as the specification writes it (section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator


def hadamard(x: Tensor) -> Tensor:
    """x times ``H_2n = [[H_n, H_n], [H_n, -H_n]]``, divided by sqrt(n)."""
    n = x.shape[-1]
    matrix = torch.ones(1, 1, dtype=accumulator(x), device=x.device)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return (x.to(matrix.dtype) @ matrix * n**-0.5).to(x.dtype)
