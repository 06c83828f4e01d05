"""Reading a graph: what reaches what, and where in the user's code a node comes from.

A backward graph only contains edges that gradients flow through, so what a tangent reaches is what its objective trains.
Nodes called ``detach`` say nothing: compilers erase them and add their own, and ``no_grad`` leaves none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_TORCH, _OPS = str(Path(torch.__file__).parent), ("/dsv4c/ops/", "/ops/__init__.py")


class Frame(NamedTuple):
    """A call in the user's code: the file, the line and its text, and the function that the line is in."""

    file: str
    line: int
    text: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def reach(sources: Iterable[Node]) -> set[Node]:
    """Every node that depends on one of ``sources``, these included."""
    return _closure(sources, lambda node: node.users)


def depends(targets: Iterable[Node]) -> set[Node]:
    """Every node that one of ``targets`` depends on, these included."""
    return _closure(targets, lambda node: node.all_input_nodes)


def _closure(sources: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    seen = set(sources)
    waiting = list(seen)
    while waiting:
        for other in neighbours(waiting.pop()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


def shortest_path(source: Node, target: Node | Collection[Node]) -> list[Node]:
    """The nodes of a shortest chain of uses from ``source`` to ``target`` (the nearest of several), both included; empty if
    there is none."""
    targets = {target} if isinstance(target, Node) else set(target)
    came_from: dict[Node, Node | None] = {source: None}
    waiting = deque([source])
    while waiting:
        node = waiting.popleft()
        if node in targets:
            path = [node]
            while (before := came_from[path[-1]]) is not None:
                path.append(before)
            return path[::-1]
        for user in node.users:
            if user not in came_from:
                came_from[user] = node
                waiting.append(user)
    return []


def op_name(node: Node) -> str:
    """``aten.mm``, ``dsv4.rope``, ``getitem``, or the node's kind where it calls nothing; overloads are left out."""
    if node.op != "call_function":
        return node.op
    schema = getattr(node.target, "_schema", None)
    return schema.name.replace("::", ".") if schema else str(getattr(node.target, "__name__", node.target))


def find(graph: Graph, *names: str) -> Iterator[Node]:
    """The nodes with one of these :func:`op_name`."""
    return (node for node in graph.nodes if node.op == "call_function" and op_name(node) in names)


def is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward"))


def value(node: Node) -> Tensor | None:
    """The fake tensor of a node; None where it is not one tensor."""
    found = node.meta.get("val")
    return found if isinstance(found, Tensor) else None


def argument(node: Node, name: str) -> Any:
    """The value of an operator's argument by its schema name, its default where it was not given."""
    for i, a in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]  # an OpOverload has a schema
        if a.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, a.default_value)
    raise KeyError(f"{op_name(node)} has no argument {name!r}")


def module_of(node: Node) -> str:
    """The path of the module whose forward made the node, or whose backward it belongs to; empty if nothing says so."""
    if "module" in node.meta:
        return str(node.meta["module"])
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return re.sub(r"^L(\['self'\]|\['s'\]|\['fn'\])\.?", "", path).replace("._modules", "").replace("']['", ".")


def frames(node: Node) -> list[Frame]:
    """The calls that made the node, outermost first, torch's own left out."""
    found = [Frame(f, int(n), text.strip(), name) for f, n, name, text in _FRAME.findall(node.meta.get("stack_trace") or "")]
    return [frame for frame in found if not frame.file.startswith(_TORCH)]


def source_of(node: Node) -> str:
    """``file:line`` of the innermost call outside torch and outside our operators; empty if the node has none."""
    frame = source_frame(node)
    return f"{frame[0]}:{frame[1]}" if frame else ""


def source_frame(node: Node) -> Frame | None:
    for frame in reversed(frames(node)):
        if not any(part in frame.file for part in _OPS):
            return frame
    return None


def describe(node: Node) -> str:
    """One line about a node: name, operator, dtype and shape, module, source line."""
    tensor = value(node)
    shape = f" {str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]" if tensor is not None else ""
    frame = source_frame(node)
    where = f"  {module_of(node)}" if module_of(node) else ""
    line = f"  {frame[0]}:{frame[1]}  {frame[2]}" if frame else ""
    return f"{node.name} = {op_name(node)}{shape}{where}{line}"
