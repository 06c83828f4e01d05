"""``rotation``: queries and keys are rotated once, entries at their window's first token, and the output is rotated back.

One latent is key and value, so a rotated key is a rotated value: what attention returns carries the positions of what it
read.  Without the rotation back, by the queries' own table, every shape fits and the model is wrong.

Tables are compared as terms (:mod:`dsv4c.passes.terms`); where a table is an input of the graph, its positions cannot be
read and only its identity is compared.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from torch.fx import Node

from dsv4c.passes.flow import is_product
from dsv4c.passes.graph import argument, find, is_backward, module_of, op_name, value
from dsv4c.passes.places import frame_in
from dsv4c.passes.terms import Values, bare, constant, product_with_constant
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "rotation"
ROTATE, INDEXER, TEACHER = "dsv4.rope", "dsv4.indexer_topk", "dsv4.indexer_kl_target"
DEROTATED = "dsv4.sparse_attention_derotated"  # a core and the rotation back in one operator
CORES = ("dsv4.sparse_attention", DEROTATED)
_STATISTICS = ("aten.rsqrt", "prims.rsqrt", "aten.mean", "aten.scalar_tensor", "aten.full", "aten.arange")


@dataclass(frozen=True)
class Table:
    """The cos and sin of a rotation, without views and constant factors, and the angle where both are of one."""

    cos: Node
    sin: Node

    @property
    def angle(self) -> Node | None:
        cos, sin = self.cos, self.sin
        inner = [n.args[0] for n in (cos, sin) if op_name(n) in ("aten.cos", "aten.sin", "prims.cos", "prims.sin")]
        return bare(inner[0]) if len(inner) == 2 and isinstance(inner[0], Node) else None

    @property
    def is_input(self) -> bool:
        return self.cos.op == "placeholder" or self.sin.op == "placeholder"


def table(node: Node) -> Table:
    """The table that a rotation, or a core that rotates back, uses."""
    return Table(_unscaled(argument(node, "cos")), _unscaled(argument(node, "sin")))


def _unscaled(node: Node) -> Node:
    """The cos or sin itself: a factor in it is for the rule of scales to report."""
    node = bare(node)
    while (scaled := product_with_constant(node)) is not None:
        node = bare(scaled[0])
    return node


class _Reader:
    """One graph: its values, and the rotations behind a node."""

    def __init__(self, subject: Subject) -> None:
        self.values = Values(subject.graph)
        self._behind: dict[Node, frozenset[tuple[Node, ...]]] = {}

    def behind(self, node: Node) -> frozenset[tuple[Node, ...]]:
        """For each way from a matrix product, a pooling or an input to this node: the rotations on it, first to last."""
        waiting = [node]
        while waiting:
            at = waiting[-1]
            sources = [n for n in _sources(at) if n not in self._behind]
            if at in self._behind or not sources:
                waiting.pop()
                self._behind.setdefault(at, self._ways(at))
            else:
                waiting += sources
        return self._behind[node]

    def _ways(self, node: Node) -> frozenset[tuple[Node, ...]]:
        if op_name(node) in _STATISTICS:
            return frozenset()
        before = [way for source in _sources(node) for way in self._behind[source]]
        own = (node,) if op_name(node) == ROTATE else ()
        if not before:
            return frozenset() if _is_parameter(node) and not own else frozenset([own])
        return frozenset((*way, *own) for way in before)

    def same(self, a: Table, b: Table) -> bool:
        return self.values.same(a.cos, b.cos) and self.values.same(a.sin, b.sin)


def _is_parameter(node: Node) -> bool:
    """Whether this input of the graph is a vector that multiplies channels: a norm's weight is no data to rotate."""
    tensor = value(node)
    return node.op == "placeholder" and tensor is not None and tensor.dim() < 2


def _sources(node: Node) -> list[Node]:
    """The inputs whose numbers go on in the node's: none where a product or a pooling makes new ones."""
    if node.op != "call_function" or is_product(node) or op_name(node) in _STATISTICS:
        return []
    name = op_name(node)
    if name in (ROTATE, "dsv4.hadamard"):
        return [node.args[0]] if isinstance(node.args[0], Node) else []
    return [] if name.startswith("dsv4.") else node.all_input_nodes


