"""Hyper-connections: post of one block and pre of the next in one operator.

The new streams are written once and used from registers; backward, the gradient that arrives from elsewhere and that of the
pre are added and go through the post without being written.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from dsv4c.passes.flow import chain
from dsv4c.passes.fuse.fusion import Chain, Fusion, instead, item, outputs, put
from dsv4c.passes.fuse.pattern import Any_, Either, Item, Match, Op, same
from dsv4c.passes.graph import argument, op_name

_POST = ("y", "streams", "post", "comb")
_PRE = ("fn", "base", "scale", "iters", "eps", "norm_eps")
FORWARD = Op("dsv4.hc_pre", {"streams": Op("dsv4.hc_post", name="post")}, name="pre")
_FROM_PRE = Item(Op("dsv4.hc_pre_backward", {"streams": Any_("new streams")}, name="pre"), 0)
_ADDED = tuple(
    Op("aten.add", {a: _FROM_PRE, b: Any_("elsewhere")}, name="sum") for a, b in (("self", "other"), ("other", "self"))
)
BACKWARD = Op("dsv4.hc_post_backward", {"grad": Either((*_ADDED, _FROM_PRE))}, name="post")


def _reads_a_post(pre: Node) -> bool:
    """Whether these streams are what another block wrote, in whatever form."""
    return _is("dsv4.hc_post", argument(pre, "streams"))


def _reads_a_pre(post: Node) -> bool:
    """Whether the gradient holds that of another block's pre and nobody else reads it, so that it need not be written."""
    grad = same(argument(post, "grad"))
    terms = grad.all_input_nodes if op_name(grad) == "aten.add" else [grad]
    return any(_is("dsv4.hc_pre_backward", term) for term in terms) and len(grad.users) == 1


def _is(operator: str, node: Node) -> bool:
    """Whether the node is the operator's output, perhaps in another shape or dtype."""
    made = chain(same(node))[-1]
    return op_name(made) == operator


def rewrite(graph: Graph, matches: Mapping[str, list[Match]]) -> None:
    fused: dict[Node, tuple[Node, ...]] = {}
    for match in matches["forward"]:
        post, pre = match["post"], match.root
        args = tuple(argument(post, name) for name in _POST) + tuple(argument(pre, name) for name in _PRE)
        new = put(graph, "hc_post_pre", args, at=pre, like=pre)
        streams, *rest = outputs(graph, new, (0, 1, 2, 3, 4, 5))
        instead(post, streams)
        for i, output in enumerate(rest):
            instead(item(pre, i), output)
        fused[streams] = (new, *rest)
    for match in matches["backward"]:
        old, pre = match.root, match["pre"]
        grads = tuple(argument(pre, name) for name in ("grad", "grad_post", "grad_comb"))
        inputs = tuple(argument(old, name) for name in _POST)
        saved = tuple(argument(pre, name) for name in ("streams", "fn", "base", "scale", "z", "rstd", "iters", "eps"))
        new = put(graph, "hc_post_pre_backward", (match.found.get("elsewhere"), *grads, *inputs, *saved), at=old, like=old)
        found = outputs(graph, new, tuple(range(7)))
        for i in range(4):
            instead(item(old, i), found[i])
        for i in range(1, 4):
            instead(item(pre, i), found[3 + i])


FUSION = Fusion(
    "hyper-connections", "the streams between two blocks are mixed, written and read by one operator",
    {
        "forward": Chain(FORWARD, "pre", "dsv4.hc_pre", applies=_reads_a_post),
        "backward": Chain(BACKWARD, "post", "dsv4.hc_post_backward", applies=_reads_a_pre),
    },
    rewrite,
)  # fmt: skip
