"""A graph as the rules see it: which nodes are parameters, objectives, tangents and gradients, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from dsv4c.reach import Reach


@dataclass(frozen=True)
class Objective:
    """An output that is trained: its node, its tangent (None: nothing flows into it), and what it may reach."""

    output: Node
    tangent: Node | None
    policy: Reach | None = None


@dataclass(frozen=True)
class Parameter:
    """A parameter that asks for a gradient: its placeholder, and the node of its gradient, None where nothing reaches it."""

    node: Node
    gradient: Node | None


@dataclass(frozen=True)
class Subject:
    """What is verified.

    ``stage``: ``joint`` (forward and backward in one graph, as captured), ``forward`` or ``backward`` (after Inductor's own
    passes, as they go to code generation).  ``returned``: other outputs by name, such as metrics.  ``expected``: the names
    of objectives that are on.  ``routers``: glob patterns over parameter names and module paths that are router weights.
    ``fp32``: glob patterns over parameters that are stored and used in fp32.  ``coefficients``: what each objective is
    multiplied by, and that each is a mean.  ``watched``: objectives that are reported while all they could train is frozen.
    ``trained`` is False for a graph without tangents (a user's forward graph): rules about gradients do not apply.
    """

    name: str
    graph: GraphModule
    stage: str = "joint"
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    frozen: Mapping[str, Node] = field(default_factory=dict)  # parameters without a gradient, and buffers
    returned: Mapping[str, Node] = field(default_factory=dict)
    expected: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    reduced_precision: Mapping[str, bool] = field(default_factory=dict)  # process settings: tf32, bf16 reductions
    fp32: tuple[str, ...] = ()
    coefficients: Mapping[str, float] = field(default_factory=dict)
    watched: tuple[str, ...] = ()

    @property
    def nodes(self) -> list[Node]:
        return list(self.graph.graph.nodes)
