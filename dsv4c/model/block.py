"""The layers: what is compiled, verified and lowered. Layers of one kind share their code (specification, sections 1, 7)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dsv4c.config import LayerKind, ModelConfig
from dsv4c.model.attention import Attention
from dsv4c.model.hyper_connections import HyperConnection, HyperHead
from dsv4c.model.layout import LayerLayout
from dsv4c.model.moe import MoE
from dsv4c.model.norms import RMSNorm


class BlockFacts(NamedTuple):
    """What a layer reports beside its streams; None for what it does not have."""

    indexer_kl: Tensor | None
    captured_mass: Tensor | None
    balance: Tensor | None
    load: Tensor


def _keep_choices(_ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Recompute everything but choices: a near-tie that falls the other way would change the shapes behind it (B45)."""
    aten, ours = torch.ops.aten, torch.ops.dsv4  # the references choose by aten's
    chooses = op in (ours.route.default, ours.indexer_topk.default, aten.topk.default, aten.sort.stable)
    return CheckpointPolicy.MUST_SAVE if chooses else CheckpointPolicy.PREFER_RECOMPUTE


class _Layer(nn.Module):
    """Attention, then experts, each between a hyper-connection's pre and post."""

    ffn: MoE

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__()
        self.recompute = False
        eps, keep = config.rms_norm_eps, config.keep_fp32_parameters
        self.hc_attn = HyperConnection(config)
        self.attn_norm = RMSNorm(config.hidden_size, eps, keep)
        self.attn = Attention(config, kind)
        self.hc_ffn = HyperConnection(config)
        self.ffn_norm = RMSNorm(config.hidden_size, eps, keep)
        self.ffn = MoE(config, kind)

    def run(
        self, streams: Tensor, token_ids: Tensor, at: LayerLayout, dense: bool, teach: bool
    ) -> tuple[Tensor, BlockFacts]:
        """streams [B,S,n,D] -> streams [B,S,n,D], recomputed in the backward pass where that is asked for."""
        if self.recompute and torch.is_grad_enabled():
            with _casts_again(streams):
                return checkpoint(
                    self.body, streams, token_ids, at, dense, teach, use_reentrant=False, context_fn=_selective
                )
        return self.body(streams, token_ids, at, dense, teach)

    def body(
        self, streams: Tensor, token_ids: Tensor, at: LayerLayout, dense: bool, teach: bool
    ) -> tuple[Tensor, BlockFacts]:
        u, post, comb = self.hc_attn.pre(streams)
        y, attention = self.attn(self.attn_norm(u), at, dense, teach)
        streams = self.hc_attn.post(y, streams, post, comb)
        u, post, comb = self.hc_ffn.pre(streams)
        y, experts = self.ffn(self.ffn_norm(u), token_ids, at)
        return self.hc_ffn.post(y, streams, post, comb), BlockFacts(*attention, *experts)


def _casts_again(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast without its cache of cast weights: recomputation finds that empty and would run other operations."""
    kind = x.device.type
    if torch.compiler.is_compiling() or x.is_meta or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keep_choices)


class Block(_Layer):
    """One decoder layer; :class:`dsv4c.model.attention.Attention` explains ``dense`` and ``teach``."""

    def forward(
        self, streams: Tensor, token_ids: Tensor, at: LayerLayout, dense: bool, teach: bool
    ) -> tuple[Tensor, BlockFacts]:
        """streams [B,S,n,D] -> streams [B,S,n,D]."""
        return self.run(streams, token_ids, at, dense, teach)


class MTPLayer(_Layer):
    """The multi-token prediction layer: a block of its own on ``e_proj(E) + h_proj(X_j)`` for every stream j (section 7)."""

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__(config, kind)
        d, eps, keep = config.hidden_size, config.rms_norm_eps, config.keep_fp32_parameters
        self.e_proj = nn.Linear(d, d, bias=False)
        self.h_proj = nn.Linear(d, d, bias=False)
        self.enorm = RMSNorm(d, eps, keep)
        self.hnorm = RMSNorm(d, eps, keep)
        self.norm = RMSNorm(d, eps, keep)
        self.hc_head = HyperHead(config)

    def combine(self, streams: Tensor, next_embedding: Tensor) -> Tensor:
        """streams [B,S,n,D] of position t with the embedding [B,S,D] of token t+1."""
        return self.e_proj(self.enorm(next_embedding))[:, :, None] + self.h_proj(self.hnorm(streams))

    def forward(
        self, streams: Tensor, next_embedding: Tensor, next_ids: Tensor, at: LayerLayout
    ) -> tuple[Tensor, BlockFacts]:
        """Streams [B,S,n,D] of position t to streams that predict token t+2."""
        return self.run(self.combine(streams, next_embedding), next_ids, at, False, False)