def check(subject: Subject) -> Iterator[Checked | Violation]:
    reader = _Reader(subject)
    cores = [n for n in find(subject.graph.graph, *CORES) if not is_backward(n)]
    queries: dict[Node, Table] = {}
    for core in cores:
        at = _place(core)
        q = yield from _once(reader, core, "q", f"{at}: queries", None)
        if q is None:
            continue
        queries[core] = own = table(q)
        yield from _once(reader, core, "kv", f"{at}: window keys", own)
        yield from _entries(reader, core, "entries", f"{at}: entries", own)
        yield from _output(reader, core, own)
    for indexer in find(subject.graph.graph, INDEXER):
        if not is_backward(indexer):
            yield from _indexer(reader, indexer, queries)
    for teacher in find(subject.graph.graph, TEACHER):
        if not is_backward(teacher) and (taught_by := _core_of(teacher, queries)):
            at = f"{_place(teacher)}: teacher's"
            yield from _once(reader, teacher, "q", f"{at} queries", queries[taught_by])
            yield from _entries(reader, teacher, "entries", f"{at} entries", queries[taught_by], taught_by)


def _place(node: Node) -> str:
    return module_of(node) or node.name


def _core_of(node: Node, queries: dict[Node, Table]) -> Node | None:
    """The attention core of the layer that the node is in: the one with the longest common module path."""
    at = module_of(node)
    inside = [c for c in queries if f"{at}.".startswith(f"{module_of(c)}.") or not module_of(c)]
    return max(inside, key=lambda c: len(module_of(c)), default=None)


def _once(
    reader: _Reader, user: Node, name: str, place: str, own: Table | None
) -> Generator[Checked | Violation, None, Node | None]:  # fmt: skip
    """That an argument is rotated once, forward, by the layer's own table; the value is that rotation if there is one."""
    node = argument(user, name)
    ways = reader.behind(node)
    what = f"{place} ({name} of {user.name})"
    unrotated, several = () in ways or not ways, [w for w in ways if len(w) > 1]
    last = {w[-1] for w in ways if w}
    if several:
        way = max(several, key=len)
        yield _at(way[-1], f"{what} are rotated {len(way)} times", [*way, user], "rotate once, after the norm")
    elif unrotated:
        yield _at(
            user, f"{what} are not rotated" + (" on one of the ways here" if last else ""), [bare(node), user],
            "rotate the last channels by the layer's cos and sin before attention",
        )  # fmt: skip
    elif len(last) == 1 and argument(rotation := last.copy().pop(), "inverse"):
        yield _at(rotation, f"{what} are rotated backward", [rotation, user], "rotate them with inverse=False")
    elif own is not None and (other := next((r for r in last if not reader.same(table(r), own)), None)):
        yield _at(
            other, f"{what} are rotated by another table than the layer's queries", [*_tables(other), other, user],
            "one table a layer: queries, keys, entries and the rotation back share its frequencies",
        )  # fmt: skip
    else:
        yield Checked(place)
    return next(iter(last), None)


def _entries(
    reader: _Reader, user: Node, name: str, place: str, own: Table, core: Node | None = None
) -> Iterator[Checked | Violation]:
    """That entries are rotated once, at the position of their window's first token, with the layer's frequencies."""
    node = argument(user, name)
    tensor = value(node)
    if tensor is not None and str(tensor.shape[1]) == "0":
        return  # a layer without compression
    ways = reader.behind(node)
    rotation = next((w[-1] for w in ways if len(w) == 1), None)
    if len(ways) != 1 or rotation is None or argument(rotation, "inverse"):
        yield from _once(reader, user, name, place, None)
        return
    found = table(rotation)
    wrong = _wrong_positions(reader, found, own, core or user)
    if wrong is None:
        yield Checked(place)
        return
    at, why, hint = wrong
    yield _at(at or rotation, f"{place} ({name} of {user.name}) {why}", [*_tables(rotation), rotation, user], hint)


def _wrong_positions(reader: _Reader, found: Table, own: Table, core: Node) -> tuple[Node | None, str, str] | None:
    """Why a table is not the queries' one at the first tokens of the windows; None where it is, or cannot be read."""
    if found.is_input or own.is_input:
        same = reader.same(found, own)
        return (None, "are rotated by the queries' table", "use the table of the window starts") if same else None
    theirs, its_own = _positions(found), _positions(own)
    if theirs is None or its_own is None:
        return None, "are rotated by a table that is not cos and sin of positions times frequencies", "build it as such"
    (at, frequencies), (queries, own_frequencies) = theirs, its_own
    if not reader.values.same(frequencies, own_frequencies):
        return at, "are rotated with other frequencies than the layer's queries", (
            "one table a layer: entries take the frequencies of the layer that reads them"
        )  # fmt: skip
    ratio, entry_end = int(argument(core, "ratio")), argument(core, "entry_end")
    hint = f"gather the positions at entry_end - {ratio} + 1, the first token of the window"
    if reader.values.same(at, queries):
        return None, "are rotated by the tokens' table", hint
    if op_name(at) != "aten.gather":
        counted = op_name(_shifted(at)[0]) == "aten.arange"
        where = "at their index among the entries" if counted else "at positions that are not gathered from the tokens'"
        return at, f"are rotated {where}", hint
    if not reader.values.same(argument(at, "self"), queries):
        return at, "are rotated at other positions than those the queries are rotated at", hint
    index, offset = _shifted(argument(at, "index"))
    if not reader.values.same(index, _shifted(entry_end)[0]):
        return at, "are rotated at tokens that do not follow from where their windows end", hint
    if offset != 1 - ratio:
        where = "the last token" if offset == 0 else f"token {offset + ratio - 1}"
        return at, f"are rotated at the position of {where} of their window", hint
    return None


