"""Verification of a model, of any module, and of a user's graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from dsv4c.compile.capture import capture_model, capture_module
from dsv4c.config import ModelConfig
from dsv4c.model.transformer import DeepseekV4
from dsv4c.passes.verify import Report, Subject, verify
from dsv4c.reach import Reach


def verify_model(
    model_or_config: DeepseekV4 | ModelConfig, *, seq_len: int, batch_size: int = 1, rules: Iterable[str] | None = None
) -> Report:
    """The verdict on a model of any size; a config is built on the meta device, where it takes no memory.

    Raises ConfigError for a rule that there is not.
    """
    model = model_or_config
    if isinstance(model, ModelConfig):
        with torch.device("meta"):
            model = DeepseekV4(model)
    return verify(capture_model(model, seq_len=seq_len, batch_size=batch_size), rules)


def verify_module(
    module: nn.Module, args: tuple[Any, ...], policy: Mapping[str, Reach], *, rules: Iterable[str] | None = None,
    router: tuple[str, ...] = (),
) -> Report:  # fmt: skip
    """The verdict on any module whose forward returns a dict of scalar losses.

    ``policy``: for each objective what its gradient may and must reach, as glob patterns over parameter names; ``router``:
    glob patterns over the names of router weights.
    """
    return verify(capture_module(module, args, policy, routers=router), rules)


def verify_graph(gm: GraphModule, *, rules: Iterable[str] | None = None, router: tuple[str, ...] = ()) -> Report:
    """The verdict on a user's own graph whose nodes carry ``meta["val"]``: the rules that need no tangents.

    ``router``: names of the placeholders, or module paths, that are router weights.
    """
    return verify(Subject("graph", gm, routers=router), rules)
