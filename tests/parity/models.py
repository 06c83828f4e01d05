"""The specification's tiny model with random everything, so that no term hides, and batches for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv4c import DeepseekV4, ModelConfig

WIDE = ("base", "scale", "attn_sink", "sinks", "ape", "position_bias")


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Norms 1 + 0.1 N; base, scale, sink and ape 0.5 N; all else 0.1 N, router bias included; k distinct experts per id.

    For our model and for transformers'.
    """
    g = torch.Generator().manual_seed(seed)
    biases = [(name, b) for name, b in model.named_buffers() if name.endswith("bias")]
    with torch.no_grad():
        for name, p in (*model.named_parameters(), *biases):
            noise = torch.randn(p.shape, generator=g)
            p.copy_(1 + 0.1 * noise if "norm" in name else noise * (0.5 if name.endswith(WIDE) else 0.1))
        for gate in model.modules():
            table = getattr(gate, "tid2eid", None)
            if table is not None:
                lots = torch.rand(len(table), len(gate.weight), generator=g)
                table.copy_(lots.topk(table.shape[1], -1).indices)


def tiny(seed: int = 0, **changes: object) -> DeepseekV4:
    """The preset with the specification's vocabulary of 96 and top-3, in fp32."""
    model = DeepseekV4(ModelConfig.preset("tiny", **({"vocab_size": 96, "index_topk": 3} | changes)))
    randomize(model, seed)
    return model


class Batch(NamedTuple):
    """The arguments of a forward."""

    input_ids: Tensor
    targets: Tensor
    document_ids: Tensor | None = None
    padding_mask: Tensor | None = None


def tokens(n_tokens: int, batch: int = 2, vocabulary: int = 96, seed: int = 0) -> Batch:
    """Random tokens and what follows them."""
    text = torch.randint(0, vocabulary, (batch, n_tokens + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def distance(a: Tensor, b: Tensor) -> float:
    """``|a - b| / |b|``; 0 where both are zero."""
    difference = float((a.double() - b.double()).norm().detach())
    return difference / float(b.double().norm().detach()) if difference else 0.0


def gradient_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], name: str) -> float:
    """``|found - wanted| / |wanted|`` of one parameter's gradient, which is not zero.

    A hyper-connection's scale is one or three numbers, each a sum over all tokens and streams that may nearly cancel: its
    rounding alone can then be above 1e-4 in fp32. It is measured against ``|scale and base|``.
    """
    error, size = float((found[name] - wanted[name]).norm()), float(wanted[name].norm())
    return error / math.hypot(
        size, float(wanted[name.removesuffix("scale") + "base"].norm()) if name.endswith("scale") else 0.0
    )
