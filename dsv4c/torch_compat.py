"""Every use of a private torch module, and the differences between the torch versions that the package supports.

Nothing else in the package imports ``torch._*``.  Private names move between releases: keeping them here means one file to
read when one does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import counters

RECOMPILE_LIMIT = 64  # one compiled block per layer kind, stage and shape; torch's own limit is 8


@dataclass(frozen=True)
class CompileCounts:
    """Totals of this process."""

    graphs: int
    graph_breaks: int


def compile_counts() -> CompileCounts:
    """How many graphs were compiled, and how many breaks were met."""
    return CompileCounts(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def allow_recompiles(limit: int = RECOMPILE_LIMIT) -> None:
    """Raise Dynamo's limit of compiled variants per code object: blocks of every kind share one ``forward``."""
    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)


@contextmanager
def inductor_settings(**settings: object) -> Iterator[None]:
    """Inductor settings inside this block."""
    with torch._inductor.config.patch(settings):
        yield


def reset_compiler() -> None:
    """Forget every compiled graph and the counts."""
    torch._dynamo.reset()
    counters.clear()
