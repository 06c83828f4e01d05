"""A model with one layer of each kind in place of all layers (architecture, rule 8).

Layers of a kind run the same code on parameters of the same shapes, so that a graph with each kind once shows everything
that a graph of the whole model shows, at the cost of its kinds: 43 layers of Flash are five.  Layers keep their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import pairwise

from torch import nn

from dsv4c.config import ModelConfig
from dsv4c.errors import ConfigError
from dsv4c.model.transformer import DeepseekV4

MTP = "mtp"


def kinds(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The layers of every kind, in the order of the first of them; the MTP layer is a kind of its own, with number 0."""
    found: dict[str, tuple[int, ...]] = {}
    for i, kind in enumerate(config.layer_kinds[: config.num_hidden_layers]):
        found[kind.name] = (*found.get(kind.name, ()), i)
    return found | ({MTP: (0,)} if config.predicts_two_ahead else {})


def with_kinds(model: DeepseekV4, chosen: Sequence[str] | None = None) -> DeepseekV4:
    """The same model with the first layer of each kind (of these kinds): its own layers, under their own numbers.

    The MTP layer stands on a trunk: alone, on the model's first layer.  Raises ConfigError for a kind that there is not.
    """
    config, known = model.config, kinds(model.config)
    names = tuple(known) if chosen is None else tuple(chosen)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"this model has no layer of kind {name!r}", allowed=", ".join(known), do="choose one of these"
            )
    numbers = sorted({known[n][0] for n in names if n != MTP}) or [0]
    has_indexer = any(config.layer_kinds[i].attention == "csa" for i in numbers)
    small = copy(model)
    small._modules = dict(model._modules)
    small.config = config.replace(
        num_hidden_layers=len(numbers), num_hash_layers=sum(i < config.num_hash_layers for i in numbers),
        compress_ratios=(*(config.compress_ratios[i] for i in numbers), *(0,) * (MTP in names)),
        num_nextn_predict_layers=int(MTP in names), indexer_kl_coef=config.indexer_kl_coef if has_indexer else 0.0,
    )  # fmt: skip
    small.layers = nn.ModuleList()
    for number in numbers:
        small.layers.add_module(str(number), model.layers[number])
    if MTP not in names:
        small.mtp = nn.ModuleList()
    return small


def stands_for(config: ModelConfig, chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """One line for each kind: the layer that is looked at and the layers that it stands for."""
    lines = []
    for name, numbers in kinds(config).items():
        if chosen is not None and name not in chosen:
            continue
        if name == MTP:
            lines.append("mtp.0 is looked at itself")
        elif len(numbers) == 1:
            lines.append(f"layers.{numbers[0]} ({name}) is looked at itself")
        else:
            lines.append(
                f"layers.{numbers[0]} ({name}) stands for layers {_ranges(numbers)}: {len(numbers)} with the same code"
            )
    return tuple(lines)


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0, 1`` or ``4, 6, ..., 42``: evenly spaced numbers shortened."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 4 and len(steps) == 1:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    return ", ".join(map(str, numbers))
