"""``objective-reported``: every objective that is on is returned, trains something, and is a mean times its coefficient.

A loss that is formed and thrown away, that was cut off from the parameters, or that is a constant reads like one that works:
the others go down.  So each has to be an output of its own (what the log reads), depend on parameters, and pass a gradient
on.  Between the sum over tokens and the output there is one division by a count, and the coefficient once: twice is a
gradient of another size, which no log shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.fx import Node

from dsv4c.passes.flow import backward_nodes, carries, chain, floating
from dsv4c.passes.graph import depends, find, op_name, reach, value
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "objective-reported"
LOSSES = ("dsv4.indexer_kl", "dsv4.indexer_distillation")
"""Operators that exist for a loss only."""
MULTIPLICATIONS, DIVISIONS = ("aten.mul", "mul"), ("aten.div", "truediv", "div")
REDUCTIONS = ("aten.sum", "aten.mean", "sum", "mean")
FACTORIES = frozenset(
    f"aten.{name}" for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full")
)
GATHERED = ("aten.stack", "aten.cat", "stack", "cat")


def check(subject: Subject) -> Iterator[Checked | Violation]:
    flows = backward_nodes(o.tangent for o in subject.objectives.values() if o.tangent is not None)
    end = next(iter(reversed(subject.nodes)), None)
    yield from _dropped(subject, flows)
    for name in subject.expected:
        if name not in subject.objectives:
            others = ", ".join([*subject.objectives, *subject.returned]) or "nothing"
            yield violation(
                NAME, f"the objective {name} is on and is not returned: the log cannot read it (returned: {others})", end,
                hint=f"return {name} under its own name, and add losses up outside",
            )  # fmt: skip
            continue
        found = list(_objective(subject, name)) or list(_factors(subject, name))
        yield from found
        if not found:
            yield Checked(name)
    yield from _metrics(subject)


def _objective(subject: Subject, name: str) -> Iterator[Violation]:
    objective = subject.objectives[name]
    if not _values_of(objective.output) & _weights(subject):
        yield violation(
            NAME, f"the objective {name} is a constant: no parameter is in it", objective.output,
            path=[objective.output], hint="an objective that is off is left out of the outputs; one that is on has a loss",
        )  # fmt: skip
        return
    if name in subject.watched:
        return
    trained = reach([objective.tangent]) if objective.tangent is not None else set()
    if not any(p.gradient in trained for p in subject.parameters.values() if p.gradient is not None):
        cut = next((n for n in [objective.output, *_way(objective.output)] if op_name(n) == "aten.detach"), objective.output)
        yield violation(
            NAME, f"the objective {name} is reported and trains nothing: it is cut off from every parameter", cut,
            path=[cut, objective.output] if cut is not objective.output else [cut],
            hint="return the loss with its gradient; detach the copy that is a metric",
        )  # fmt: skip


def _values_of(node: Node) -> set[Node]:
    """What a value is computed from: a tensor made like another has its shape and none of its numbers."""
    seen, waiting = {node}, [node]
    while waiting:
        at = waiting.pop()
        if op_name(at) in FACTORIES:
            continue
        for source in at.all_input_nodes:
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return seen


def _weights(subject: Subject) -> set[Node]:
    """Parameters, frozen ones and buffers of floats included."""
    return {p.node for p in subject.parameters.values()} | {n for n in subject.frozen.values() if floating(n)}


def _way(node: Node) -> list[Node]:
    """Scalars that lead to a node, nearest first."""
    found = []
    while node.all_input_nodes and op_name(node) not in LOSSES:
        scalars = [n for n in node.all_input_nodes if (v := value(n)) is not None and v.is_floating_point()]
        if not scalars:
            break
        node = scalars[0]
        found.append(node)
    return found


def _dropped(subject: Subject, flows: set[Node]) -> Iterator[Checked | Violation]:
    """Losses of operators that reach no objective."""
    outputs = [o.output for o in subject.objectives.values()]
    used = depends(outputs) if outputs else {n for n in subject.nodes if n.op == "output"}
    used = used if outputs else depends(used)
    for node in find(subject.graph.graph, *LOSSES):
        if node in used:
            yield Checked(node.name)
        elif node not in flows:
            yield violation(
                NAME, f"a loss is formed by {op_name(node)} and reaches no objective", node, path=[node],
                hint="add it to the objective it belongs to, or do not form it",
            )  # fmt: skip


def _metrics(subject: Subject) -> Iterator[Checked | Violation]:
    """A metric with an objective's name is the objective's number: a constant under that name reads as a loss of 0."""
    for key, node in subject.returned.items():
        name = key.rpartition(".")[2]
        if name not in subject.objectives:
            continue
        floats = {n for n in _values_of(subject.objectives[name].output) if n.op == "call_function" and floating(n)}
        if floats & {n for n in _values_of(node) if op_name(n) not in FACTORIES}:
            yield Checked(key)
        else:
            yield violation(
                NAME, f"the metric {key} does not depend on the objective {name}", node, path=[node],
                hint=f"report the value of {name}, or leave the metric out",
            )  # fmt: skip


def _factors(subject: Subject, name: str) -> Iterator[Violation]:
    """What multiplies and divides the sum over tokens."""
    output = subject.objectives[name].output
    wanted = subject.coefficients.get(name)
    for factor, divisions, leaf in _paths(output, subject):
        if len(divisions) > 1:
            yield violation(
                NAME, f"the objective {name} is divided by a count {len(divisions)} times", divisions[0],
                path=[leaf, *reversed(divisions), output], hint="divide the sum over tokens by their number once",
            )  # fmt: skip
            return
        if wanted is None:
            continue
        if not divisions:
            yield violation(
                NAME, f"the objective {name} is a sum and not a mean: it is divided by no count", leaf, path=[leaf, output],
                hint="divide the sum over tokens by their number, counted over the whole batch",
            )  # fmt: skip
            return
        if not math.isclose(factor, wanted, rel_tol=1e-6):
            times = ""
            if wanted not in (0.0, 1.0) and factor > 0 and math.isclose(factor, wanted**2, rel_tol=1e-6):
                times = ": it is applied twice"
            elif math.isclose(factor, 1.0):
                times = ": it is not applied"
            at = next((n for n in _constants(output)), output)
            yield violation(
                NAME, f"the objective {name} is multiplied by {factor:.6g} and its coefficient is {wanted:.6g}{times}", at,
                path=[leaf, *reversed(list(_constants(output)))], hint="multiply the mean by the coefficient once",
            )  # fmt: skip
            return


def _paths(output: Node, subject: Subject) -> Iterator[tuple[float, list[Node], Node]]:
    """(product of constant factors, divisions by counts, reduction over tokens) of each way from an output to its sums."""
    learned = reach(_weights(subject))
    waiting: list[tuple[Node, float, list[Node]]] = [(output, 1.0, [])]
    seen: set[tuple[Node, float, int]] = set()
    while waiting:
        node, factor, divisions = waiting.pop()
        key = (node, round(factor, 12), len(divisions))
        if key in seen:
            continue
        seen.add(key)
        name = op_name(node)
        inputs = [n for n in node.all_input_nodes if n in learned]
        numbers = [a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        others = [n for n in node.all_input_nodes if n not in learned and (v := value(n)) is not None and v.numel() == 1]
        small = (v := value(node)) is not None and v.dim() <= 1
        if name in MULTIPLICATIONS and small and len(inputs) == 1 and (numbers or others):
            if not numbers and any(op_name(chain(n)[-1]) in ("aten.reciprocal", "reciprocal") for n in others):
                divisions = [*divisions, node]
            waiting.append((inputs[0], factor * (float(numbers[0]) if numbers else 1.0), divisions))
        elif name in DIVISIONS and small and len(inputs) == 1 and inputs[0] is node.args[0]:
            if numbers:
                waiting.append((inputs[0], factor / float(numbers[-1]), divisions))
            else:
                waiting.append((inputs[0], factor, [*divisions, node]))
        elif name in REDUCTIONS and len(inputs) == 1 and _scalars(inputs[0]):
            length = value(inputs[0]).numel() if name.endswith("mean") else 1  # type: ignore[union-attr]  # a tensor of scalars
            waiting.append((inputs[0], factor / length, divisions))
        elif (carries(node) or name in GATHERED or name in ("aten.add", "add")) and inputs and small:
            waiting += [(n, factor, divisions) for n in inputs]
        else:
            yield factor, [*divisions, *([node] if name in ("aten.mean", "mean") else [])], node


def _scalars(node: Node) -> bool:
    """Whether a vector is made of scalars, one for each layer: stacked, and multiplied as a whole."""
    while op_name(node) in MULTIPLICATIONS + DIVISIONS or carries(node):
        node = node.all_input_nodes[0]
    return op_name(node) in GATHERED


def _constants(output: Node) -> Iterator[Node]:
    """The multiplications by constants on the way to an output, nearest first."""
    for node in (output, *_way(output)):
        if op_name(node) in MULTIPLICATIONS and any(isinstance(a, (int, float)) for a in node.args):
            yield node


RULE = Rule(
    NAME, "every objective that is on is returned, trains something, and is one mean times one coefficient", check,
    applies=lambda subject: bool(subject.expected),
)  # fmt: skip
