"""``scales``: every constant that multiplies scores or weights is there once.

Attention logits have ``c^-0.5``; the indexer's scores ``ci^-0.5 Hi^-0.5`` in all, wherever it is applied (a positive
constant cannot be seen by top-k and makes or breaks the distillation); cosines and sines have no factor, and neither have
the routing weights after the operator that normalises them to ``route_scale``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose, prod

from torch.fx import Node

from dsv4c.passes.graph import argument, find, is_backward, module_of, op_name, value
from dsv4c.passes.terms import bare, main_path, product_with_constant
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.rotation import CORES, INDEXER, ROTATE, TEACHER
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "scales"
_KEEPS_SIZE = (ROTATE, "dsv4.hadamard")  # orthogonal: what comes out has the size of what goes in
_ROUTED = ("aten.index", "aten.gather", "aten.sum", "getitem", "dsv4.swiglu_clamp", "dsv4.grouped_mm")


def factors(node: Node) -> list[tuple[Node, float]]:
    """The constants other than 1 that multiply a value, back to the product or the norm that it comes from."""
    found = [(n, pair[1]) for n in main_path(node, _KEEPS_SIZE) if (pair := product_with_constant(n))]
    return [(n, c) for n, c in found if c != 1.0]


def check(subject: Subject) -> Iterator[Checked | Violation]:
    graph = subject.graph.graph
    for core in find(graph, *CORES, TEACHER):
        if not is_backward(core):
            yield from _attention(core)
    scored = list(find(graph, "dsv4.indexer_kl"))
    for indexer in find(graph, INDEXER):
        if not is_backward(indexer):
            yield from _temperature(indexer, scored)
    for rotation in find(graph, ROTATE):
        if not is_backward(rotation):
            yield from _table(rotation)
    for route in find(graph, "dsv4.route"):
        if not is_backward(route):
            yield from _routing(route)


def _place(node: Node) -> str:
    return module_of(node) or node.name


def _attention(core: Node) -> Iterator[Checked | Violation]:
    """``scale = c^-0.5``, and nothing between the norms and the logits."""
    q = argument(core, "q")
    width = int(value(q).shape[-1])  # type: ignore[union-attr]  # a tensor by the schema
    scale, right = float(argument(core, "scale")), width**-0.5
    if not isclose(scale, right, rel_tol=1e-9):
        yield violation(
            NAME, f"the scale of {core.name} is {scale:.9g}, which is {scale / right:.6g} times {width}^-0.5 = {right:.9g}",
            core, hint=f"scale = head_dim ** -0.5 = {right:.9g} and nothing else: queries and keys are normed",
        )  # fmt: skip
    else:
        yield Checked(f"{_place(core)}: scale of {op_name(core)}")
    names = ("q", "entries") if op_name(core) == TEACHER else ("q", "kv", "entries")
    for name in names:
        extra = factors(argument(core, name))
        for node, c in extra:
            yield violation(
                NAME, f"{name} of {core.name} is multiplied by {c:.6g} after its norm: the logits are scaled again", node,
                path=[node, core], hint=f"remove the factor: the logits are scaled by {width}^-0.5 inside {op_name(core)}",
            )  # fmt: skip
        if not extra:
            yield Checked(f"{_place(core)}: {name} of {op_name(core)}")


def _temperature(indexer: Node, scored: list[Node]) -> Iterator[Checked | Violation]:
    """All constants on the ways into the scores, and from them into the loss, multiply to ``ci^-0.5 Hi^-0.5``."""
    heads, width = (int(n) for n in value(argument(indexer, "q")).shape[-2:])  # type: ignore[union-attr]  # a tensor
    before = [pair for name in ("q", "k", "w") for pair in factors(argument(indexer, name))]
    yield from _judge(indexer, before, heads, width, "")
    for loss in scored:
        after = []
        at: Node | None = argument(loss, "scores")
        while at is not None and op_name(at) != "getitem":
            pair = product_with_constant(at)
            after += [(at, pair[1])] if pair and pair[1] != 1.0 else []
            inner = pair[0] if pair else bare(at)
            at = inner if inner is not at else None
        if at is not None and at.args[0] is indexer and after:
            yield from _judge(indexer, before + after, heads, width, " into the loss")


def _judge(
    indexer: Node, found: list[tuple[Node, float]], heads: int, width: int, where: str
) -> Iterator[Checked | Violation]:  # fmt: skip
    total, right = prod((c for _, c in found), start=1.0), heads**-0.5 * width**-0.5
    if isclose(total, right, rel_tol=1e-6):
        yield Checked(f"{_place(indexer)}: temperature{where}")
        return
    readings = {
        "they have none": 1.0, "it is applied twice": right**2, f"the factor {width}^-0.5 is missing": heads**-0.5,
        f"the factor {heads}^-0.5 is missing": width**-0.5,
    }  # fmt: skip
    why = next((text for text, c in readings.items() if isclose(total, c, rel_tol=1e-6)), "")
    yield violation(
        NAME,
        f"the scores of {indexer.name}{where} are multiplied by {total:.9g} instead of "
        f"{heads}^-0.5 {width}^-0.5 = {right:.9g} (1/{1 / right:.6g})" + (f": {why}" if why else ""),
        found[-1][0] if found else indexer, path=[*(n for n, _ in found), indexer],
        hint="multiply the heads' weights by index_n_heads ** -0.5 * index_head_dim ** -0.5, once",
    )  # fmt: skip


def _table(rotation: Node) -> Iterator[Checked | Violation]:
    wrong = False
    for name in ("cos", "sin"):
        at = bare(argument(rotation, name))
        while (pair := product_with_constant(at)) is not None:
            if pair[1] != 1.0:
                wrong = True
                yield violation(
                    NAME, f"{name} of {rotation.name} is multiplied by {pair[1]:.6g}: the rotation stretches", at,
                    path=[at, rotation], hint="YaRN changes frequencies and no magnitude: use cos() and sin() as they are",
                )  # fmt: skip
            at = bare(pair[0])
    if not wrong:
        yield Checked(f"{_place(rotation)}: table of {rotation.name}")


def _routing(route: Node) -> Iterator[Checked | Violation]:
    """Forward from the routing weights to the sum with other terms: no constant on the way."""
    waiting = [u for u in route.users if op_name(u) == "getitem" and u.args[1] == 0]
    seen, wrong = set(waiting), False
    while waiting:
        for user in waiting.pop().users:
            if user in seen or is_backward(user) or user.op != "call_function":
                continue
            seen.add(user)
            pair = product_with_constant(user)
            if pair is not None and pair[1] != 1.0:
                wrong = True
                yield violation(
                    NAME, f"the experts' weights of {route.name} are multiplied by {pair[1]:.6g} again", user,
                    path=[route, user], hint=f"dsv4.route has already normalised them to {argument(route, 'route_scale'):g}",
                )  # fmt: skip
            if pair is not None or op_name(user) in _ROUTED or bare(user) is not user:
                waiting.append(user)
    if not wrong:
        yield Checked(f"{_place(route)}: routing weights")


RULE = Rule(
    NAME, "attention, indexer, tables and routing weights are each scaled by their constant once, and by nothing else",
    check, ("joint", "forward"),
)  # fmt: skip
