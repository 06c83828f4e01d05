"""Chains of operators as data, and finding them in a graph.

A pattern is written the way the chain reads, from its last operator to its first.  A match that fails says how far it came
and what differed there, so that a chain which should have matched and did not can be explained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from dsv4c.passes.graph import argument, describe, op_name

_SAME = ("aten.alias", "aten.detach")  # the value itself: what a detach leaves behind


@dataclass(frozen=True)
class Any_:
    """Anything; where a name is met a second time, the same thing again."""

    name: str


@dataclass(frozen=True)
class Item:
    """Output ``index`` of an operator that has several."""

    of: Any
    index: int
    name: str = ""


@dataclass(frozen=True)
class Either:
    """One of several ways to write the same; the first that matches."""

    ways: tuple[Any, ...]


@dataclass(frozen=True)
class Op:
    """An operator with these arguments, by their names in its schema; arguments not named may be anything."""

    op: str
    args: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __hash__(self) -> int:
        return hash((self.op, self.name))


@dataclass(frozen=True)
class Miss:
    """Where a match ended: how many parts agreed before, the node that did not, and what differed."""

    agreed: int
    node: Node | None
    difference: str

    def __str__(self) -> str:
        return f"{self.difference}\n           {describe(self.node)}" if self.node is not None else self.difference


@dataclass(frozen=True)
class Match:
    """Names of a pattern and what they stand for in the graph."""

    root: Node
    found: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.found[name]


def same(value: Any) -> Any:
    """The value that a node stands for, behind what a detach leaves."""
    while isinstance(value, Node) and value.op == "call_function" and op_name(value) in _SAME:
        value = value.args[0]
    return value


def attempt(pattern: Op, root: Node) -> tuple[Match, Miss | None]:
    """What was found before the first difference, and that difference; None where the pattern matches."""
    found: dict[str, Any] = {}
    miss = _compare(pattern, root, root, found, [0])
    return Match(root, found), miss


def roots(graph: Graph, pattern: Op) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function" and op_name(node) == pattern.op)


def _compare(pattern: Any, value: Any, user: Node, found: dict[str, Any], agreed: list[int]) -> Miss | None:
    value = same(value)
    match pattern:
        case Any_(name):
            if name not in found:
                found[name] = value
            elif found[name] is not value and (isinstance(value, Node) or found[name] != value):
                return Miss(agreed[0], user, f"{name} is {_shown(value)} here and {_shown(found[name])} before")
        case Either(ways):
            return _first(ways, value, user, found, agreed)
        case Item(of, index, name):
            if not isinstance(value, Node) or op_name(value) != "getitem" or value.args[1] != index:
                wanted = of.op if isinstance(of, Op) else "an operator"
                return Miss(agreed[0], user, f"output {index} of {wanted} was expected and {_shown(value)} was found")
            if name:
                found[name] = value
            return _compare(of, value.args[0], value, found, agreed)
        case Op(op, args, name):
            if not isinstance(value, Node) or op_name(value) != op:
                return Miss(agreed[0], user, f"{op} was expected and {_shown(value)} was found")
            agreed[0] += 1
            if name:
                if name in found and found[name] is not value:
                    return Miss(agreed[0], value, f"{name} is {_shown(value)} here and {_shown(found[name])} before")
                found[name] = value
            for key, part in args.items():
                miss = _compare(part, argument(value, key), value, found, agreed)
                if miss is not None and miss.node is value:
                    return Miss(miss.agreed, value, f"argument {key!r}: {miss.difference}")
                if miss is not None:
                    return miss
                agreed[0] += 1
        case _ if pattern != value:
            return Miss(agreed[0], user, f"{pattern!r} was expected and {_shown(value)} was found")
    return None


def _first(ways: tuple[Any, ...], value: Any, user: Node, found: dict[str, Any], agreed: list[int]) -> Miss | None:
    """The first way that matches, or the miss of the one that came furthest."""
    misses = []
    for way in ways:
        trial, count = dict(found), [agreed[0]]
        miss = _compare(way, value, user, trial, count)
        if miss is None:
            found.update(trial)
            agreed[0] = count[0]
            return None
        misses.append((miss, trial))
    miss, trial = max(misses, key=lambda pair: pair[0].agreed)
    found.update(trial)
    return miss


def _shown(value: Any) -> str:
    return f"{value.name} ({op_name(value)})" if isinstance(value, Node) else repr(value)
