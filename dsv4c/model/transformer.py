"""The model: embedding, decoder layers on n residual streams, head, and the losses of what it is trained for.

Reads like sections 1 and 7 of the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsv4c.config import ModelConfig
from dsv4c.errors import ConfigError
from dsv4c.model import objectives
from dsv4c.model.block import Block, BlockFacts, MTPLayer
from dsv4c.model.hyper_connections import HyperHead
from dsv4c.model.inputs import checked_inputs
from dsv4c.model.layout import LayerLayout, Rows, layer_layout, rows
from dsv4c.model.norms import RMSNorm
from dsv4c.model.objectives import IGNORED, Counts, objective
from dsv4c.model.precision import activation_dtype, linear_wide

STAGES = ("dense", "indexer_warmup", "sparse")


def output_logits(hc_head: HyperHead, norm: RMSNorm, head: nn.Linear, streams: Tensor) -> Tensor:
    """``float(RMS_w(HChead(X))) float(head)^T`` [B,S,V] in fp32."""
    return linear_wide(norm(hc_head(streams)), head.weight)


def output_loss(hc_head: HyperHead, norm: RMSNorm, head: nn.Linear, streams: Tensor, targets: Tensor) -> Tensor:
    """Sum over targets [B,S] of the cross-entropy ``logsumexp(logits) - logits[target]``, in fp32; -100 is ignored.

    Written out of operators that have a gradient on the meta device too: ``F.cross_entropy`` has none there, and a captured
    graph would show a model that the language-model loss does not train.
    """
    logits = output_logits(hc_head, norm, head, streams)
    picked = logits.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return (logits.logsumexp(-1) - picked).masked_fill(targets == IGNORED, 0.0).sum()


@dataclass
class ModelOutput:
    """What a forward returns.

    ``losses``: one fp32 scalar per objective that is on, coefficient included; the training loss is their sum.
    ``metrics``: detached; ``mtp`` and ``indexer_kl`` without their coefficients, ``seq_balance`` (mean over learned
    routers, coefficient included), ``captured_mass``, ``expert_load`` [layers,E].
    ``logits`` [B,S,V] fp32, only without targets.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


