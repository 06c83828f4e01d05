"""The only place that sets ``torch.compile`` options.

A model is compiled by regions: each block, the MTP layer and the head are compiled whole (``fullgraph=True``), and Dynamo
reuses a region's code for every other layer of the same kind, because parameters are inputs of the graph.  43 layers
compile in the time of their kinds.

The backend ``dsv4c`` is Inductor with our passes in front of its own (:mod:`dsv4c.passes.manager`).  What it compiles is
kept by Inductor under an identity that covers the sources of operators and passes, the options, and the names that the
policies speak of; a graph that breaks a rule is never kept, so one that is found there was proved under the same identity.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dsv4c.compile.capture import reduced_precision
from dsv4c.errors import ConfigError
from dsv4c.model.objectives import POLICIES
from dsv4c.model.transformer import DeepseekV4, output_loss
from dsv4c.passes.base import Record, View
from dsv4c.passes.identity import identity
from dsv4c.passes.manager import DEFAULT, Passes, run
from dsv4c.passes.verify import RULES
from dsv4c.passes.verify.subject import Objective, Parameter, Subject
from dsv4c.reach import Reach, matches
from dsv4c.torch_compat import inductor, inductor_options, input_names, prepare_compiler, roles

log = logging.getLogger("dsv4c.passes")

REFUSED = {"fullgraph": "regions are always compiled whole: a graph break would hide part of the model from every pass"}
TRUNK = Reach(never=("*.indexer.*",))  # of an output that is no objective: nothing but its own loss trains the indexer
ROUTER = "*ffn.gate.weight"  # in a region, and in a whole model
KINDS = (".embed.", ".attn.", ".indexer.", ".compressor.", ".e_proj.", ".tid2eid")  # what tells kinds of layers apart
NAMES = {"default": DEFAULT, "verify": Passes(only=("verify", "verify-generated"))}


@dataclass(frozen=True)
class Region:
    """The verdict on one compiled graph.

    ``cached``: it was found in Inductor's cache under ``identity``, under which these rules had proved it.  ``records``
    grows when the backward graph is compiled, which torch puts off until it is needed.
    """

    name: str
    identity: str
    rules: tuple[str, ...]
    cached: bool
    records: Sequence[Record]

    def __str__(self) -> str:
        if not self.rules:
            proved = "NOT verified"
        elif self.cached:
            return f"{self.name}: in the cache, proved there by {len(self.rules)} rules, identity {self.identity[:12]}"
        else:
            places = sum(sum(r.matches.values()) for r in self.records if r.name == "verify")
            proved = f"{len(self.rules)} rules hold at {places:,} places"
        fired = {r.name: max(r.matches.values()) for r in self.records if r.kind == "fuse" and any(r.matches.values())}
        return f"{self.name}: {proved}; {', '.join(f'{name} {n}x' for name, n in fired.items()) or 'nothing to fuse'}"


@dataclass
class Backend:
    """A backend of ``torch.compile`` with these passes; ``regions`` says what it did, in order."""

    passes: Passes = DEFAULT
    regions: list[Region] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __call__(self, module: GraphModule, inputs: list[Any], *, options: dict[str, Any] | None = None, **_: Any) -> Any:
        names = input_names(module)
        name = _region(module, names)
        settings = inductor_options(options, None)
        key = identity(asdict(self.passes), names, sorted(POLICIES.items()), TRUNK, reduced_precision(), sorted(RULES))
        records: list[Record] = []
        marks: dict[int, str] = {}

        def applied(generated: bool) -> Callable[[Graph], None]:
            def apply(graph: Graph) -> None:
                def make(view: View | None = None) -> Subject:
                    whole = graph.owning_module
                    assert whole is not None
                    return _subject(view(whole) if view else whole, name, names, marks, generated)

                records.extend(run(self.passes, make, self.numbers))

            return apply

        compiled = inductor(
            module, inputs, joint=applied(False), generated=applied(True), identity=key, options=settings
        )  # fmt: skip
        rules = tuple(RULES) if self.passes.verifies else ()
        self.regions.append(Region(name, key, rules, not records, records))
        if not records and self.passes.chosen():
            log.info("%s: from the cache, identity %s, proved by %s", name, key, ", ".join(rules) or "no rule")
        return compiled


def backend(module: GraphModule, inputs: list[Any], **options: Any) -> Any:
    """``torch.compile(model, backend="dsv4c")``: every pass, in order."""
    prepare_compiler()
    return Backend()(module, inputs, **options)


def _region(module: GraphModule, names: list[str]) -> str:
    """The layer kind where the graph is one of our layers, or else the class of the outermost module in it."""
    has = {part for part in KINDS if any(part in f".{name}" for name in names)}
    if ".attn." in has and ".embed." not in has:
        attention = "csa" if ".indexer." in has else "hca" if ".compressor." in has else "swa"
        return f"mtp-{attention}" if ".e_proj." in has else f"{attention}-{'hash' if '.tid2eid' in has else 'learned'}"
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            kind = next(iter(stack.values()))[1]
            return str(getattr(kind, "__name__", kind)).rsplit(".", 1)[-1]
    return "graph"


def _subject(
    module: GraphModule, region: str, names: list[str], marks: dict[int, str], generated: bool
) -> Subject:  # fmt: skip
    """A graph inside ``torch.compile`` as the rules see it.

    The gradients of inputs that are no parameters are named ``input.NAME``: an objective that may train the indexer alone
    may not reach those either, so that what holds inside every region holds for the whole model.  ``marks``: which outputs
    the model says are objectives; filled in from the joint graph and read again for the backward one, which has no outputs
    of the forward.
    """
    found = roles(module.graph)
    stage = "joint"
    if generated:
        stage = "backward" if found.tangents else "forward"
    objectives: dict[str, Objective] = {}
    for i in sorted(found.outputs.keys() | found.tangents.keys()):
        output, tangent = found.outputs.get(i), found.tangents.get(i)
        if mark := _objective(output):
            marks[i] = mark
        if tangent is not None:
            known = marks.get(i) in POLICIES
            objectives[marks[i] if known else f"output.{i}"] = Objective(
                output or tangent, tangent, POLICIES[marks[i]] if known else TRUNK
            )  # fmt: skip
    # A backward graph lacks the inputs that it does not read: their gradients stand for them.
    parameters = {names[i]: Parameter(found.inputs.get(i, g), g) for i, g in found.gradients.items()}
    frozen = {names[i]: node for i, node in found.inputs.items() if i not in found.gradients}
    return Subject(
        region, module, stage, objectives, parameters, frozen,
        routers=(ROUTER,) if any(matches(n, (ROUTER,)) for n in names) else (), reduced_precision=reduced_precision(),
    )  # fmt: skip


def _objective(node: Node | None) -> str:
    """The objective that the model says this value is (:func:`dsv4c.model.objectives.objective`)."""
    return str((node.meta.get("custom") or {}).get("objective", "")) if node is not None else ""


def compile_model(
    model: DeepseekV4, *, passes: str | Passes = "default", regional: bool = True, **options: Any
) -> DeepseekV4:
    """The same model, its regions compiled when they are first run.

    ``passes``: ``"default"`` (verify, fuse, verify again), ``"verify"``, ``"off"``, or a
    :class:`~dsv4c.passes.manager.Passes`; ``model.compiler.regions`` says afterwards what they did.  ``regional=False``
    compiles the forward as one region: longer to compile, one graph for the whole model.  ``options`` go to
    ``torch.compile`` (mode, dynamic, backend, options).

    Raises ConfigError for an option that would change what a region is, and for a pass that there is not; when a region is
    compiled, VerifyError for a graph that breaks a rule and FusionError for a fusion that should match and does not.
    """
    for name, why in REFUSED.items():
        if name in options:
            raise ConfigError(
                f"{name} cannot be set", where="compile_model", allowed="mode, dynamic, backend, options",
                do=f"leave it out: {why}",
            )  # fmt: skip
    if model.is_compiled:
        raise ConfigError(
            "the model is compiled already", where="compile_model", allowed="one call per model",
            do="use the model as it is, or build another",
        )  # fmt: skip
    chosen = _passes(passes)
    prepare_compiler()
    if options.get("backend", "dsv4c") == "dsv4c":
        settings = inductor_options(options.get("options"), options.pop("mode", None))
        if chosen is None:
            log.warning("compiled without passes: nothing is verified")
            options |= {"backend": "inductor", "options": settings}
        else:
            model.compiler = Backend(chosen)
            options |= {"backend": model.compiler, "options": settings}
    model.is_compiled = True
    if not regional:
        model.compile(fullgraph=True, **options)
        return model
    for layer in model.blocks:
        layer.compile(fullgraph=True, **options)
    model.output_loss = torch.compile(output_loss, fullgraph=True, **options)
    return model


def _passes(passes: str | Passes) -> Passes | None:
    """None for no passes at all."""
    if isinstance(passes, Passes):
        passes.chosen()
        return passes
    if passes != "off" and passes not in NAMES:
        raise ConfigError(
            f"there are no passes {passes!r}", where="compile_model", allowed=f"{', '.join(NAMES)}, off, or a Passes",
            do="choose one of these",
        )  # fmt: skip
    return NAMES.get(passes)
