"""Joint graphs of small models of each layer kind, and running them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from dsv4c import DeepseekV4, ModelConfig
from dsv4c.compile.capture import capture_model
from dsv4c.passes.verify.subject import Subject

KINDS: dict[str, dict[str, Any]] = {
    "swa-hash": {"compress_ratios": (0,), "num_hash_layers": 1, "indexer_kl_coef": 0.0},
    "swa-learned": {"compress_ratios": (0,), "num_hash_layers": 0, "indexer_kl_coef": 0.0},
    "csa-hash": {"compress_ratios": (4,), "num_hash_layers": 1},
    "csa-learned": {"compress_ratios": (4,), "num_hash_layers": 0},
    "hca-hash": {"compress_ratios": (8,), "num_hash_layers": 1, "indexer_kl_coef": 0.0},
    "hca-learned": {"compress_ratios": (8,), "num_hash_layers": 0, "indexer_kl_coef": 0.0},
    "csa-mtp": {"compress_ratios": (4, 0), "num_hash_layers": 0, "num_nextn_predict_layers": 1},
}
SEQ_LEN = 24


def config(kind: str, **changes: Any) -> ModelConfig:
    settings = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "index_topk": 3, **KINDS[kind], **changes}
    return ModelConfig.preset("tiny", **settings)


def build(kind: str, **changes: Any) -> DeepseekV4:
    """A model with random everything, so that no gradient is small because of how training begins."""
    torch.manual_seed(0)
    model = DeepseekV4(config(kind, **changes))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


@cache
def captured(kind: str, dtype: torch.dtype = torch.float32) -> tuple[DeepseekV4, Subject]:
    """Captured once; callers change a copy."""
    model = build(kind).to(dtype)
    return model, capture_model(model, seq_len=SEQ_LEN)


def copied(subject: Subject) -> GraphModule:
    return copy.deepcopy(subject.graph)


def run(graph: GraphModule, model: DeepseekV4, seed: int = 0) -> list[Tensor | None]:
    """The outputs and gradients of a joint graph on random tokens, every tangent 1."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab_size, (1, SEQ_LEN + 1), generator=g)
    inputs = iter((tokens[:, :-1], tokens[:, 1:]))
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    args = []
    for node in graph.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        if hasattr(desc, "target"):
            args.append(values[desc.target.removeprefix("model.")].detach())
        elif "Tangent" in type(desc).__name__:
            args.append(torch.ones(tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype))
        else:
            args.append(next(inputs))
    with torch.no_grad():
        found = torch.fx.Interpreter(graph).run(*args)
    return list(tree_leaves(found))