class DeepseekV4(nn.Module):
    """A DeepSeek-V4 model of ``config`` on the default device (``torch.device("meta")`` works)."""

    layers: nn.ModuleList
    mtp: nn.ModuleList
    output_loss: Callable[..., Tensor]  # compiled in place

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.stage = "sparse"
        self.mtp_loss_coef = config.mtp_loss_coef  # a schedule may lower it during a run
        self.is_compiled = False
        self.compiler: Any = None  # of a compiled model: says what the passes did
        kinds = config.layer_kinds
        depth = config.num_hidden_layers
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, kind) for kind in kinds[:depth])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.keep_fp32_parameters)
        self.hc_head = HyperHead(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = nn.ModuleList(MTPLayer(config, kind) for kind in kinds[depth:])
        self.output_loss = output_loss
        self.reset_parameters()
        self.set_stage("sparse")

    def reset_parameters(self) -> None:
        """Initialise as for training from scratch (specification, sections 1.4, 3, 4, 6)."""
        std = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif module is not self and (reset := getattr(module, "reset_parameters", None)):
                takes_std = reset.__code__.co_argcount == 2
                reset(std) if takes_std else reset()

    def set_stage(self, stage: str) -> None:
        """Choose what is trained: ``dense`` (all entries visible, no indexer), ``indexer_warmup`` (all entries visible,
        only the indexer trains), ``sparse`` (the indexer selects, everything trains).

        The indexer is frozen while its objective is off: nothing else could give it a gradient.
        """
        if stage not in STAGES:
            raise ConfigError(f"there is no training stage {stage!r}", allowed=", ".join(STAGES), do="choose one of these")
        if stage == "indexer_warmup" and not self.config.trains_indexer:
            raise ConfigError(
                "the indexer warm-up has nothing to train: indexer_kl_coef is 0", where="stage indexer_warmup",
                allowed="indexer_kl_coef > 0", do="set indexer_kl_coef, or leave the stage out",
            )  # fmt: skip
        self.stage = stage
        for name, parameter in self.named_parameters():
            indexer = ".indexer." in name
            on = self.config.trains_indexer and stage != "dense" if indexer else stage != "indexer_warmup"
            parameter.requires_grad_(on)

    @property
    def blocks(self) -> tuple[Block | MTPLayer, ...]:
        """Every decoder layer, then the MTP layer."""
        return (*self.layers, *self.mtp)

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objectives that are on in this stage."""
        return tuple(n for n in self.config.objectives if n != "indexer_kl" or self.stage != "dense")

    def set_recompute(self, layers: str | Iterable[int]) -> None:
        """Recompute activations in the backward pass: ``"off"``, ``"all"``, or indices of layers (the MTP layer is last)."""
        chosen = {"off": set(), "all": set(range(len(self.blocks)))}.get(layers) if isinstance(layers, str) else set(layers)
        if chosen is None or not chosen <= set(range(len(self.blocks))):
            raise ConfigError(
                f"activation checkpointing of {layers!r}", allowed=f"off, all, or layer indices 0..{len(self.blocks) - 1}",
                do="correct the list",
            )  # fmt: skip
        for i, layer in enumerate(self.blocks):
            layer.recompute = i in chosen

    def forward(
        self,
        input_ids: Tensor | None = None,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        counts: Counts | None = None,
        **other: Any,
    ) -> ModelOutput:
        """Losses and metrics for ``targets``, or logits without them.

        input_ids [B,S] int64; targets [B,S], ``targets[t]`` the token to predict at position t, already shifted, -100
        ignored; document_ids [B,S]: runs of one id are documents that do not see each other; padding_mask [B,S] bool,
        True for real tokens; position_ids [B,S] for the rotary embedding (default: within the document).  ``counts``: what
        the losses are divided by, where this is one micro-batch of several (default: counted here).
        """
        ids = checked_inputs(self.config, input_ids, targets, document_ids, padding_mask, position_ids, other)
        at = rows(ids, document_ids, padding_mask, position_ids)
        layouts = {m: layer_layout(at, self.config, m) for m in sorted(set(self.config.compress_ratios))}
        dense, teach = self.stage != "sparse", targets is not None and self.stage != "dense"

        embedded = self.embed(ids)
        streams = embedded.to(activation_dtype(embedded))[:, :, None].expand(-1, -1, self.config.hc_mult, -1).contiguous()
        facts: list[BlockFacts] = []
        for layer, kind in zip(self.layers, self.config.layer_kinds, strict=False):
            streams, fact = layer(streams, ids, layouts[kind.ratio], dense, teach)
            facts.append(fact)
        if targets is None:
            return ModelOutput(logits=output_logits(self.hc_head, self.norm, self.head, streams))

        n = counts or Counts(*(objectives.over_batch(c) for c in objectives.count(targets, at)))
        sums = {"lm": self.output_loss(self.hc_head, self.norm, self.head, streams, objectives.lm_targets(targets, at))}
        mtp_facts: list[BlockFacts] = []
        if self.config.predicts_two_ahead:
            sums["mtp"], mtp_facts = self._predict_two_ahead(ids, targets, streams, at, layouts[0])
        return self._output(sums, facts, mtp_facts, n)

    def _predict_two_ahead(
        self, ids: Tensor, targets: Tensor, streams: Tensor, at: Rows, layout: LayerLayout
    ) -> tuple[Tensor, list[BlockFacts]]:
        """Sum of the MTP layer's cross-entropies, and what the layer reports."""
        (layer,) = self.mtp
        assert isinstance(layer, MTPLayer)
        next_ids = objectives.shifted(ids, 0)
        next_embedding = self.embed(next_ids).to(streams.dtype)
        layout = layout._replace(real=objectives.has_next(at))
        streams, fact = layer(streams, next_embedding, next_ids, layout)
        wanted = objectives.mtp_targets(targets, at)
        return self.output_loss(layer.hc_head, layer.norm, self.head, streams, wanted), [fact]

    def _output(
        self, sums: dict[str, Tensor], facts: list[BlockFacts], mtp_facts: list[BlockFacts], n: Counts
    ) -> ModelOutput:
        """Means and coefficients: sums of a micro-batch over counts of the whole batch."""
        c = self.config
        losses: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        with objective("lm"):
            losses["lm"] = objectives.mean(sums["lm"], n.lm)
        if "mtp" in sums:
            mtp = objectives.mean(sums["mtp"], n.mtp)
            metrics["mtp"] = mtp.detach()
            with objective("mtp"):
                losses["mtp"] = mtp * (self.mtp_loss_coef / c.num_nextn_predict_layers)
        if c.balances_routing:
            pairs = [(f.balance, n.documents) for f in facts] + [(f.balance, n.mtp_documents) for f in mtp_facts]
            terms = torch.stack([objectives.mean(b, m) for b, m in pairs if b is not None]) * c.seq_balance_loss_coef
            metrics["seq_balance"] = terms.detach().mean()
            with objective("seq_balance"):
                losses["seq_balance"] = terms.sum()
        kl = [f.indexer_kl for f in facts if f.indexer_kl is not None]
        if kl:
            total = objectives.mean(torch.stack(kl).sum(), n.queries)
            metrics["indexer_kl"] = total.detach()
            with objective("indexer_kl"):
                losses["indexer_kl"] = total * c.indexer_kl_coef
        captured = [f.captured_mass for f in facts if f.captured_mass is not None]
        if captured:
            metrics["captured_mass"] = torch.stack(captured).mean()
        metrics["expert_load"] = torch.stack([f.load for f in (*facts, *mtp_facts)]).detach()
        return ModelOutput(losses, metrics)

    @torch.no_grad()
    def update_router_bias(self, load: Tensor) -> None:
        """``bias_e += rate sign(mean load - load_e)`` in every learned router; once per optimiser step.

        load [layers,E]: real tokens of the whole batch sent to each expert, as in ``metrics["expert_load"]``.  Hash layers
        have no bias and are passed over.  Nothing changes under forced routing, which says nothing about the router, and in
        the indexer's warm-up, in which everything else is frozen.
        """
        if self.config.force_balanced_routing or self.stage == "indexer_warmup":
            return
        for layer, row in zip(self.blocks, load, strict=False):
            gate = layer.ffn.gate
            if not gate.hashed:
                gate.bias += self.config.router_bias_update_rate * torch.sign(row.mean() - row).to(gate.bias.dtype)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> DeepseekV4:
        """Read safetensors in the Hugging Face or released layout, ``config.json`` beside them."""
        from dsv4c.weights import from_pretrained

        return from_pretrained(folder, **options)

    def save_pretrained(self, folder: str | Path, layout: str = "hf", **options: Any) -> None:
        """Write safetensors and ``config.json`` in the ``"hf"`` or ``"released"`` layout."""
        from dsv4c.weights import save_pretrained

        save_pretrained(self, folder, layout=layout, **options)
