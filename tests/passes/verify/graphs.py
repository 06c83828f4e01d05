"""Small graphs for the rules: a function traced to operators, as a user's forward graph or as a joint graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4c.compile.capture import capture_module
from dsv4c.passes.verify import Report, Subject, verify
from dsv4c.reach import Reach

bf16, f32 = torch.bfloat16, torch.float32


def traced(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    """A forward graph; its placeholders are called ``NAME_1`` after the arguments."""
    return make_fx(function, tracing_mode="fake")(*args)


def tensor(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


class Losses(nn.Module):
    """A module that returns what a function of it and of x returns; ``parts`` are its submodules."""

    def __init__(self, losses: Callable[..., dict[str, Tensor]], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.losses = losses

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.losses(self, x)


def joint(
    losses: Callable[..., dict[str, Tensor]], policies: Mapping[str, Reach], *, x: Tensor | None = None,
    routers: tuple[str, ...] = (), dtype: torch.dtype = f32, **parts: Any,
) -> Subject:  # fmt: skip
    """The joint graph of a module of one formula on x [2,4]."""
    module = Losses(losses, **parts).to(dtype)
    return capture_module(module, (torch.zeros(2, 4, dtype=dtype) if x is None else x,), policies, routers=routers)


def found(subject: Subject, rule: str) -> list[str]:
    """The messages of the violations of one rule."""
    return [v.message for v in verify(subject, (rule,)).violations]


def report(subject: Subject, rule: str) -> Report:
    return verify(subject, (rule,))
