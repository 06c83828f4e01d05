"""``gradient-reach``: each objective trains exactly what its policy allows, and all that it requires.

Decided by what the objective's tangent reaches in the backward half of the graph.  Where a cut is written (``detach``,
``no_grad``, ``.data``, an operator that returns no gradient) does not matter, and neither do the detach nodes that
autograd adds by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from dsv4c.passes.graph import is_backward, module_of, reach, shortest_path, source_frame, value
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "gradient-reach"


def check(subject: Subject) -> Iterator[Checked | Violation]:
    names = list(subject.parameters)
    for objective, (output, tangent, policy) in (
        (name, (o.output, o.tangent, o.policy)) for name, o in subject.objectives.items()
    ):
        if policy is None:
            continue
        reached = reach([tangent]) if tangent is not None else set()
        trained = [n for n in names if subject.parameters[n].gradient in reached]
        leaks = [n for n in trained if not policy.allows(n)]
        if leaks and tangent is not None:
            yield _leak(subject, objective, tangent, leaks, reached, policy.allows)
        lacking = [n for n in policy.required(names) if n not in trained]
        if lacking:
            yield violation(
                NAME, f"{objective} does not train {_some(lacking)}, which it has to", output,
                hint=f"look for a detach, no_grad, .data or integer step between {lacking[0]} and the loss; "
                f"{objective} trains {_some(trained) if trained else 'nothing'}",
            )  # fmt: skip
        for pattern in policy.unmatched([*names, *subject.frozen]):
            yield violation(
                NAME, f"the policy of {objective} requires {pattern!r}, and no parameter has such a name", output,
                hint="correct the pattern, or build the module that it means",
            )  # fmt: skip
        if not leaks and not lacking:
            yield Checked(objective)


def _leak(subject: Subject, objective: str, tangent: Node, leaks: list[str], reached: set[Node], allows) -> Violation:  # type: ignore[no-untyped-def]  # a predicate
    """The shortest way from the tangent into a forbidden gradient, and the forward value at which to cut it."""
    paths = [p for n in leaks if (g := subject.parameters[n].gradient) is not None and (p := shortest_path(tangent, g))]
    path = min(paths, key=len)
    own = {p.gradient for n, p in subject.parameters.items() if p.gradient is not None and allows(n)}
    # The first node after which nothing that may be trained can be reached any more: all that flows there is the leak.
    outside = next((n for n in path[1:] if not own & reach([n])), path[-1])
    cut = _forward_value(subject, outside)
    at = cut if cut is not None else outside
    frame = source_frame(at)
    code = f" ({frame[2]})" if frame and frame[2] else ""
    hint = f"detach {at.name}{code} before {objective} uses it" if cut is not None else f"cut the path at {outside.name}"
    return violation(NAME, f"{objective} trains {_some(leaks)}, which it may not", at, path=path, hint=hint)


def _forward_value(subject: Subject, gradient: Node) -> Node | None:
    """The forward value whose gradient this backward node is: an input of the forward operation that it belongs to."""
    number, tensor = gradient.meta.get("seq_nr"), value(gradient)
    if number is None or tensor is None:
        return None
    shape, module = tuple(map(str, tensor.shape)), module_of(gradient)
    for node in subject.nodes:
        if is_backward(node) or node.meta.get("seq_nr") != number or module_of(node) != module:
            continue
        for source in node.all_input_nodes:
            found = value(source)
            if found is not None and tuple(map(str, found.shape)) == shape:
                return source
        if node.op == "call_function":
            return node
    return None


def _some(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


RULE = Rule(
    NAME, "each objective's gradient reaches only the parameters its policy allows, and all that it requires", check,
    ("joint", "backward"),
)  # fmt: skip
