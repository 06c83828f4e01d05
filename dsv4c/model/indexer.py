"""The lightning indexer: which compressed entries a query attends to, and how it is taught (specification, section 5).

Its inputs are detached and top-k indices carry no gradient: only its own distillation loss trains it, and that loss trains
nothing else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4c import ops
from dsv4c.config import ModelConfig
from dsv4c.model.compressor import Compressor
from dsv4c.model.layout import LayerLayout
from dsv4c.model.precision import QUANTIZE, linear_wide, wide
from dsv4c.model.rope import rotate
from dsv4c.ops.precision import no_autocast


class Indexer(nn.Module):
    """``I_tp = sum_h w_th relu(<q_th, k_p>)`` and the best K of the entries that t may see.

    ``q = Had(rope(qr wq_b^T))`` [B,S,Hi,ci]; ``k = Had(rope(Compress(x)))`` [B,P,ci];
    ``w = (x weights_proj^T) ci^-0.5 Hi^-0.5`` [B,S,Hi].  The temperature cannot be seen by top-k and makes or breaks the
    distillation.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.width, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.rotates = config.indexer_hadamard
        self.qk_precision, self.proj_precision = config.indexer_qk_precision, config.indexer_proj_precision
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.width, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.compressor = Compressor(config, self.width, 4)

    @property
    def temperature(self) -> float:
        """``ci^-0.5 Hi^-0.5``: 1/90.5097 at 64 heads of 128."""
        return float(self.width**-0.5 * self.heads**-0.5)

    def forward(self, x: Tensor, query_latent: Tensor, at: LayerLayout, dense: bool) -> tuple[Tensor, Tensor]:
        """ids [B,S,min(K,P)] int64, -1 for none, and their scores in fp32; every visible entry where ``dense``."""
        x, query_latent = x.detach(), query_latent.detach()
        narrow, round_qk = QUANTIZE[self.proj_precision], QUANTIZE[self.qk_precision]
        q = F.linear(narrow(query_latent), narrow(self.wq_b.weight)).unflatten(-1, (self.heads, self.width))
        q = rotate(q, at.cos, at.sin)
        k = rotate(self.compressor(x, at), at.entry_cos, at.entry_sin)
        if self.rotates:
            q, k = ops.hadamard(q), ops.hadamard(k)
        w = linear_wide(narrow(x), narrow(self.weights_proj.weight)) * self.temperature
        n_entries = k.shape[1]
        topk = n_entries if dense or self.topk is None else self.topk
        return ops.indexer_topk(round_qk(q), round_qk(k), w, at.start, at.entry_end, topk, 4)


@torch.no_grad()
def captured_mass(q: Tensor, entries: Tensor, ids: Tensor | None, at: LayerLayout, scale: float) -> Tensor:
    """Share of the attention over all visible entries that falls on the selected ones; a scalar in [0, 1].

    The mean over heads and queries of ``sum_selected e^z / sum_visible e^z``.  Exact up to 65,536 query-entry pairs a row,
    beyond that over evenly spaced queries: it watches the selection and must not cost as much as attention.
    """
    n_tokens, n_entries = q.shape[1], entries.shape[1]
    n_queries = min(n_tokens, max(8, 65536 // max(n_entries, 1)))
    t = (torch.arange(n_queries, device=q.device) + 1) * n_tokens // n_queries - 1
    end = at.entry_end[:, None, :]
    visible = (end <= t[None, :, None]) & (end >= at.start[:, t, None]) & at.real[:, t, None]
    has_entry = visible.any(-1)
    if ids is None:
        return torch.ones((), device=q.device)
    chosen = torch.zeros(*visible.shape[:2], n_entries + 1, dtype=torch.bool, device=q.device)
    picked = ids[:, t]
    chosen = chosen.scatter(-1, torch.where(picked < 0, n_entries, picked), True)[..., :n_entries]
    with no_autocast(q):
        z = torch.einsum("bthc,bpc->bthp", wide(q[:, t]), wide(entries)) * scale
    z = z.masked_fill(~visible[:, :, None], float("-inf")).masked_fill(~has_entry[:, :, None, None], 0.0)
    share = (z.softmax(-1) * chosen[:, :, None]).sum(-1).mean(-1)
    n_rows = has_entry.sum()
    return torch.where(n_rows > 0, (share * has_entry).sum() / n_rows.clamp(min=1), 1.0)
