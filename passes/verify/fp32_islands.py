"""``fp32-islands``: what the specification computes in fp32 inside a bf16 model is computed in fp32 (section 0, table).

Softmaxes, norms, rotary tables, hyper-connections, compressor, sink, logits and losses.  Decided by the dtypes of the graph;
a value that was once rounded is not made exact by widening it, so chains of casts are read back to where the numbers come
from.  What the table does not name (activation functions, projections, attention products inside a fused operator) is not
looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from torch.fx import Node

from dsv4c.passes.flow import (
    backward_nodes,
    carries,
    chain,
    consumers,
    dtype_name,
    floating,
    forms,
    gradient_products,
    is_product,
    live,
    low_product,
    narrow,
    products_of,
    rounded_at,
    wide,
)
from dsv4c.passes.graph import argument, depends, module_of, op_name, value
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.router_fp32 import WITHOUT_AUTOCAST
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "fp32-islands"

# Arguments of operators that have to be exact, with what they are.
OPERANDS: dict[str, dict[str, str]] = {
    "dsv4.sinkhorn": {"logits": "the logits of the mixing matrix"},
    "dsv4.compress": {"values": "the compressor's values", "logits": "its gate logits"},
    "dsv4.indexer_kl": {"target": "the teacher", "scores": "the indexer's scores"},
    "dsv4.swiglu_clamp": {"weight": "the routing weights"},
}
# Arguments that mean the same in every operator that has them, fused ones included.
EVERYWHERE = {
    "fn": "fn of a hyper-connection", "base": "base of a hyper-connection", "scale": "scale of a hyper-connection",
    "post": "post", "comb": "comb", "ape": "the compressor's position bias", "sink": "the attention sink",
    "cos": "the table of cosines", "sin": "the table of sines",
}  # fmt: skip
SOFTMAXES = frozenset({"aten._softmax", "aten.softmax", "aten._safe_softmax", "softmax"})
LOGARITHMS = frozenset({"aten._log_softmax", "aten.log_softmax", "aten.logsumexp", "log_softmax", "logsumexp"})
WAVES = frozenset({"aten.cos", "aten.sin", "cos", "sin"})
MEANS = frozenset({"aten.mean", "aten.sum", "aten.var", "aten.var_mean", "mean", "sum"})
SQUARES = frozenset({"aten.pow", "aten.mul", "aten.square", "pow", "mul", "square"})
PLUS_EPS = frozenset({"aten.add", "aten.clamp", "aten.clamp_min", "aten.mul", "aten.div", "aten.maximum", "add"})


def check(subject: Subject) -> Iterator[Checked | Violation]:
    """One violation for each line of code, however many layers run it."""
    lines: dict[tuple[str, str], list[Violation]] = {}
    for outcome in _places(subject):
        if isinstance(outcome, Violation):
            lines.setdefault((outcome.message, outcome.source or outcome.node), []).append(outcome)
        else:
            yield outcome
    for same in lines.values():
        modules = len({v.module for v in same})
        more = f" (and in {modules - 1} more module{'s' * (modules > 2)})" if modules > 1 else ""
        yield replace(same[0], message=same[0].message + more)


def _places(subject: Subject) -> Iterator[Checked | Violation]:
    flows = backward_nodes(o.tangent for o in subject.objectives.values() if o.tangent is not None)
    needed = live(subject.nodes)
    # What a compiled region hands on to the next one has a tangent too, and is no loss.
    losses = {n: o.output for n, o in subject.objectives.items() if (v := value(o.output)) is not None and v.dim() == 0}
    to_losses = depends(losses.values())
    for node in subject.nodes:
        if node in flows or node not in needed or node.op not in ("call_function", "call_method"):
            continue
        name = op_name(node) if node.op == "call_function" else str(node.target)
        outcomes: Iterator[Violation | None] = iter(())
        if name.startswith("dsv4.") and not name.endswith("_backward"):
            outcomes = _operands(node, name)
        elif name in SOFTMAXES | LOGARITHMS:
            outcomes = _softmax(node, name, node in to_losses)
        elif name in WAVES:
            outcomes = _wave(node)
        elif name in ("aten.rsqrt", "rsqrt"):
            outcomes = _norm(node, flows)
        elif name in ("aten.exp", "exp"):
            outcomes = _exp(node)
        elif name in ("aten.sum", "aten.index_add", "aten.scatter_add"):
            outcomes = _experts(node)
        for outcome in outcomes:
            yield Checked(node.name) if outcome is None else outcome
    yield from _parameters(subject, flows, needed)
    for objective, output in losses.items():
        if narrow(output):
            yield violation(
                NAME, f"the loss {objective} is {dtype_name(output)}", output, hint="compute losses from fp32 values"
            )
        else:
            yield Checked(objective)


def _found(message: str, at: Node, user: Node, hint: str) -> Violation:
    return violation(NAME, message, at, path=[at, user] if at is not user else [at], hint=hint)


def _operands(node: Node, name: str) -> Iterator[Violation | None]:
    arguments = {a.name for a in node.target._schema.arguments}  # type: ignore[union-attr]  # an OpOverload has a schema
    named = {k: v for k, v in EVERYWHERE.items() if k in arguments} | OPERANDS.get(name, {})
    for key, meaning in named.items():
        given = argument(node, key)
        if not isinstance(given, Node):
            continue
        low = rounded_at(given)
        if low is None:
            yield None
            continue
        was = "was" if wide(given) else "is"
        line = low if low.op != "placeholder" else node
        yield _found(
            f"{meaning} ({key} of {name}) {was} {dtype_name(low)}", line, node,
            "compute and keep it in fp32: widening it afterwards restores nothing",
        )  # fmt: skip


def _softmax(node: Node, name: str, to_loss: bool) -> Iterator[Violation | None]:
    logits = node.all_input_nodes[0]
    if narrow(node):
        kind = name.removeprefix("aten.").lstrip("_")
        yield _found(f"a {kind} is taken in {dtype_name(node)}", node, node, "take it of fp32 logits: x.float().softmax(-1)")
    elif name in LOGARITHMS and to_loss and (low := rounded_at(logits)) is not None:
        yield _found(
            f"the logits of a loss were {dtype_name(low)}", low, node,
            "multiply with the head in fp32: linear(x.float(), head.weight.float())",
        )  # fmt: skip
    else:
        yield None


def _exp(node: Node) -> Iterator[Violation | None]:
    """A softmax written out: exponentials that are added up."""
    if any(op_name(u) in MEANS for form in forms(node) for u in form.users):
        yield _found(f"exponentials are added in {dtype_name(node)}", node, node, "in fp32") if narrow(node) else None


def _wave(node: Node) -> Iterator[Violation | None]:
    angle = node.all_input_nodes[0]
    last = chain(angle)[-1]
    factors = last.all_input_nodes if op_name(last) in ("aten.mul", "aten.bmm", "aten.mm", "mul") else []
    for factor in (angle, *factors):
        low = rounded_at(factor) if floating(factor) else None
        if low is not None:
            yield _found(
                f"rotary angles are computed from {dtype_name(low)} values", low if low.op != "placeholder" else node, node,
                "positions, frequencies, angles, cosines and sines in fp32: a position of 1e6 has no bf16 angle",
            )  # fmt: skip
            return
    yield None


def _norm(node: Node, flows: set[Node]) -> Iterator[Violation | None]:
    """``x rsqrt(mean(x^2) + eps) w``: the mean, the product and the product with w before any rounding."""
    at = node.all_input_nodes[0]
    while carries(at) or op_name(at) in PLUS_EPS:
        if narrow(at):
            break
        at = at.all_input_nodes[0]
    low = next((n for n in (node, at) if narrow(n)), None)
    if low is None and op_name(at) in MEANS:
        squares = chain(at.all_input_nodes[0])
        low = next((n for n in squares if narrow(n)), None) if op_name(squares[-1]) in SQUARES else None
    if low is not None:
        if op_name(at) in MEANS or low is node:
            yield _found(
                f"the mean of squares of a norm is taken in {dtype_name(low)}", low, node, "widen x first: x.float()"
            )
        return
    for _, product in consumers(node):
        if product in flows or op_name(product) not in ("aten.mul", "mul"):
            continue
        if narrow(product):
            yield _found(
                f"a norm is multiplied in {dtype_name(product)}", product, product, "one cast, after everything else"
            )
            return
        for form, weighted in consumers(product):
            others = [n for n in weighted.all_input_nodes if n is not form]
            is_weight = any(chain(n)[-1].op in ("placeholder", "get_attr") for n in others)
            if weighted not in flows and op_name(weighted) in ("aten.mul", "mul") and is_weight and narrow(form):
                yield _found(
                    f"a norm is rounded to {dtype_name(form)} before its weight", weighted, weighted,
                    "(x * rsqrt(...) * weight).to(dtype): one cast, after the weight",
                )  # fmt: skip
                return
    yield None


def _experts(node: Node) -> Iterator[Violation | None]:
    """The sum over a token's experts."""
    sources = node.all_input_nodes[:1] if op_name(node) == "aten.sum" else node.all_input_nodes
    for source in sources:
        at = source
        while carries(at) or op_name(at) == "aten.index":
            at = at.all_input_nodes[0]
        if op_name(at) in ("dsv4.grouped_mm", "aten._grouped_mm"):
            low = narrow(node)
            yield _found(f"experts are added in {dtype_name(node)}", node, node, "add them in fp32") if low else None
            return


