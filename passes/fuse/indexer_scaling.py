"""Indexer scaling: rotation, Hadamard transform, temperature, scores, masks and top-k in one operator.

The Hadamard matrix is orthogonal and multiplies queries and keys alike, ``<q H, k H> = <q, k>``: where nothing rounds in
between, both transforms go.  The temperature is a number with which the operator multiplies its head weights, once.
Neither the rotated queries nor the scores are written.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from dsv4c.errors import FusionError
from dsv4c.passes.fuse.fusion import Chain, Fusion, instead, outputs, put
from dsv4c.passes.fuse.pattern import Any_, Either, Item, Match, Op, same
from dsv4c.passes.graph import argument, describe, op_name, value

_TABLE = {"cos": Any_("cos"), "sin": Any_("sin")}
_ROTATED = Op("dsv4.rope", {"x": Any_("q"), "inverse": False, **_TABLE})
FORWARD = Op(
    "dsv4.indexer_topk",
    {
        "q": Either((Op("dsv4.hadamard", {"x": _ROTATED}, name="transformed q"), _ROTATED)),
        "k": Either((Op("dsv4.hadamard", {"x": Any_("k")}, name="transformed k"), Any_("k"))),
        "w": Op("aten.mul", {"self": Any_("w"), "other": Any_("temperature")}),
    },
    name="core",
)  # fmt: skip
_BACKWARD = Op("dsv4.indexer_topk_backward", name="core")
_DQ = Item(_BACKWARD, 0)
BACKWARD_Q = Op(
    "dsv4.rope", {"x": Either((Op("dsv4.hadamard", {"x": _DQ}), _DQ)), "inverse": True, **_TABLE}, name="dq"
)  # fmt: skip
BACKWARD_W = Op("aten.mul", {"self": Item(_BACKWARD, 2), "other": Any_("temperature")}, name="dw")


def _rounded(core: Node) -> str:
    """Why the chain of this operator cannot be one: something rounds the queries between their rotation and the scores."""
    waiting, seen = [same(argument(core, "q"))], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or node in seen or op_name(node) == "dsv4.rope":
            continue
        seen.add(node)
        tensor = value(node)
        is_float8 = tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize == 1
        if op_name(node) == "aten.round" or is_float8:
            return f"queries are quantised by {node.name}"
        waiting += node.all_input_nodes
    return ""


def _rounded_forward(backward: Node) -> str:
    core = _core(backward)
    return _rounded(core) if core is not None else ""


def _core(backward: Node) -> Node | None:
    """The forward operator whose ids this backward reads."""
    ids = same(argument(backward, "ids"))
    core = ids.args[0] if isinstance(ids, Node) and op_name(ids) == "getitem" else None
    return core if isinstance(core, Node) else None


def rewrite(graph: Graph, matches: Mapping[str, list[Match]]) -> None:
    fused: dict[Node | None, Match] = {}
    for match in matches["forward"]:
        old = match.root
        if ("transformed q" in match.found) != ("transformed k" in match.found):
            raise FusionError("only one of queries and keys has a Hadamard transform", where=describe(old))
        tensors = (match["q"], match["k"], match["w"], match["cos"], match["sin"], argument(old, "start"))
        numbers = (match["temperature"], argument(old, "topk"), argument(old, "ratio"))
        new = put(graph, "indexer_select", (*tensors, argument(old, "entry_end"), *numbers), at=old, like=old)
        old.replace_all_uses_with(new)
        fused[new] = match
    by_core = {match["core"]: match for match in matches["backward of w"]}
    for match in matches["backward of q"]:
        old = match["core"]
        forward = fused[_core(old)]
        known = tuple(forward[name] for name in ("q", "k", "w", "cos", "sin", "temperature"))
        args = (argument(old, "grad"), argument(old, "ids"), *known, argument(old, "ratio"))
        new = put(graph, "indexer_select_backward", args, at=old, like=old)
        dq, dk, dw = outputs(graph, new, (0, 1, 2))
        instead(match.root, dq)
        instead(by_core[old].root, dw)
        for user in list(old.users):
            if user.args[1] == 1:
                for transform in [u for u in user.users if "transformed k" in forward.found]:
                    instead(transform, dk)
                instead(user, dk)


FUSION = Fusion(
    "indexer-scaling", "the indexer rotates, scales, scores and selects in one operator, and so backward",
    {
        "forward": Chain(FORWARD, "core", "dsv4.indexer_topk", excuse=_rounded),
        "backward of q": Chain(BACKWARD_Q, "core", "dsv4.indexer_topk_backward", excuse=_rounded_forward),
        "backward of w": Chain(BACKWARD_W, "core", "dsv4.indexer_topk_backward", excuse=_rounded_forward),
    },
    rewrite,
)  # fmt: skip
