"""``memory-growth``: nothing grows faster than the sequence, and nothing is gathered for every query.

Decided on a graph captured with symbolic batch and sequence: the size of every tensor that is written (forward and
backward, each part of a tuple; views are not written) is an expression in those sizes, and doubling one of them may at most
double it.  Terms that stop growing (a bounded number of rows) are judged at the length from which they no longer do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from dsv4c.passes.graph import find, is_backward, op_name, value
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "memory-growth"
LENGTH = 65536  # at which bytes are given
_FAR = 2**26  # tokens: beyond every bound that stops a term from growing


@dataclass(frozen=True)
class Written:
    """A tensor that a node writes: its number of elements as an expression, and the bytes of one."""

    node: Node
    shape: tuple[Any, ...]
    elements: sympy.Expr
    itemsize: int

    def bytes_at(self, sizes: Mapping[sympy.Symbol, int]) -> int:
        return _at(self.elements, tuple(sizes.items())) * self.itemsize


@cache
def _at(expression: sympy.Expr, sizes: tuple[tuple[sympy.Symbol, int], ...]) -> int:
    return int(expression.subs(dict(sizes)))


def _dimension(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_view(node: Node) -> bool:
    """Whether the node's result shares the memory of an input, by the operator's schema."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.returns and schema.returns[0].alias_info is not None)


def written(subject: Subject) -> list[Written]:
    """Every tensor that the graph writes; inputs and views are left out, parts of a tuple count where it is made."""
    found = []
    for node in subject.nodes:
        if node.op != "call_function" or op_name(node) == "getitem" or _is_view(node):
            continue
        held = node.meta.get("val")
        for tensor in held if isinstance(held, (list, tuple)) else (held,):
            if isinstance(tensor, Tensor):
                shape = tuple(_dimension(n) for n in tensor.shape)
                found.append(Written(node, shape, sympy.sympify(prod(shape)), tensor.element_size()))
    return found


def letters(subject: Subject) -> dict[sympy.Symbol, str]:
    """Names for the symbolic sizes: B and S where an input [B,S] has them, otherwise torch's own."""
    names: dict[sympy.Symbol, str] = {}
    for node in subject.nodes:
        tensor = value(node) if node.op == "placeholder" else None
        for dim, size in enumerate(map(_dimension, tensor.shape) if tensor is not None else ()):
            if isinstance(size, sympy.Symbol):
                names.setdefault(size, {0: "B", 1: "S"}.get(dim, str(size)))
    return names


def is_symbolic(subject: Subject) -> bool:
    return bool(letters(subject))


def check(subject: Subject) -> Iterator[Checked | Violation]:
    names = letters(subject)
    if not names:
        return
    chosen, width = _selection(subject)
    selected = _made_of_ids(subject)
    bad: set[str] = set()
    for tensor in written(subject):
        fast = [s for s in tensor.elements.free_symbols if s in names and _doubles(tensor.elements, s) > 3]
        gathered = not fast and tensor.node in selected and _per_query(tensor, names, chosen, width)
        if not fast and not gathered:
            yield Checked(f"{tensor.node.name}:{tensor.elements}")
            continue
        line = tensor.node.meta.get("stack_trace", "")[-300:]
        if line in bad:  # one line, one violation: what follows from it on the same line grows as it does
            continue
        bad.add(line)
        yield _grown(tensor, names, fast, chosen, width)


def _doubles(expression: sympy.Expr, symbol: sympy.Symbol) -> float:
    """By how much doubling a size multiplies the number of elements, far out."""
    others = tuple((s, 1) for s in expression.free_symbols if s != symbol)
    near = _at(expression, (*others, (symbol, _FAR)))
    return _at(expression, (*others, (symbol, 2 * _FAR))) / near if near else 0.0


