"""Reach and paths in hand-made graphs."""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from dsv4c.passes.graph import reach, shortest_path


def diamond() -> tuple[Node, Node, Node, Node, Node, Node]:
    """a -> b -> d -> e, a -> d, and c beside them."""
    graph = Graph()
    a, c = graph.placeholder("a"), graph.placeholder("c")
    b = graph.call_function(operator.neg, (a,))
    d = graph.call_function(operator.add, (a, b))
    e = graph.call_function(operator.mul, (d, c))
    out = graph.output((e,))
    return a, b, c, d, e, out


def test_reach_is_everything_downstream_and_nothing_else() -> None:
    a, b, c, d, e, out = diamond()
    assert reach([a]) == {a, b, d, e, out}
    assert reach([c]) == {c, e, out}
    assert reach([a, c]) == {a, b, c, d, e, out}


def test_the_shortest_path_takes_the_short_side() -> None:
    a, _, c, d, e, _ = diamond()
    assert shortest_path(a, e) == [a, d, e]
    assert shortest_path(a, a) == [a]
    assert shortest_path(c, d) == []
