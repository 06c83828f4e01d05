"""The form of a fusion: chains of operators, and the one operator that takes the place of each.

A fusion asserts how often it fired: every operator that begins one of its chains has to be in a match, forward and
backward.  One that is not stops the compilation, with the node that came nearest and what differed there; a fusion that
silently did nothing would be a slower step that nobody notices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dsv4c.errors import FusionError
from dsv4c.passes.fuse.pattern import Match, Miss, Op, attempt, roots
from dsv4c.passes.graph import describe, find, module_of, op_name, source_of
from dsv4c.torch_compat import fake_result

_MARKS = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "seq_nr", "custom", "module",
          "autograd_backward", "original_aten")  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """A pattern, and the operator in it (``anchor``, a name of the pattern) whose every occurrence has to match.

    ``applies`` says which occurrences are meant where not all are; ``excuse`` names a reason for which one may stay as it
    is ("" where there is none).
    """

    pattern: Op
    anchor: str
    operator: str
    applies: Callable[[Node], bool] = lambda node: True
    excuse: Callable[[Node], str] = lambda node: ""


@dataclass(frozen=True)
class Fusion:
    """``chains``: what is looked for, by name; ``rewrite(graph, matches)`` puts the new operators in place."""

    name: str
    promises: str
    chains: Mapping[str, Chain]
    rewrite: Callable[[Graph, Mapping[str, list[Match]]], None]


@dataclass
class Fired:
    """How often each chain matched, and what was left alone and why."""

    matches: dict[str, int] = field(default_factory=dict)
    excused: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.matches.values())


def fuse(fusion: Fusion, module: GraphModule) -> Fired:
    """Apply a fusion to a graph in place.  Raises FusionError where a chain should match and does not."""
    graph, fired = module.graph, Fired()
    matches: dict[str, list[Match]] = {}
    for name, chain in fusion.chains.items():
        tried = [attempt(chain.pattern, root) for root in roots(graph, chain.pattern)]
        excuses = {node: why for node in find(graph, chain.operator) if (why := chain.excuse(node))}
        fired.excused += [f"{node.name}: {why}" for node, why in excuses.items()]
        matches[name] = [match for match, miss in tried if miss is None and match[chain.anchor] not in excuses]
        met = {match[chain.anchor] for match in matches[name]}
        for node in find(graph, chain.operator):
            if node not in met and node not in excuses and chain.applies(node):
                raise _unmatched(fusion, name, chain, node, tried)
        fired.matches[name] = len(matches[name])
    if fired.total:
        fusion.rewrite(graph, matches)
        graph.eliminate_dead_code()
        graph.lint()
        module.recompile()
    return fired


def _unmatched(
    fusion: Fusion, chain_name: str, chain: Chain, anchor: Node, tried: list[tuple[Match, Miss | None]]
) -> FusionError:
    """The attempt that came nearest: one that met this operator, or else the longest."""
    missed = [(match, miss) for match, miss in tried if miss is not None]
    own = [pair for pair in missed if pair[0].found.get(chain.anchor) is anchor]
    text = f"nothing reads it that {chain.pattern.op} could be"
    if own or missed:
        nearest, miss = max(own or missed, key=lambda pair: pair[1].agreed)
        text = f"{describe(nearest.root)}\n  differs: {miss}"
    return FusionError(
        f"fusion {fusion.name!r} ({chain_name}) should match {op_name(anchor)} and does not",
        where=f"{source_of(anchor) or anchor.name}{f'  in {module_of(anchor)}' if module_of(anchor) else ''}\n"
        f"  node:    {describe(anchor)}\n  nearest: {text}",
        do=f"write the chain as the model does, or leave the fusion out with skip={fusion.name!r}",
    )  # fmt: skip


def put(graph: Graph, name: str, args: tuple[Any, ...], *, at: Node, like: Node) -> Node:
    """A call of ``dsv4::name`` in front of ``at``, with the fake value that it has and the marks of ``like``."""
    target = getattr(torch.ops.dsv4, name).default
    with graph.inserting_before(at):
        node = graph.call_function(target, args)
    node.meta.update({k: like.meta[k] for k in _MARKS if k in like.meta})
    node.meta["val"] = fake_result(target, torch.fx.map_arg(args, lambda n: n.meta["val"]))
    return node


def outputs(graph: Graph, node: Node, indices: tuple[int, ...]) -> list[Node]:
    """The outputs of an operator that has several, right behind it."""
    found = []
    at = node
    for i in indices:
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (node, i))
        at.meta.update({k: node.meta[k] for k in _MARKS if k in node.meta}, val=node.meta["val"][i])
        found.append(at)
    return found


def item(node: Node, index: int) -> Node | None:
    """Output ``index`` of an operator, where something reads it."""
    return next((u for u in node.users if op_name(u) == "getitem" and u.args[1] == index), None)


def instead(old: Node | None, new: Node) -> None:
    """Whoever reads ``old`` reads ``new``."""
    if old is not None:
        old.replace_all_uses_with(new)
