"""What a fused operator stands for, written out again: the graph that rules read after fusing.

Rules know the operators of the model and need not know those that fusions put in their place; an argument that a fusion
passed wrongly is a wrong argument of the composition, and is found as one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dsv4c.passes.fuse.fusion import item, put
from dsv4c.passes.graph import argument, find

ATTENTION = ("q", "kv", "entries", "sink", "start", "entry_end", "ids", "scale", "window", "ratio")
Outputs = list[Node | None]  # of the fused operator, in order; None for one that is not formed again


class _Builder:
    """Puts operators in front of a fused one."""

    def __init__(self, graph: Graph, at: Node) -> None:
        self.graph, self.at = graph, at

    def __getitem__(self, name: str) -> Any:
        return argument(self.at, name)

    def all(self, *names: str) -> tuple[Any, ...]:
        return tuple(argument(self.at, name) for name in names)

    def call(self, name: str, *args: Any) -> Node:
        return put(self.graph, name, args, at=self.at, like=self.at)

    def aten(self, target: Any, *args: Any) -> Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args)
        node.meta.update(self.at.meta)
        values = torch.fx.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values)
        return node

    def outputs(self, node: Node) -> list[Node]:
        return [self.aten(operator.getitem, node, i) for i in range(len(node.meta["val"]))]


def _derotated(b: _Builder) -> Outputs:
    out, lse = b.outputs(b.call("sparse_attention", *b.all(*ATTENTION)))
    return [b.call("rope", out, b["cos"], b["sin"], True), lse]


def _derotated_backward(b: _Builder) -> Outputs:
    table = b.all("cos", "sin")
    grad, out = b.call("rope", b["grad"], *table, False), b.call("rope", b["out"], *table, False)
    inputs, sizes = b.all(*ATTENTION[:7]), b.all(*ATTENTION[7:])
    return list(b.outputs(b.call("sparse_attention_backward", grad, b["grad_lse"], *inputs, out, b["lse"], *sizes)))


def _select(b: _Builder) -> Outputs:
    q = b.call("rope", *b.all("q", "cos", "sin"), False)
    w = b.aten(torch.ops.aten.mul.Tensor, b["w"], b["temperature"])
    return list(b.outputs(b.call("indexer_topk", q, b["k"], w, *b.all("start", "entry_end", "topk", "ratio"))))


def _select_backward(b: _Builder) -> Outputs:
    q = b.call("rope", *b.all("q", "cos", "sin"), False)
    w = b.aten(torch.ops.aten.mul.Tensor, b["w"], b["temperature"])
    dq, dk, dw = b.outputs(b.call("indexer_topk_backward", b["grad"], b["ids"], q, b["k"], w, b["ratio"]))
    return [b.call("rope", dq, b["cos"], b["sin"], True), dk, b.aten(torch.ops.aten.mul.Tensor, dw, b["temperature"])]


def _distillation(b: _Builder) -> Outputs:
    target = b.call("indexer_kl_target", *b.all("q", "entries", "ids", "lse", "scale", "ratio"))
    return list(b.outputs(b.call("indexer_kl", target, b["scores"], b["real"])))


def _post_pre(b: _Builder) -> Outputs:
    streams = b.call("hc_post", *b.all("y", "streams", "post", "comb"))
    pre = b.call("hc_pre", streams, *b.all("fn", "base", "scale", "iters", "eps", "norm_eps"))
    return [streams, *b.outputs(pre)]


def _post_pre_backward(b: _Builder) -> Outputs:
    grads = b.all("grad_u", "grad_post", "grad_comb")
    saved = b.all("new_streams", "fn", "base", "scale", "z", "rstd", "iters", "eps")
    total, *parameters = b.outputs(b.call("hc_pre_backward", *grads, *saved))
    if b["grad_streams"] is not None:
        total = b.aten(torch.ops.aten.add.Tensor, b["grad_streams"], total)
    return [*b.outputs(b.call("hc_post_backward", total, *b.all("y", "streams", "post", "comb"))), *parameters]


COMPOSITIONS: dict[str, Callable[[_Builder], Outputs]] = {
    "sparse_attention_derotated": _derotated,
    "sparse_attention_derotated_backward": _derotated_backward,
    "indexer_select": _select,
    "indexer_select_backward": _select_backward,
    "indexer_distillation": _distillation,
    "hc_post_pre": _post_pre,
    "hc_post_pre_backward": _post_pre_backward,
}


def expanded(module: GraphModule) -> GraphModule:
    """A copy of a graph in which every fused operator is written out; the module itself where there is none."""
    if not any(True for _ in find(module.graph, *(f"dsv4.{name}" for name in COMPOSITIONS))):
        return module
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    (old,), (new,) = module.graph.find_nodes(op="output"), graph.find_nodes(op="output")
    new.meta.update(old.meta)
    for name, composition in COMPOSITIONS.items():
        for node in list(find(graph, f"dsv4.{name}")):
            for i, made in enumerate(composition(_Builder(graph, node))):
                read = item(node, i)
                if read is not None and made is not None:
                    read.replace_all_uses_with(made)
    graph.eliminate_dead_code()
    graph.lint()
    return GraphModule(module, graph)
