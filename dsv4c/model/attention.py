"""Attention of every layer kind: window, compressed entries and sink in one softmax (specification, section 3).

One latent is key and value, so a rotated key is a rotated value: the output carries the positions of what it read and is
rotated back to the query's own before the output projection.  Every path goes through :meth:`Attention.project`, which is
the only place that does it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv4c import ops
from dsv4c.config import LayerKind, ModelConfig
from dsv4c.model.compressor import Compressor
from dsv4c.model.indexer import Indexer, captured_mass
from dsv4c.model.layout import LayerLayout
from dsv4c.model.norms import RMSNorm, rms
from dsv4c.model.objectives import objective
from dsv4c.model.precision import QUANTIZE, KeepsFp32
from dsv4c.model.rope import rotate


class AttentionFacts(NamedTuple):
    """What a CSA layer reports beside its output; None in other layers, or while the indexer is not in use."""

    indexer_kl: Tensor | None  # sum over real queries of the distillation loss
    captured_mass: Tensor | None  # share of the attention over visible entries that falls on the selected ones


class GroupedLinear(nn.Linear):
    """``y[a] = x[a] W[a g:(a+1) g]^T`` for each of G groups; x [B,S,G,d], weight [Gg,d], y [B,S,Gg]."""

    def __init__(self, groups: int, width_in: int, width_out: int) -> None:
        super().__init__(width_in, groups * width_out, bias=False)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.unflatten(0, (self.groups, -1))
        return torch.einsum("bsad,agd->bsag", x, weight).flatten(2)


class Attention(KeepsFp32):
    """x [B,S,D] (normed) -> y [B,S,D], and what the layer reports."""

    fp32_parameters = ("attn_sink",)

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__()
        self.heads, self.width, self.window = config.num_attention_heads, config.head_dim, config.sliding_window
        self.groups, self.eps, self.ratio = config.o_groups, config.rms_norm_eps, kind.ratio
        self.rotary, self.kv_precision = config.qk_rope_head_dim, config.attention_kv_precision
        self.trains_indexer, self.target = config.trains_indexer, config.indexer_kl_target
        self.keep_fp32 = config.keep_fp32_parameters
        d, q, full = config.hidden_size, config.q_lora_rank, config.num_attention_heads * config.head_dim
        self.wq_a = nn.Linear(d, q, bias=False)
        self.q_norm = RMSNorm(q, self.eps, self.keep_fp32)
        self.wq_b = nn.Linear(q, full, bias=False)
        self.wkv = nn.Linear(d, self.width, bias=False)
        self.kv_norm = RMSNorm(self.width, self.eps, self.keep_fp32)
        self.attn_sink = nn.Parameter(torch.empty(self.heads))
        self.wo_a = GroupedLinear(self.groups, full // self.groups, config.o_lora_rank)
        self.wo_b = nn.Linear(self.groups * config.o_lora_rank, d, bias=False)
        self.compressor = Compressor(config, self.width, kind.ratio) if kind.ratio else None
        self.indexer = Indexer(config) if kind.attention == "csa" else None

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.attn_sink)

    @property
    def scale(self) -> float:
        """``c^-0.5`` and nothing else: queries and keys are normed, so YaRN's magnitude factor has no place here (B04)."""
        return float(self.width**-0.5)

    def latent(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """A normed latent, rotated to its position; its plain channels rounded where quantisation-aware training asks."""
        if self.kv_precision != "full":
            plain = x[..., : -self.rotary]
            x = torch.cat((QUANTIZE[self.kv_precision](plain), x[..., -self.rotary :]), -1)
        return rotate(x, cos, sin)

    def project(self, o: Tensor, at: LayerLayout) -> Tensor:
        """Rotate the output back to its query's position, then project it by groups of heads."""
        o = rotate(o, at.cos, at.sin, inverse=True)
        return self.wo_b(self.wo_a(o.flatten(2).unflatten(2, (self.groups, -1))))

    def forward(self, x: Tensor, at: LayerLayout, dense: bool, teach: bool) -> tuple[Tensor, AttentionFacts]:
        """``dense``: attend to every visible entry; ``teach``: form the indexer's loss and watch its choice."""
        query_latent = self.q_norm(self.wq_a(x))
        q = rms(self.wq_b(query_latent).unflatten(-1, (self.heads, self.width)), self.eps).to(x.dtype)
        q = rotate(q, at.cos, at.sin)
        kv = self.latent(self.kv_norm(self.wkv(x)), at.cos, at.sin)
        entries = kv[:, :0]
        if self.compressor is not None:
            entries = self.latent(self.compressor(x, at), at.entry_cos, at.entry_sin)
        chosen, ids, scores = self.select(x, query_latent, at, entries.shape[1], dense, teach)
        o, lse = ops.sparse_attention(
            q, kv, entries, self.attn_sink, at.start, at.entry_end, chosen, self.scale, self.window, self.ratio
        )
        facts = self.report(q.detach(), entries.detach(), chosen, ids, scores, lse.detach(), at, teach)
        return self.project(o, at), facts

    def select(
        self, x: Tensor, query_latent: Tensor, at: LayerLayout, n_entries: int, dense: bool, teach: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The entries to attend to (None: all that are visible), and the indexer's own ids and scores if it ran."""
        if self.indexer is None or n_entries == 0:
            return None, None, None
        keeps_all = dense or self.indexer.topk is None or self.indexer.topk >= n_entries
        if keeps_all and not (teach and self.trains_indexer):
            return None, None, None
        ids, scores = self.indexer(x, query_latent, at, dense)
        return (None if keeps_all else ids), ids, scores

    def report(
        self, q: Tensor, entries: Tensor, chosen: Tensor | None, ids: Tensor | None, scores: Tensor | None, lse: Tensor,
        at: LayerLayout, teach: bool,
    ) -> AttentionFacts:  # fmt: skip
        """The indexer's loss and the watch on its choice, from detached copies of what the attention used."""
        if self.indexer is None or not teach:
            return AttentionFacts(None, None)
        watched = chosen
        if chosen is None and ids is not None:  # attention is dense: what would the indexer's best K capture?
            watched = ids[..., : self.indexer.topk]
        share = captured_mass(q, entries, watched, at, self.scale)
        if not self.trains_indexer:
            return AttentionFacts(None, share)
        if ids is None or scores is None:  # no entry exists yet: every row contributes 0
            return AttentionFacts(lse.new_zeros(()), share)
        joint = lse if self.target == "joint" else None
        with objective("indexer_kl"):
            target = ops.indexer_kl_target(q, entries, ids, joint, self.scale, self.ratio)
            loss = ops.indexer_kl(target, scores, at.real)[0]
        return AttentionFacts(loss, share)
