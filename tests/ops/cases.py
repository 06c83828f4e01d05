"""Inputs of the operators, drawn at random in shape, documents and values; every operator's tests take them from here."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

SEARCH = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
DTYPES = (torch.float32, torch.float64)


class Packed(NamedTuple):
    """Rows of the batch as the operators see them: documents one after another, an entry for every whole window."""

    start: Tensor  # [B,S]
    entry_end: Tensor  # [B,P]
    ratio: int


def pack(documents: list[list[int]], ratio: int) -> Packed:
    """Rows with documents of these lengths; every row has the same number of tokens."""
    n_tokens = sum(documents[0])
    starts, ends = [], []
    for lengths in documents:
        start, end, offset = [], [], 0
        for length in lengths:
            start += [offset] * length
            end += [offset + ratio * (i + 1) - 1 for i in range(length // ratio)]
            offset += length
        starts.append(start)
        ends.append(end + [n_tokens] * (n_tokens // ratio - len(end)))
    return Packed(torch.tensor(starts), torch.tensor(ends).reshape(len(documents), -1).long(), ratio)


def one_document(batch: int, n_tokens: int, ratio: int) -> Packed:
    return pack([[n_tokens]] * batch, ratio)


@st.composite
def packed(draw: st.DrawFn, ratios: tuple[int, ...] = (4, 8)) -> Packed:
    """1 to 3 rows of 1 to 36 tokens cut into documents: no entry below the ratio, ragged tails above it."""
    batch, n_tokens, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 36)), draw(st.sampled_from(ratios))
    rows = []
    for _ in range(batch):
        cuts = sorted(draw(st.sets(st.integers(1, max(1, n_tokens - 1)), max_size=3)))
        edges = [0, *(c for c in cuts if c < n_tokens), n_tokens]
        rows.append([b - a for a, b in pairwise(edges)])
    return pack(rows, ratio)


seeds = st.integers(0, 2**16)
heads = st.sampled_from((1, 2, 3, 128))  # 128 heads make blocks of 8 queries: their edges fall inside 36 tokens
dtypes = st.sampled_from(DTYPES)


def normal(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...], trains: bool = True) -> list[Tensor]:
    """Independent normal tensors that require gradients."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_(trains) for s in shapes]


def incoming(shape: torch.Size, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of the layouts that autograd really hands over: of a sum, of a broadcast, of a transposed use."""
    g = torch.Generator().manual_seed(1)
    rank = len(shape)
    return {
        "of stride 0": torch.full((), 0.75, dtype=dtype).expand(shape),
        "expanded": torch.randn((*shape[:-1], 1), generator=g, dtype=torch.float64).to(dtype).expand(shape),
        "transposed": torch.randn(shape[::-1], generator=g, dtype=torch.float64).to(dtype).permute(*range(rank - 1, -1, -1)),
    }


def transposed(x: Tensor) -> Tensor:
    """The same values in another order of memory."""
    if x.dim() < 2:
        return x.repeat_interleave(2)[::2]
    a, b = (0, 1) if x.dim() == 2 else (1, 2)
    return x.transpose(a, b).contiguous().transpose(a, b)
