"""Every use of a private torch module, and the differences between the torch versions that the package supports.

Nothing else in the package imports ``torch._*``.  Private names move between releases: keeping them here means one file to
read when one does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor
import torch._inductor.config
from torch import nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.fx_utils import (
    get_named_buffer_nodes,
    get_param_and_grad_nodes,
    get_plain_output_and_tangent_nodes,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

RECOMPILE_LIMIT = 64  # one compiled block per layer kind, stage and shape; torch's own limit is 8


@dataclass(frozen=True)
class CompileCounts:
    """Totals of this process."""

    graphs: int
    graph_breaks: int


def compile_counts() -> CompileCounts:
    """How many graphs were compiled, and how many breaks were met."""
    return CompileCounts(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def prepare_compiler(limit: int = RECOMPILE_LIMIT) -> None:
    """Settings of this process under which a compiled model means the same as the eager one.

    Raises Dynamo's limit of compiled variants per code object, because blocks of every kind share one ``forward``.  Turns
    autocast off in compiled backward passes, as it is in eager ones: torch's default runs them under the autocast of the
    forward, so that the matrix products of fp32 regions (router, hyper-connections, distillation) would go backward in
    bf16.
    """
    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)
    torch._functorch.config.backward_pass_autocast = "off"


def inductor_options(options: dict[str, Any] | None, mode: str | None) -> dict[str, Any]:
    """``options`` and those of ``mode``, and rounding where the model rounds.

    Inductor leaves out a cast to bf16 that is followed by one back to fp32; eager rounds there, and a choice of experts or
    entries may hang on it (B36).
    """
    chosen = torch._inductor.list_mode_options(mode) if mode else {}
    return {"emulate_precision_casts": True, **chosen, **(options or {})}


@contextmanager
def inductor_settings(**settings: object) -> Iterator[None]:
    """Inductor settings inside this block."""
    with torch._inductor.config.patch(settings):
        yield


def reset_compiler() -> None:
    """Forget every compiled graph and the counts."""
    torch._dynamo.reset()
    counters.clear()


@dataclass(frozen=True)
class Joint:
    """A captured joint graph and the names of its parts.

    ``outputs``: key of the returned dict -> node; ``tangents``: key -> placeholder of the incoming gradient, for outputs
    that a gradient can flow into; ``parameters``: name -> placeholder and gradient (None where there is no path);
    ``buffers``: name -> placeholder, parameters that ask for no gradient included.
    """

    module: GraphModule
    outputs: dict[str, Node]
    tangents: dict[str, Node]
    parameters: dict[str, tuple[Node, Node | None]]
    buffers: dict[str, Node]


def export_joint(module: nn.Module, args: tuple[Any, ...], dynamic: Mapping[int, tuple[int, ...]] | None = None) -> Joint:
    """The joint graph of a module that returns a dict of tensors, nested dicts flattened to ``outer.inner``.

    Dynamo traces it first, so that every node, forward and backward, carries the user's source line and module path.
    ``dynamic``: argument index -> dimensions that stay symbolic.  Raises UserWarning as an error where an operator has no
    gradient on the device (on meta, composite operators with a kernel of their own): the graph would lack an edge.
    """
    for index, dims in (dynamic or {}).items():
        for dim in dims:
            torch._dynamo.mark_dynamic(args[index], dim)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        traced = dynamo_graph_capture_for_export(module)(*args)
        stack.enter_context(tracing(TracingContext(traced.meta["fake_mode"])))
        joint = aot_export_joint_with_descriptors(stack, traced, args)
        graph, spec = joint.graph_module.graph, joint.out_spec
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
        pairs = {output.idx: pair for output, pair in get_plain_output_and_tangent_nodes(graph).items()}
        named = [(".".join(str(getattr(step, "key", step)) for step in path), pairs[i]) for path, i in paths if i in pairs]
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        parameters = {desc.target: pair for desc, pair in get_param_and_grad_nodes(graph).items()}
        return Joint(
            joint.graph_module,
            {key: output for key, (output, _) in named},
            {key: tangent for key, (_, tangent) in named if tangent is not None},
            {name: pair for name, pair in parameters.items() if name in trained},
            {n: node for n, (node, _) in parameters.items() if n not in trained} | get_named_buffer_nodes(graph),
        )
