"""Every use of a private torch module, and the differences between the torch versions that the package supports.

Nothing else in the package imports ``torch._*``.  Private names move between releases: keeping them here means one file to
read when one does.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
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
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._functorch._aot_autograd.fx_utils import (
    get_named_buffer_nodes,
    get_param_and_grad_nodes,
    get_plain_output_and_tangent_nodes,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
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


# What waits for the host becomes a node of the graph instead of an error of the tracer; only sizes that are asked for are
# symbolic, whatever sizes this process captured before.
_SEES_EVERYTHING = {
    "capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True, "automatic_dynamic_shapes": False,
}  # fmt: skip


def export_joint(module: nn.Module, args: tuple[Any, ...], dynamic: Mapping[int, tuple[int, ...]] | None = None) -> Joint:
    """The joint graph of a module that returns a dict of tensors, nested dicts flattened to ``outer.inner``.

    Dynamo traces it first, so that every node, forward and backward, carries the user's source line and module path.
    ``dynamic``: argument index -> dimensions that stay symbolic; torch's cache of fake tensors is off then, because with
    symbolic sizes its keys cost more than the tensors.  Raises UserWarning as an error where an operator has no gradient on
    the device (on meta, composite operators with a kernel of their own): the graph would lack an edge.
    """
    for index, dims in (dynamic or {}).items():
        for dim in dims:
            torch._dynamo.mark_dynamic(args[index], dim)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(torch._dynamo.config.patch(_SEES_EVERYTHING | {"fake_tensor_cache_enabled": not dynamic}))
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


@dataclass(frozen=True)
class Roles:
    """What the inputs and outputs of a graph inside ``torch.compile`` are, by their positions in Dynamo's graph."""

    inputs: dict[int, Node]
    gradients: dict[int, Node]  # input -> its gradient
    outputs: dict[int, Node]
    tangents: dict[int, Node]  # output -> its incoming gradient


def roles(graph: Graph) -> Roles:
    """Read from the descriptors that AOTAutograd leaves on a joint, forward or backward graph."""
    inputs: dict[int, Node] = {}
    tangents: dict[int, Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        match node.meta.get("desc"):
            case PlainAOTInput(idx=i):
                inputs[i] = node
            case TangentAOTInput(output=PlainAOTOutput(idx=i)):
                tangents[i] = node
    outputs: dict[int, Node] = {}
    gradients: dict[int, Node] = {}
    (out,) = graph.find_nodes(op="output")
    for node, desc in zip(out.args[0], out.meta.get("desc") or (), strict=False):
        match desc:
            case PlainAOTOutput(idx=i) if isinstance(node, Node):
                outputs[i] = node
            case GradAOTOutput(grad_of=PlainAOTInput(idx=i)) if isinstance(node, Node):
                gradients[i] = node
    return Roles(inputs, gradients, outputs, tangents)


def input_names(module: GraphModule) -> list[str]:
    """A name for each input of a graph that Dynamo hands to a backend: a parameter's path, or the argument's own name."""
    names = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = getattr(source, "name", "") if source is not None else ""
        names.append(_readable(name() if callable(name) else name) or node.name)
    return names


def _readable(source: str) -> str:
    """``L['self']._modules['attn']._parameters['w']`` is ``attn.w``; ``L['x']`` is ``input.x``."""
    parts = re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", source)
    root = re.match(r"L\['([^']+)'\]", source)
    if parts:
        return ".".join(parts if root is None or root[1] == "self" else (root[1], *parts))
    return f"input.{root[1]}{source[root.end() :]}" if root else source


def fake_result(target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What an operator returns for fake tensors, itself fake."""
    fakes = [leaf.fake_mode for leaf in pytree.tree_leaves(args) if isinstance(leaf, FakeTensor)]
    with fakes[0] if fakes else nullcontext():
        return target(*args)


class GraphHook(CustomGraphPass):
    """A function as a pass of Inductor, with the identity that its cache needs."""

    def __init__(self, function: Callable[[Graph], None], identity: str) -> None:
        self.function, self.identity = function, identity

    def __call__(self, graph: Graph) -> None:
        self.function(graph)

    def uuid(self) -> str:
        return self.identity

    def __reduce__(self) -> tuple[Any, ...]:  # only its identity matters in another process
        return (GraphHook, (_no_pass, self.identity))


def _no_pass(graph: Graph) -> None:
    pass


def inductor(
    module: GraphModule, inputs: list[Any], *, joint: Callable[[Graph], None], generated: Callable[[Graph], None],
    identity: str, options: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Compile a graph that Dynamo captured.

    ``joint`` is run on the joint graph before any pass of Inductor's (on the forward graph where nothing needs a gradient),
    ``generated`` on the forward and on the backward graph as they go to code generation; both only where the cache has
    nothing under this identity.
    """
    patches = {
        **options, "joint_custom_pre_pass": GraphHook(joint, identity),
        "post_grad_custom_post_pass": GraphHook(generated, identity),
    }  # fmt: skip
    return compile_fx(module, inputs, config_patches=patches)