def _selection(subject: Subject) -> tuple[int, int]:
    """(K, c): entries that a query selects, and the smallest width of what could be gathered for each; 0 for none."""
    for node in find(subject.graph.graph, "dsv4.indexer_topk"):
        ids = (node.meta.get("val") or (None,))[0]
        widths = [t.shape[-1] for a in node.args[:2] if isinstance(a, Node) and (t := value(a)) is not None]
        if isinstance(ids, Tensor) and isinstance(ids.shape[-1], int):
            return int(ids.shape[-1]), min(map(int, widths))
    return 0, 0


def _made_of_ids(subject: Subject) -> set[Node]:
    """What is computed from the selected ids outside our operators: only there can K vectors a query come from a gather.

    Sizes alone do not tell: K may be the number of residual streams.
    """
    seen: set[Node] = set()
    waiting = list(find(subject.graph.graph, "dsv4.indexer_topk", "dsv4.indexer_topk_backward"))
    while waiting:
        for user in waiting.pop().users:
            if user not in seen and not op_name(user).startswith("dsv4."):
                seen.add(user)
                waiting.append(user)
    return seen


def _per_query(tensor: Written, names: Mapping[sympy.Symbol, str], chosen: int, width: int) -> bool:
    """Whether the tensor holds K vectors for each query: K times the width is in the number of elements per token."""
    if not chosen or any(isinstance(n, int) and n >= chosen * width for n in tensor.shape):
        return False  # an axis that long is one of the model's own, the vocabulary
    grows = [s for s in tensor.elements.free_symbols if s in names]
    each = sympy.cancel(tensor.elements / sympy.Mul(*grows))
    return bool(grows and each.is_Integer and each >= chosen * width and each % (chosen * width) == 0)


def _grown(
    tensor: Written, names: Mapping[sympy.Symbol, str], fast: list[sympy.Symbol], chosen: int, width: int
) -> Violation:  # fmt: skip
    sizes = {s: LENGTH if letter != "B" else 1 for s, letter in names.items()}
    shape = f"[{','.join(_readable(n, names) for n in tensor.shape)}]"
    size = _bytes(tensor.bytes_at(sizes))
    half = "backward" if is_backward(tensor.node) else "forward"
    if fast:
        why = f"grows with the square of {' and '.join(names[s] for s in fast)}"
        hint = "work through blocks of queries inside an operator, so that no tensor of this size exists"
    else:
        why = f"holds {chosen} selected entries for every query ({chosen} x {width} numbers a token at least)"
        hint = "gather blocks of queries inside an operator; keep only ids and scores [B,S,K]"
    return violation(
        NAME, f"{op_name(tensor.node)} writes {shape} ({half}), which {why}: {size} at S={LENGTH}", tensor.node,
        path=[*tensor.node.all_input_nodes, tensor.node][-4:], hint=hint,
    )  # fmt: skip


def _readable(size: Any, names: Mapping[sympy.Symbol, str]) -> str:
    text = str(sympy.sympify(size).subs(_symbols(names))).replace(" ", "")
    return text[1:-1] if text.startswith("(") and text.count("(") == 1 else text


def _symbols(names: Mapping[sympy.Symbol, str]) -> dict[sympy.Symbol, sympy.Symbol]:
    return {s: sympy.Symbol(letter) for s, letter in names.items()}


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.4g} {unit}"
        n /= 1000
    return ""


def largest(subject: Subject, n_tokens: int, n: int = 3) -> list[str]:
    """The largest tensors at this length, one line each: bytes, shape as an expression, operator, module."""
    names = letters(subject)
    sizes = {s: n_tokens if letter != "B" else 1 for s, letter in names.items()}
    lines: dict[str, int] = {}
    for t in sorted(written(subject), key=lambda t: t.bytes_at(sizes), reverse=True):
        elements = _readable(t.elements, names)
        lines.setdefault(f"{_bytes(t.bytes_at(sizes))}  {elements} elements  {op_name(t.node)}", 0)
        if len(lines) == n:
            break
    return list(lines)


RULE = Rule(
    NAME, "every tensor that is written grows at most linearly in the sequence, and none holds entries for every query",
    check, ("joint", "forward", "backward"), applies=is_symbolic,
)  # fmt: skip
