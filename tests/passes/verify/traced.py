"""Small graphs for the rules: a function of tensors on the meta device, traced to operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4c.passes.verify import RULES, Report, Subject, verify
from tests.passes.verify.mutation import subject

B, S, H, C, R, RATIO, P, K = 2, 16, 3, 8, 4, 4, 4, 2


def graph(function: Callable[..., Any], *args: Any, mode: str = "fake", stage: str = "joint") -> Subject:
    """The function's graph; ``mode="symbolic"`` keeps the sizes of its inputs symbolic."""
    return Subject("graph", make_fx(function, tracing_mode=mode)(*args), stage)


def report(rule: str, function: Callable[..., Any], *args: Any, mode: str = "fake", stage: str = "joint") -> Report:
    assert rule in RULES
    return verify(graph(function, *args, mode=mode, stage=stage), [rule])


def messages(found: Report) -> list[str]:
    return [v.message for v in found.violations]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def whole(*shape: int) -> Tensor:
    return numbers(*shape, dtype=torch.int64)


@cache
def model(kind: str, *, symbolic: bool = False, recompute: bool = False) -> Subject:
    """A right model of :data:`tests.passes.verify.mutation.CONFIGS`, captured once for all rules."""
    return subject(kind, symbolic=symbolic, recompute=recompute)
