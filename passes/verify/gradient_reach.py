"""``gradient-reach``: each objective trains exactly what its policy allows, and all that it requires.

Decided by what the objective's tangent reaches in the backward half of the graph.  Where a cut is written (``detach``,
``no_grad``, ``.data``, an operator that returns no gradient) does not matter, and neither do the detach nodes that
autograd adds by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import Node

from dsv4c.passes.flow import backward_nodes, carries, floating, forms
from dsv4c.passes.graph import (
    depends,
    describe,
    find,
    module_of,
    op_name,
    reach,
    shortest_path,
    source_of,
    value,
)
from dsv4c.passes.places import frame_in, prefixes, variable, where, within
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "gradient-reach"


def check(subject: Subject) -> Iterator[Checked | Violation]:
    names = list(subject.parameters)
    yield from _unreturned(subject)
    yield from _injected(subject)
    for name, objective in subject.objectives.items():
        output, tangent, policy = objective.output, objective.tangent, objective.policy
        if policy is None:
            continue
        reached = reach([tangent]) if tangent is not None else set()
        trained = [n for n in names if subject.parameters[n].gradient in reached]
        leaks = [n for n in trained if not policy.allows(n)]
        if leaks and tangent is not None:
            yield from _leaks(subject, name, tangent, leaks, reached, policy.allows)
        lacking = [n for n in policy.required(names) if n not in trained]
        if lacking:
            yield violation(
                NAME, f"{name} does not train {_some(lacking)}, which it has to", output,
                hint=f"look for a detach, no_grad, .data or integer step between {lacking[0]} and the loss; "
                f"{name} trains {_some(trained) if trained else 'nothing'}",
            )  # fmt: skip
        # A backward graph on its own holds only what was saved for it.
        for pattern in policy.unmatched([*names, *subject.frozen]) if subject.stage == "joint" else ():
            yield violation(
                NAME, f"the policy of {name} requires {pattern!r}, and no parameter has such a name", output,
                hint="correct the pattern, or build the module that it means",
            )  # fmt: skip
        if not leaks and not lacking:
            yield Checked(name)


def _unreturned(subject: Subject) -> Iterator[Violation]:
    """Objectives with a policy that are no output: a term of a sum has no tangent of its own."""
    returned = ", ".join([*subject.objectives, *subject.returned]) or "nothing"
    for name in subject.expected:
        if name not in subject.objectives:
            yield violation(
                NAME, f"the policy names objective {name}, which the module does not return (it returns {returned})",
                next(iter(reversed(subject.nodes)), None),
                hint=f"return {name} as an output of its own and add the losses up outside: what a term of a sum trains "
                "cannot be told apart from what the others train",
            )  # fmt: skip


def _injected(subject: Subject) -> Iterator[Violation]:
    """Gradients that come from no tangent: a backward pass is linear in its tangents, so a sum of a gradient with a value
    that depends on none of them adds a gradient of its own."""
    tangents = [o.tangent for o in subject.objectives.values() if o.tangent is not None]
    tangents += [n for n in subject.nodes if n.op == "placeholder" and n.name.startswith("tangents") and n not in tangents]
    if not tangents or subject.stage != "joint":
        return
    flows = backward_nodes(tangents)
    ends = depends(p.gradient for p in subject.parameters.values() if p.gradient is not None)
    for node in find(subject.graph.graph, "aten.add", "aten.sub"):
        others = [n for n in node.all_input_nodes if n not in flows]
        if node in flows and node in ends and others and len(node.all_input_nodes) > 1 and not _zero(others[0]):
            yield _injection(subject, others[0], node)
    for name, parameter in subject.parameters.items():
        gradient = parameter.gradient
        if gradient is not None and gradient not in flows and not _zero(gradient):
            yield _injection(subject, gradient, gradient, name)


def _injection(subject: Subject, source: Node, at: Node, name: str = "") -> Violation:
    trained = [n for n, p in subject.parameters.items() if p.gradient is not None and p.gradient in reach([at])]
    return violation(
        NAME, f"a gradient that no objective's tangent carries is added to {_some([name] if name else trained)}", source,
        path=[source, at] if source is not at else [source],
        hint="a loss injected by a backward function has no tangent, so that nothing can be said about what it trains; "
        "return it as an output",
    )  # fmt: skip


def _zero(node: Node) -> bool:
    while carries(node):
        node = node.all_input_nodes[0]
    name = op_name(node)
    if name in ("aten.zeros", "aten.zeros_like", "aten.new_zeros"):
        return True
    if name in ("aten.full", "aten.full_like", "aten.new_full", "aten.scalar_tensor"):
        return any(a == 0 for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool))
    return False


def _leaks(
    subject: Subject, objective: str, tangent: Node, leaks: list[str], reached: set[Node], allows: Callable[[str], bool]
) -> Iterator[Violation]:  # fmt: skip
    """One violation for each value through which the gradient leaves what may be trained."""
    forbidden = [g for n in leaks if (g := subject.parameters[n].gradient) is not None]
    gradients = ((n, p.gradient) for n, p in subject.parameters.items())
    inside = depends(g for n, g in gradients if g in reached and allows(n))
    leaking = reached & depends(forbidden)
    order = {node: i for i, node in enumerate(subject.nodes)}
    # Edges after which nothing that may be trained can be reached any more: all that flows there is the leak.
    crossings = [(a, b) for a in sorted(leaking, key=order.__getitem__) for b in a.users if b in leaking and b not in inside]
    crossings = [(a, b) for a, b in crossings if a in inside] or [(tangent, b) for b in tangent.users if b in leaking]
    flows = backward_nodes(o.tangent for o in subject.objectives.values() if o.tangent is not None)
    foreign = reach(subject.parameters[n].node for n in leaks) - flows
    forward: dict[int, list[Node]] = {}
    for node in subject.nodes:
        if node not in flows and node.meta.get("seq_nr") is not None and node.op == "call_function":
            forward.setdefault(node.meta["seq_nr"], []).append(node)
    used = {node.meta["seq_nr"] for node in leaking if node.meta.get("seq_nr") is not None}
    entries: dict[Node | None, list[tuple[Node, Node, Node | None]]] = {}
    for before, after in crossings:
        operation, entering = _forward_value(forward, after, foreign)
        module = _trained_module(subject, operation, allows)
        while entering is not None and carries(entering) and within(module_of(entering), module):
            entering = entering.all_input_nodes[0]
        made = _before_line(entering, operation, foreign)
        # Parameters that are used directly are one mistake, however many there are.
        same = next((m for m in entries if m is not None and made is not None and m.op == made.op == "placeholder"), made)
        entries.setdefault(same, []).append((before, after, operation))
    for made, ways in list(entries.items())[:3]:  # further ones are most likely the same mistake
        through = reach([after for _, after, _ in ways])
        names = [n for n in leaks if subject.parameters[n].gradient in through] or leaks
        before, after, use = ways[0]
        module = _trained_module(subject, use, allows)
        if made is not None:
            at = [n for form in forms(made) for n in form.users if n.meta.get("seq_nr") in used and n not in flows]
            at = [n for n in at if within(module_of(n), module) and op_name(n) not in ("aten.detach", "aten.alias")]
            use = min(at, key=order.__getitem__, default=use)
        way = shortest_path(tangent, before) + shortest_path(after, forbidden)
        yield _leak(objective, names, module, made, use, way, after)


def _leak(
    objective: str, names: list[str], module: str, made: Node | None, use: Node | None, way: list[Node], after: Node
) -> Violation:  # fmt: skip
    message = f"{objective} trains {_some(names)}, which it may not"
    path = _shortened(way, after)
    if made is None or use is None:
        return violation(NAME, message, after, path=path, hint=f"cut the path at {after.name}")
    frame = frame_in(use, module)
    name = variable(frame, made) or made.name
    inner = f" {module}" if module else " the objective"
    maker = f"made in {where(made)},"
    if made.op == "placeholder":
        name, maker = names[0], "a parameter,"
    hint = f"detach {name} before this line uses it"
    if frame is not None and frame.text:
        hint += f": {frame.text}"
    return violation(
        NAME, f"{message}: {name}, {maker} enters{inner} with its gradient", use, path=path, hint=hint,
        source=str(frame) if frame else "",
    )  # fmt: skip


def _forward_value(
    forward: dict[int, list[Node]], gradient: Node, foreign: set[Node]
) -> tuple[Node | None, Node | None]:  # fmt: skip
    """The forward operation that a backward node belongs to, and the input whose gradient the node is: one that depends on
    a parameter that may not be trained, and has the gradient's shape."""
    tensor = value(gradient)
    shape = None if tensor is None else tuple(map(str, tensor.shape))
    module = module_of(gradient)
    operations = forward.get(gradient.meta.get("seq_nr", -1), [])
    for operation in [o for o in operations if module_of(o) == module] or operations:
        inputs = [n for n in operation.all_input_nodes if n in foreign]
        same = [n for n in inputs if (v := value(n)) is not None and tuple(map(str, v.shape)) == shape]
        if same or inputs:
            return operation, (same or inputs)[0]
    return (operations[0] if operations else None), None


