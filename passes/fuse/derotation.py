"""De-rotation: attention whose output is rotated back in its own epilogue.

Forward, ``sparse_attention`` then ``rope(inverse)`` becomes ``sparse_attention_derotated``; backward, the rotation of the
incoming gradient moves into the prologue.  A rotation is orthogonal, so ``<dO, O>`` can be formed from the rotated pair, and
of the two outputs only one has to be kept for the backward.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph

from dsv4c.passes.fuse.fusion import Chain, Fusion, instead, item, outputs, put
from dsv4c.passes.fuse.pattern import Any_, Item, Match, Op
from dsv4c.passes.graph import argument

_INPUTS = ("q", "kv", "entries", "sink", "start", "entry_end", "ids", "scale", "window", "ratio")
_TABLE = {"cos": Any_("cos"), "sin": Any_("sin")}
FORWARD = Op(
    "dsv4.rope", {"x": Item(Op("dsv4.sparse_attention", name="core"), 0), "inverse": True, **_TABLE}, name="turned"
)  # fmt: skip
BACKWARD = Op(
    "dsv4.sparse_attention_backward",
    {
        "grad": Op("dsv4.rope", {"x": Any_("grad"), "inverse": False, **_TABLE}),
        "out": Item(Op("dsv4.sparse_attention", name="core"), 0), "lse": Item(Op("dsv4.sparse_attention", name="core"), 1),
    },
    name="backward",
)  # fmt: skip


def rewrite(graph: Graph, matches: Mapping[str, list[Match]]) -> None:
    fused = {}
    for match in matches["forward"]:
        core, table = match["core"], (match["cos"], match["sin"])
        args = tuple(argument(core, name) for name in _INPUTS)
        new = put(graph, "sparse_attention_derotated", (*args, *table), at=core, like=core)
        fused[core] = out, lse = outputs(graph, new, (0, 1))
        instead(match.root, out)
        instead(item(core, 1), lse)
    for match in matches["backward"]:
        old, (out, lse) = match.root, fused[match["core"]]
        inputs = [argument(old, name) for name in _INPUTS[:7]]
        sizes = [argument(old, name) for name in _INPUTS[7:]]
        args = (match["grad"], argument(old, "grad_lse"), *inputs, out, lse, *sizes, match["cos"], match["sin"])
        new = put(graph, "sparse_attention_derotated_backward", args, at=old, like=old)
        old.replace_all_uses_with(new)


FUSION = Fusion(
    "derotation", "attention rotates its output back itself; its backward rotates the gradient itself",
    {
        "forward": Chain(FORWARD, "core", "dsv4.sparse_attention"),
        "backward": Chain(BACKWARD, "backward", "dsv4.sparse_attention_backward"),
    },
    rewrite,
)  # fmt: skip
