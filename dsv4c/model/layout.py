"""Where every token of a batch stands: its document, its position, and the windows that become compressed entries.

Computed once per forward from the document ids and the padding mask; every block reads it, so that window, compressor,
indexer, MTP and losses cannot disagree about what belongs together.  Padding is a document of its own that nothing reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4c.config import ModelConfig
from dsv4c.model.rope import inverse_frequencies, tables


class Rows(NamedTuple):
    """Facts about tokens [B,S]."""

    start: Tensor  # int64: index of the first token of the token's document
    end: Tensor  # int64: index of its last token
    real: Tensor  # bool: False for padding
    positions: Tensor  # int64: rotary position


class LayerLayout(NamedTuple):
    """What a layer with a given compress ratio m reads: P = floor(S/m) entries at most."""

    start: Tensor  # [B,S]
    end: Tensor  # [B,S]
    real: Tensor  # [B,S]
    cos: Tensor  # [B,S,r/2] of the layer's own table
    sin: Tensor
    entry_end: Tensor  # [B,P] index of the last token of the entry's window; S where the row has fewer entries
    entry_has_previous: Tensor  # [B,P] bool: the entry's document has a window before it
    entry_cos: Tensor  # [B,P,r/2] at the first token of the entry's window
    entry_sin: Tensor


def rows(input_ids: Tensor, document_ids: Tensor | None, padding_mask: Tensor | None, position_ids: Tensor | None) -> Rows:
    """Split the rows into runs of one document id and one padding value."""
    batch, n_tokens = input_ids.shape
    index = torch.arange(n_tokens, device=input_ids.device).expand(batch, n_tokens)
    real = torch.ones_like(input_ids, dtype=torch.bool) if padding_mask is None else padding_mask
    begins = index == 0
    for key in (document_ids, padding_mask):
        if key is not None:
            begins = begins | torch.cat((begins[:, :1], key[:, 1:] != key[:, :-1]), 1)
    start = torch.where(begins, index, 0).cummax(1).values
    ends = torch.cat((begins[:, 1:], torch.ones_like(begins[:, :1])), 1)
    end = torch.where(ends, index, n_tokens - 1).flip(1).cummin(1).values.flip(1)
    return Rows(start, end, real, index - start if position_ids is None else position_ids)


def layer_layout(at: Rows, config: ModelConfig, ratio: int) -> LayerLayout:
    """The layout of the layers with this ratio.

    Windows start at the first token of a document; its last ``length mod m`` tokens are in no entry; an entry stands at
    the position of its window's first token (specification, section 4).
    """
    inv_freq = inverse_frequencies(config, ratio, at.start.device)
    n_tokens = at.start.shape[1]
    n_entries = n_tokens // ratio if ratio else 0
    index = torch.arange(n_tokens, device=at.start.device)
    within = index - at.start
    done = ((within + 1) % ratio == 0) & at.real if ratio else torch.zeros_like(at.real)
    wanted = torch.arange(1, n_entries + 1, device=at.start.device).expand(len(at.start), n_entries)
    entry_end = torch.searchsorted(done.cumsum(1), wanted.contiguous())
    last = entry_end.clamp(max=n_tokens - 1)
    first = (last - ratio + 1).clamp(min=0)
    return LayerLayout(
        at.start,
        at.end,
        at.real,
        *tables(at.positions, inv_freq),
        entry_end,
        within.gather(1, last) >= 2 * ratio - 1,
        *tables(at.positions.gather(1, first), inv_freq),
    )