def _before_line(made: Node | None, use: Node | None, foreign: set[Node]) -> Node | None:
    """What a line reads, of a value that is made within the line that uses it."""
    while made is not None and use is not None and made.op == "call_function" and source_of(made) == source_of(use):
        inputs = [n for n in made.all_input_nodes if n in foreign and floating(n)]
        if len(inputs) != 1 or not source_of(made):
            break
        made = inputs[0]
    return made


def _trained_module(subject: Subject, operation: Node | None, allows: Callable[[str], bool]) -> str:
    """The outermost module around the operation of which every parameter may be trained."""
    module = module_of(operation) if operation is not None else ""
    for prefix in prefixes(module):
        inside = [n for n in [*subject.parameters, *subject.frozen] if n.startswith(f"{prefix}.")]
        trainable = [n for n in inside if n in subject.parameters]
        if trainable and all(allows(n) for n in trainable):
            return prefix
    return module


def _shortened(way: list[Node], crossing: Node) -> list[str]:
    """At most some fifteen lines of a way: its start, what is around the crossing, its end."""
    at = way.index(crossing) if crossing in way else 0
    kept = sorted(
        {*range(min(3, len(way))), *range(max(0, at - 3), min(len(way), at + 3)), *range(max(0, len(way) - 3), len(way))}
    )
    lines: list[str] = []
    for i, (here, before) in enumerate(zip(kept, [-1, *kept], strict=False)):
        if here - before > 1 and i:
            lines.append(f"... {here - before - 1} node{'s' * (here - before > 2)}")
        lines.append(describe(way[here]))
    return lines


def _some(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


RULE = Rule(
    NAME, "each objective's gradient reaches only the parameters its policy allows, and all that it requires", check,
    ("joint", "backward"),
)  # fmt: skip
