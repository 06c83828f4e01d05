"""A pass, what it leaves in the log, and what a graph looks like before and after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch.fx import Graph, GraphModule

from dsv4c.passes.graph import op_name
from dsv4c.passes.verify.subject import Subject

View = Callable[[GraphModule], GraphModule]


class Make(Protocol):
    """Reads a graph anew, or what ``view`` makes of it: a fusion puts other nodes in the place of gradients and outputs."""

    def __call__(self, view: View | None = None) -> Subject: ...


@dataclass(frozen=True)
class Pass:
    """``kind`` is ``verify``, ``fuse`` or ``place``; ``run`` changes the graph in place or raises, and says what it did.

    ``stages``: ``joint`` before any pass of Inductor's, ``forward`` and ``backward`` as they go to code generation.
    """

    name: str
    kind: str
    promises: str
    stages: tuple[str, ...]
    run: Callable[[Make], Did]


@dataclass(frozen=True)
class Did:
    """What a pass did: places matched or checked by name, and remarks."""

    matches: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """One line of the log."""

    number: int
    region: str
    stage: str
    name: str
    kind: str
    seconds: float
    matches: Mapping[str, int]
    operators: Mapping[str, int]  # operator -> how many more there are than before
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = ", ".join(f"{n} {k}" if k else str(n) for k, n in self.matches.items() if n) or "nothing"
        change = ", ".join(f"{k} {n:+d}" for k, n in self.operators.items())
        parts = [f"{self.number:3d}  {self.region}/{self.stage}  {self.name}: {found}  {self.seconds * 1e3:.0f} ms"]
        return "  ".join([*parts, *([f"[{change}]"] if change else []), *self.remarks])


def operators(graph: Graph) -> Counter[str]:
    return Counter(op_name(node) for node in graph.nodes if node.op == "call_function")


def changes(before: Counter[str], module: GraphModule) -> dict[str, int]:
    after = operators(module.graph)
    return {k: after[k] - before[k] for k in sorted(before.keys() | after.keys()) if after[k] != before[k]}
