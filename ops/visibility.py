"""Which tokens and which compressed entries a query may see.

A row of the batch holds documents one after another.  ``start[b,t]`` is the index of the first token of the document of
token t; ``entry_end[b,p]`` the index of the last token of the window that entry p compresses, or S where the row has fewer
entries.  Entries lie inside one document and stand in the order of their ends (specification, section 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

NOWHERE = float("-inf")


def window_mask(start: Tensor, first_query: int, first_key: int, n_keys: int, window: int) -> Tensor:
    """True where query t sees key s: ``max(start_t, t-W+1) <= s <= t``.

    ``start`` [B,T] belongs to the queries first_query..first_query+T-1; the result is [B,T,n_keys] bool for the keys
    first_key..first_key+n_keys-1.
    """
    t = torch.arange(first_query, first_query + start.shape[1], device=start.device)[None, :, None]
    s = torch.arange(first_key, first_key + n_keys, device=start.device)[None, None, :]
    return (s <= t) & (s > t - window) & (s >= start[:, :, None])


def entry_mask(start: Tensor, entry_end: Tensor, first_query: int) -> Tensor:
    """True where query t sees entry p: the entry is complete at t and of the same document, ``start_t <= end_p <= t``.

    ``start`` [B,T], ``entry_end`` [B,P]; the result is [B,T,P] bool.
    """
    t = torch.arange(first_query, first_query + start.shape[1], device=start.device)[None, :, None]
    end = entry_end[:, None, :]
    return (end <= t) & (end >= start[:, :, None])


def selected_mask(ids: Tensor, n_entries: int) -> Tensor:
    """True where entry p is among ``ids`` [B,T,K] (-1 for none); the result is [B,T,P] bool."""
    chosen = torch.zeros(*ids.shape[:2], n_entries + 1, dtype=torch.bool, device=ids.device)
    chosen.scatter_(-1, torch.where(ids < 0, n_entries, ids), True)
    return chosen[..., :n_entries]


def complete_windows(n_tokens: int, ratio: int, n_entries: int) -> int:
    """An upper bound of the entries that end within the first ``n_tokens`` of a row."""
    return min(n_entries, n_tokens // ratio) if ratio else 0


def query_blocks(n_queries: int, rows_per_query: int, target_rows: int = 1024) -> list[tuple[int, int]]:
    """Ranges of queries whose ``rows_per_query`` rows each make about ``target_rows`` rows of a matrix product."""
    size = max(8, target_rows // max(rows_per_query, 1))
    return [(t, min(t + size, n_queries)) for t in range(0, n_queries, size)]
