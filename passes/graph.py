"""What reaches what in a graph.

A backward graph only contains edges that gradients flow through, so what a tangent reaches is what its objective trains.
Nodes called ``detach`` say nothing: compilers erase them and add their own, and ``no_grad`` leaves none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torch.fx import Node


def reach(sources: Iterable[Node]) -> set[Node]:
    """Every node that depends on one of ``sources``, these included."""
    seen = set(sources)
    waiting = list(seen)
    while waiting:
        for user in waiting.pop().users:
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return seen


def shortest_path(source: Node, target: Node) -> list[Node]:
    """The nodes of a shortest chain of uses from ``source`` to ``target``, both included; empty if there is none."""
    came_from: dict[Node, Node | None] = {source: None}
    waiting = deque([source])
    while waiting:
        node = waiting.popleft()
        if node is target:
            path = [node]
            while (before := came_from[path[-1]]) is not None:
                path.append(before)
            return path[::-1]
        for user in node.users:
            if user not in came_from:
                came_from[user] = node
                waiting.append(user)
    return []