def _positions(found: Table) -> tuple[Node, Node] | None:
    """(positions, frequencies) of a table ``cos(positions * frequencies)``: the integers, and the other factor."""
    angle = found.angle
    if angle is None or op_name(angle) not in ("aten.mul", "prims.mul"):
        return None
    parts = [bare(n) for n in angle.args[:2] if isinstance(n, Node)]
    whole = [n for n in parts if (t := value(n)) is not None and not t.is_floating_point()]
    other = [n for n in parts if n not in whole]
    return (whole[0], other[0]) if len(whole) == len(other) == 1 else None


def _shifted(node: Node) -> tuple[Node, int]:
    """(x, c) where the node is ``x + c``, clamps to the row left out."""
    offset, node = 0, bare(node)
    while node.op == "call_function":
        name = op_name(node)
        c = constant(node.args[1]) if len(node.args) > 1 and name in ("aten.add", "aten.sub") else None
        if c is not None:
            offset += int(c) if name == "aten.add" else -int(c)
        elif name not in ("aten.clamp", "aten.clamp_min", "aten.clamp_max") or not node.all_input_nodes:
            break
        node = bare(node.all_input_nodes[0])
    return node, offset


def _output(reader: _Reader, core: Node, own: Table) -> Iterator[Checked | Violation]:
    """That what attention returns is rotated back once, by the queries' table, on every way to a matrix product."""
    place, hint = f"{_place(core)}: output", "rotate the output back with the queries' cos and sin, inverse=True, once"
    start: tuple[Node, ...] = (core,) if op_name(core) == DEROTATED else ()
    found: dict[tuple[Node, ...], Node] = {}
    waiting = [(user, start) for user in core.users if op_name(user) == "getitem" and user.args[1] == 0]
    seen = set(waiting)
    while waiting:
        node, way = waiting.pop()
        for user in node.users:
            if is_backward(user) or user.op == "output":
                continue
            if is_product(user):
                found.setdefault(way, user)
            elif not op_name(user).startswith("dsv4.") or op_name(user) == ROTATE:
                step = (user, (*way, user) if op_name(user) == ROTATE else way)
                if step not in seen:
                    seen.add(step)
                    waiting.append(step)
    for way, end in found.items():
        if not way:
            yield _at(
                end, f"{place} reaches the projection without being rotated back", [core, end], hint, in_module_of=core
            )
        elif len(way) > 1:
            yield _at(way[-1], f"{place} is rotated {len(way)} times before the projection", [core, *way, end], hint)
        elif way[0] is not core and not argument(way[0], "inverse"):
            yield _at(way[0], f"{place} is rotated forward again instead of back", [core, *way, end], hint)
        elif not reader.same(table(way[0]), own):
            yield _at(
                way[0], f"{place} is rotated back by another table than the queries were rotated by",
                [core, *_tables(way[0]), *way, end], hint,
            )  # fmt: skip
        else:
            yield Checked(place)


def _indexer(reader: _Reader, indexer: Node, queries: dict[Node, Table]) -> Iterator[Checked | Violation]:
    core = _core_of(indexer, queries)
    q = yield from _once(reader, indexer, "q", f"{_place(indexer)}: queries", queries[core] if core else None)
    if q is not None:
        own = queries[core] if core else table(q)
        yield from _entries(reader, indexer, "k", f"{_place(indexer)}: keys", own, core)


def _tables(rotation: Node) -> list[Node]:
    """The cos of a rotation and what it is the cosine of, for a path that is shown."""
    found = table(rotation)
    pair = _positions(found)
    return [*(pair or ()), found.cos]


def _at(node: Node, message: str, path: list[Node], hint: str, *, in_module_of: Node | None = None) -> Violation:
    """A violation at the line of the layer's own code that rotates, or that hands the output on, not inside a function
    that only passes it on; tables stand in a function of their own."""
    inside = node if op_name(node) == ROTATE else in_module_of
    frame = frame_in(node, module_of(inside)) if inside is not None and module_of(inside) else None
    return violation(NAME, message, node, path=path, hint=hint, source=str(frame) if frame else "")


RULE = Rule(
    NAME,
    "attention's queries, keys and entries are rotated once at their own positions, and its output once back, by one table",
    check, ("joint", "forward"),
)  # fmt: skip
