"""``rope-in-place``: a rotation whose input nobody else reads overwrites it.

Only the rotated channels move then, 64 of 512 at Flash widths.  Decided where code is generated, when it is known what is
kept for the backward; Inductor itself checks once more that the memory is free and copies where it is not.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from dsv4c.passes.base import Did, Make, Pass
from dsv4c.passes.flow import SHAPES
from dsv4c.passes.graph import find, op_name, value

_MARKS = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "seq_nr", "custom")


def given_up(node: Node) -> bool:
    """Whether nothing but the one user reads this memory, seen through views; inputs belong to the caller."""
    while True:
        if len(node.users) != 1 or node.op != "call_function":
            return False
        if op_name(node) not in SHAPES or op_name(node) == "getitem":
            return True
        node = node.all_input_nodes[0]


def place(graph: Graph) -> int:
    """Replace each such rotation by the one that overwrites; how many."""
    n = 0
    for node in list(find(graph, "dsv4.rope")):
        x, cos, sin, inverse = node.args
        if not isinstance(x, Node) or not given_up(x) or value(x) is None:
            continue
        with graph.inserting_before(node):
            call = graph.call_function(
                torch.ops.higher_order.auto_functionalized, (torch.ops.dsv4.rope_.default,),
                {"x": x, "cos": cos, "sin": sin, "inverse": inverse},
            )  # fmt: skip
            result = graph.call_function(operator.getitem, (call, 1))
        call.meta.update({k: node.meta[k] for k in _MARKS if k in node.meta}, val=(None, node.meta["val"]))
        result.meta.update({k: node.meta[k] for k in _MARKS if k in node.meta}, val=node.meta["val"])
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        n += 1
    return n


def _run(make: Make) -> Did:
    return Did({"": place(make().graph.graph)})


PASS = Pass(
    "rope-in-place", "place", "a rotation whose input nobody else reads overwrites it", ("forward", "backward"), _run
)
