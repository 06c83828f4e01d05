"""Chunked KL target: gather, logits, joint softmax, head sum, normalisation and the divergence in one operator.

``indexer_kl_target`` then ``indexer_kl`` becomes ``indexer_distillation``; the target is never written.  The gradient of the
scores is formed in the forward already, so the backward has nothing to fuse.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph

from dsv4c.passes.fuse.fusion import Chain, Fusion, put
from dsv4c.passes.fuse.pattern import Any_, Match, Op
from dsv4c.passes.graph import argument

_INPUTS = ("q", "entries", "ids", "lse")
_TEACHER = Op("dsv4.indexer_kl_target", name="teacher")
FORWARD = Op("dsv4.indexer_kl", {"target": _TEACHER, "scores": Any_("scores"), "real": Any_("real")}, name="loss")


def rewrite(graph: Graph, matches: Mapping[str, list[Match]]) -> None:
    for match in matches["forward"]:
        old, teacher = match.root, match["teacher"]
        args = tuple(argument(teacher, name) for name in _INPUTS)
        args += (match["scores"], match["real"], argument(teacher, "scale"), argument(teacher, "ratio"))
        old.replace_all_uses_with(put(graph, "indexer_distillation", args, at=old, like=old))


FUSION = Fusion(
    "distillation", "the indexer's loss and its gradient are formed without writing the target",
    {"forward": Chain(FORWARD, "teacher", "dsv4.indexer_kl_target")}, rewrite,
)  # fmt: skip
