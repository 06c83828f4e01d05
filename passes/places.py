"""Places in the user's code that nodes come from: which module, which line of its own file, which variable."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch.fx import Node

from dsv4c.passes.graph import Frame, frames, module_of, source_frame


class Call(NamedTuple):
    """A module whose forward was running when a node was made."""

    path: str  # as in the captured graph, with whatever was wrapped around the user's module
    file: str  # of its class; empty if unknown


def calls(node: Node) -> list[Call]:
    """The modules that were running when the node was made, outermost first; their own names and files."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [Call(_plain(path), _file(kind)) for path, kind in (entry[:2] for entry in stack.values())]


def _plain(path: str) -> str:
    return path.partition("]")[2].lstrip(".").replace("._modules", "").replace("']['", ".") if "[" in path else path


def _file(kind: object) -> str:
    module = getattr(kind, "__module__", None) or str(kind).rpartition(".")[0]
    return str(getattr(sys.modules.get(module), "__file__", "") or "")


def within(path: str, module: str) -> bool:
    """Whether a module path is the module or lies in it."""
    return path == module or (bool(module) and path.startswith(f"{module}."))


def prefixes(path: str) -> list[str]:
    """``a``, ``a.b``, ``a.b.c`` of ``a.b.c``."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def frame_in(node: Node, module: str) -> Frame | None:
    """The innermost line of the module's own code that led to the node.

    Below the module's forward and above the forward of a module it calls; of these frames the last in the file of its class.
    """
    found, running = frames(node), calls(node)
    at = next((i for i, call in enumerate(running) if call.path == module or call.path.endswith(f".{module}")), None)
    forwards = [i for i, frame in enumerate(found) if frame.function == "forward"]
    if at is None or not found:
        return source_frame(node)
    own = found
    # The outermost module may be missing from the stack: count from the innermost.
    if len(forwards) >= len(running):
        first = forwards[len(forwards) - len(running) + at]
        last = forwards[len(forwards) - len(running) + at + 1] if at + 1 < len(running) else len(found)
        own = found[first:last]
    same = [frame for frame in own if running[at].file and Path(frame.file) == Path(running[at].file)]
    return (same or own or found)[-1]


def where(node: Node) -> str:
    """``module (file:line)`` of a node, short enough for a message."""
    frame = source_frame(node)
    line = f"{Path(frame.file).name}:{frame.line}" if frame else ""
    module = module_of(node)
    return f"{module} ({line})" if module and line else module or line or f"node {node.name}"


def variable(frame: Frame | None, made: Node | None = None) -> str:
    """The variable of a line that holds the value ``made``: one assigned where the value was made, else one computed from
    such a one, else the first argument of the function that the line reads, else the first local; empty if none."""
    function = _function_at(frame.file, frame.line) if frame is not None else None
    if frame is None or function is None:
        return ""
    lines = {f.line for f in frames(made) if f.file == frame.file} if made is not None else set()
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    here, assigned = {n.id for n in names if n.lineno in lines}, {n.id for n in names}
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    parameters = {a.arg for a in arguments} - {"self", "cls"}
    read = list(_reads(function, frame.line))
    preferred = (here, _computed_from(function, here), parameters, assigned)
    return next((n for known in preferred for n in read if n in known), "")


def _computed_from(function: ast.FunctionDef, names: set[str]) -> set[str]:
    found: set[str] = set(names)
    for _ in range(3):  # assignments may stand in any order
        for step in (n for n in ast.walk(function) if isinstance(n, ast.Assign)):
            if any(isinstance(n, ast.Name) and n.id in found for n in ast.walk(step.value)):
                found |= {n.id for t in step.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found if names else set()


def _reads(function: ast.FunctionDef, line: int) -> Iterator[str]:
    called = {id(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)}
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.lineno == line]
    yield from (n.id for n in sorted(names, key=lambda n: n.col_offset) if id(n) not in called)


def _function_at(file: str, line: int) -> ast.FunctionDef | None:
    tree = _parsed(file)
    around = [
        n
        for n in (ast.walk(tree) if tree else ())
        if isinstance(n, ast.FunctionDef) and n.lineno <= line <= (n.end_lineno or n.lineno)
    ]
    return max(around, key=lambda n: n.lineno, default=None)


@cache
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None
