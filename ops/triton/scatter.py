"""A row per query, by slot, spread out to a row by entry: what a kernel that goes through the entries in order looks up.

Ids do not repeat within a query, so that every place is written once and no atomic is needed.
"""

# mypy: disable-error-code="no-untyped-def"
# A kernel is typed by Triton's compiler.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scatter_kernel(
    ids_ptr, value_ptr, out_ptr, n_queries, n_tokens, first_query, n_chosen, n_entries,
    VALUES: tl.constexpr, MAX_CHOSEN: tl.constexpr,
):  # fmt: skip
    """``out[b,t - first_query,ids[b,t,i]] = value[b,t,i]``, or 1 without VALUES, for the ids of one query that are one."""
    row = tl.program_id(0).to(tl.int64)
    query = row // n_queries * n_tokens + first_query + row % n_queries
    slot = tl.arange(0, MAX_CHOSEN)
    ids = tl.load(ids_ptr + query * n_chosen + slot, mask=slot < n_chosen, other=-1)
    to = out_ptr + row * n_entries + ids
    if VALUES:
        tl.store(to, tl.load(value_ptr + query * n_chosen + slot, mask=ids >= 0, other=0.0), mask=ids >= 0)
    else:
        tl.store(to, tl.full([MAX_CHOSEN], 1, tl.uint8), mask=ids >= 0)


def scatter(ids: Tensor, values: Tensor | None, n_entries: int, first: int = 0, n_queries: int | None = None) -> Tensor:
    """[B,n_queries,P], 0 but where an entry is among ids [B,S,K] (-1 for none): its value [B,S,K] fp32, or 1 (uint8)."""
    batch, n_tokens, n_chosen = ids.shape
    n_queries = n_tokens if n_queries is None else n_queries
    dtype = torch.uint8 if values is None else torch.float32
    out = torch.zeros(batch, n_queries, n_entries, dtype=dtype, device=ids.device)
    if out.numel():
        _scatter_kernel[(batch * n_queries,)](
            ids, ids if values is None else values, out, n_queries, n_tokens, first, n_chosen, n_entries,
            VALUES=values is not None, MAX_CHOSEN=triton.next_power_of_2(n_chosen), num_warps=4,
        )  # fmt: skip
    return out