def _parameters(subject: Subject, flows: set[Node], needed: set[Node]) -> Iterator[Checked | Violation]:
    everything = {n: p.node for n, p in subject.parameters.items()} | dict(subject.frozen)
    gradients = {n: p.gradient for n, p in subject.parameters.items()}
    for name, node in everything.items():
        users = [u for u in products_of(node) if u not in flows and u in needed]
        if users and any(fnmatchcase(name, pattern) for pattern in subject.fp32):
            low = next((n for n in forms(node) if narrow(n) and n not in flows and n in needed), None)
            if low is not None:
                how = "stored in" if low is node else "rounded to"
                yield violation(
                    NAME, f"{name} is {how} {dtype_name(low)}", users[0] if low is node else low, path=[low, users[0]],
                    hint="keep_fp32_parameters keeps it in fp32 through .bfloat16()" if low is node else "use it in fp32",
                )  # fmt: skip
                continue
            yield Checked(name)
        products = [u for u in users if is_product(u)]
        if products and low_product(products) is None:
            back = [u for u in products_of(node) if u in flows]
            product = low_product([*gradient_products(gradients.get(name), flows), *back])
            if product is not None:
                yield violation(
                    NAME, f"the fp32 product with {name} goes backward in {dtype_name(product)}", product,
                    path=[products[0], product], hint=WITHOUT_AUTOCAST,
                )  # fmt: skip
            else:
                yield Checked(f"{name} backward" if module_of(product or node) else name)


RULE = Rule(
    NAME, "softmaxes, norms, rotary tables, hyper-connections, compressors, sinks, logits and losses are fp32", check,
    ("joint", "forward"),
)  # fmt: skip
