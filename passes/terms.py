"""Values of a graph as terms: which nodes hold the same numbers, which are constants, which only multiply by one.

A table of cosines computed in two places is one table.  Two nodes have the same number where the same operation was applied
to values with the same numbers, up to views, casts, copies and detaching.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsv4c.passes.flow import CASTS, SHAPES
from dsv4c.passes.graph import op_name, value

_PARTS = frozenset(f"aten.{name}" for name in ("select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind"))
_FORMS = CASTS | (SHAPES - _PARTS - {"getitem"})
_RANDOM = ("rand", "bernoulli", "dropout", "multinomial", "normal", "uniform", "exponential")
_CONSTANTS = {"aten.scalar_tensor": 0, "aten.full": 1, "aten.full_like": 1}  # operator -> the argument that is the number


def bare(node: Node) -> Node:
    """What the node is a view, cast, copy or detached form of; a slice counts where it leaves nothing out."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        source = node.args[0]
        name = op_name(node)
        whole = name in _PARTS and _shape(node) == _shape(source)
        if not whole and name not in _FORMS:
            break
        node = source
    return node


def _shape(node: Node) -> tuple[str, ...] | None:
    tensor = value(node)
    return tuple(map(str, tensor.shape)) if tensor is not None else None


def constant(item: Any) -> float | None:
    """The number that an argument is, written out or as a tensor without dimensions; None for anything else."""
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return float(item)
    if not isinstance(item, Node):
        return None
    node = bare(item)
    if node.op == "get_attr":
        held = getattr(node.graph.owning_module, str(node.target), None)
        if type(held) is Tensor and held.dim() == 0 and not held.is_meta:  # a fake tensor has no value
            return float(held)
        return None
    index = _CONSTANTS.get(op_name(node)) if node.op == "call_function" else None
    return constant(node.args[index]) if index is not None and len(node.args) > index else None


def product_with_constant(node: Node) -> tuple[Node, float] | None:
    """(x, c) where the node is ``c x`` for a number c: a product, a quotient or a sign."""
    name = op_name(node)
    if name in ("aten.neg", "prims.neg") and isinstance(node.args[0], Node):
        return node.args[0], -1.0
    if name not in ("aten.mul", "prims.mul", "mul", "aten.div", "prims.div", "truediv", "aten.true_divide"):
        return None
    left, right = node.args[:2]
    if isinstance(left, Node) and (c := constant(right)) is not None:
        return left, c if "mul" in name else 1.0 / c if c else float("inf")
    if isinstance(right, Node) and (c := constant(left)) is not None and "mul" in name:
        return right, c
    return None


def main_path(node: Node, through: tuple[str, ...] = ()) -> Iterator[Node]:
    """The nodes behind a value, back to a matrix product, a norm, or an operator that is not in ``through``.

    Follows what is passed on: the first input of a sum or of an operator, both halves of a concatenation, the factor of a
    product that is no parameter.  Ends at a norm, whose result does not depend on factors before it.
    """
    waiting, seen = [node], {node}
    while waiting:
        at = waiting.pop()
        yield at
        for source in _passed_on(at, through):
            if source not in seen:
                seen.add(source)
                waiting.append(source)


def _passed_on(node: Node, through: tuple[str, ...]) -> list[Node]:
    if node.op != "call_function" or not node.args:
        return []
    name, first = op_name(node), node.args[0]
    if name in _FORMS | _PARTS or name in through or name in ("aten.add", "aten.clamp", "aten.masked_fill", "aten.sum"):
        return [first] if isinstance(first, Node) else []
    if name == "aten.cat":
        return [n for n in first if isinstance(n, Node)] if isinstance(first, (list, tuple)) else []
    if (scaled := product_with_constant(node)) is not None:
        return [scaled[0]]
    if name in ("aten.mul", "prims.mul", "mul"):
        factors = [n for n in node.args[:2] if isinstance(n, Node)]
        if any(op_name(bare(n)) in ("aten.rsqrt", "prims.rsqrt") for n in factors):
            return []  # a norm
        return [n for n in factors if bare(n).op != "placeholder"][:1]
    return []


class Values:
    """Numbers for the values of a graph: equal numbers, equal values."""

    def __init__(self, graph: GraphModule) -> None:
        self._numbers: dict[Node, int] = {}
        known: dict[Any, int] = {}
        for node in graph.graph.nodes:
            source = bare(node)
            key = self._key(node) if source is node else ("form", self._numbers[source])
            if key[0] == "form":
                self._numbers[node] = self._numbers[source]
            else:
                self._numbers[node] = known.setdefault(key, len(known))

    def _key(self, node: Node) -> tuple[Any, ...]:
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt):
            return ("size", str(size))
        if node.op != "call_function" or any(word in op_name(node) for word in _RANDOM):
            return ("node", node.name)
        return (op_name(node), self._term(node.args), self._term(tuple(sorted(node.kwargs.items()))))

    def _term(self, item: Any) -> Any:
        if isinstance(item, Node):
            return ("#", self._numbers[item])
        if isinstance(item, (list, tuple)):
            return tuple(self._term(i) for i in item)
        return str(item)

    def same(self, a: Node, b: Node) -> bool:
        return self._numbers[a] == self._numbers[b]
