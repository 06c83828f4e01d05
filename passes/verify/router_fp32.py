"""``router-fp32``: a router decides in fp32, from its product to the choice and the weights, forward and backward.

Near 1 two neighbouring bf16 values are 2^-7 apart, more than the scores of competing experts: in bf16 a share of the tokens
goes to other experts.  What the source says proves nothing (autocast lowers the product of two fp32 tensors, and the fp32
line may be the one whose result is thrown away), so this reads the dtypes of the graph, in which both are resolved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from dsv4c.passes.graph import argument, depends, find, module_of, op_name, value
from dsv4c.passes.places import within
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "router-fp32"
CHOICES = frozenset({"aten.topk", "aten.sort", "aten.argsort", "aten.argmax", "aten.max", "aten.kthvalue", "dsv4.route"})
CHOICES |= {"topk", "sort", "argsort", "argmax", "max", "kthvalue"}
ADDITIONS = ("aten.add", "add", "iadd")
WITHOUT_AUTOCAST = (
    "run backward passes without autocast, as eager training does: dsv4c.compile_model sees to it, torch.compile alone "
    "takes the autocast of the forward pass"
)


@dataclass(frozen=True)
class _Router:
    name: str
    weight: Node | None  # its placeholder; None where only a module path is known
    products: tuple[Node, ...]  # forward


def check(subject: Subject) -> Iterator[Checked | Violation]:
    flows = backward_nodes(o.tangent for o in subject.objectives.values() if o.tangent is not None)
    needed = live(subject.nodes)
    first: Node | None = None
    told: set[str] = set()
    for pattern in subject.routers:
        for router in _matching(subject, pattern, flows, needed):
            found = list(_router(subject, router, flows, needed))
            first = next(iter(router.products), None) or first
            yield from found
            told |= {v.node for v in found}
            if not found:
                yield Checked(router.name)
    for node in find(subject.graph.graph, "dsv4.route"):
        found = list(_operator(subject, node, told))
        first = first or node
        yield from found
        if not found:
            yield Checked(node.name)
    if first is not None:
        yield from _settings(subject, first)


def _matching(subject: Subject, pattern: str, flows: set[Node], needed: set[Node]) -> list[_Router]:
    named = {n: p.node for n, p in subject.parameters.items()} | dict(subject.frozen)
    named = named or {n.name: n for n in subject.nodes if n.op in ("placeholder", "get_attr")}
    named |= {str(n.target): n for n in subject.nodes if n.op == "get_attr"}
    weights = {name: node for name, node in named.items() if fnmatchcase(name, pattern) and floating(node)}
    if weights:
        return [_Router(name, node, _products(node, flows, needed)) for name, node in weights.items()]
    modules: dict[str, list[Node]] = {}
    for node in subject.nodes:
        if is_product(node) and node not in flows and node in needed and fnmatchcase(module_of(node), pattern):
            modules.setdefault(module_of(node), []).append(node)
    return [_Router(name, None, tuple(products)) for name, products in modules.items()]


def _products(weight: Node, flows: set[Node], needed: set[Node]) -> tuple[Node, ...]:
    """The forward operations that multiply with the weight and whose results are used (a dead twin proves nothing)."""
    found = (user for _, user in consumers(weight) if user not in flows and user in needed)
    return tuple(dict.fromkeys(found))


def _router(subject: Subject, router: _Router, flows: set[Node], needed: set[Node]) -> Iterator[Violation]:
    if not router.products:
        yield violation(
            NAME, f"no result of the router {router.name} is used", router.weight,
            hint="a router that decides nothing cannot be shown to decide in fp32",
        )  # fmt: skip
    for product in router.products:
        low = next((n for n in [product, *product.all_input_nodes] if narrow(n)), None)
        if low is not None:
            yield violation(
                NAME, f"the router {router.name} is multiplied in {dtype_name(low)}", product,
                path=[*_operands(product), product],
                hint="multiply x.float() with weight.float() inside torch.autocast(x.device.type, enabled=False)",
            )  # fmt: skip
            continue
        yield from _scores(subject, router, product, flows, needed)
        yield from _stream(subject, router, product, flows)
    if low_product(router.products) is None:
        yield from _backward(subject, router, flows)


def _operands(product: Node) -> list[Node]:
    return [n for n in product.all_input_nodes if floating(n)]


def _scores(
    subject: Subject, router: _Router, product: Node, flows: set[Node], needed: set[Node]
) -> Iterator[Violation]:  # fmt: skip
    """From the product to the choice, and to the weights as they go to the experts."""
    region, order = _region(subject, product, flows, needed)
    users = [u for n in order for u in n.users if u not in flows and u in needed]
    choices = [u for u in users if op_name(u) in CHOICES or str(u.target) in CHOICES]
    leaving = [u for u in users if u not in region and floating(u) and u not in choices]
    before, weights = depends(choices), depends(leaving)
    for node in order:
        if narrow(node) and node in before:
            yield violation(
                NAME, f"the scores of the router {router.name} are rounded to {dtype_name(node)} before the choice", node,
                path=[product, node], hint="keep logits, scores and bias in fp32 up to the choice; cast after it",
            )  # fmt: skip
            return
    for node in order:
        if narrow(node) and node in weights and not carries(node):
            yield violation(
                NAME, f"the weights of the router {router.name} are computed in {dtype_name(node)}", node,
                path=[product, node], hint="normalise the chosen scores in fp32",
            )  # fmt: skip
            return
    for node in order:
        for joined in node.all_input_nodes if node in before | set(choices) else ():
            if joined not in region and narrow(joined) and op_name(node) != "dsv4.route":
                yield _bias(subject, router.name, joined, node)
                return
            if joined not in region and floating(joined) and op_name(node) in ADDITIONS and rounded_at(joined) is not None:
                yield _bias(subject, router.name, joined, node)
                return


def _region(
    subject: Subject, product: Node, flows: set[Node], needed: set[Node]
) -> tuple[set[Node], list[Node]]:  # fmt: skip
    """What is computed from the product alone: every other float operand is a constant, a parameter or a buffer."""
    region, order = {product}, [product]
    for node in subject.nodes:
        if node in flows or node not in needed or node in region or node.op not in ("call_function", "call_method"):
            continue
        inputs = [n for n in node.all_input_nodes if floating(n) or n in region]
        if not any(n in region for n in inputs) or not (floating(node) or value(node) is None):
            continue
        if all(n in region or not _computed(n) for n in inputs):
            region.add(node)
            order.append(node)
    return region, order


def _computed(node: Node) -> bool:
    end = chain(node)[-1]
    return end.op in ("call_function", "call_method") and bool(end.all_input_nodes)


def _bias(subject: Subject, router: str, joined: Node, at: Node) -> Violation:
    source = chain(joined)[-1]
    names = {node: n for n, node in subject.frozen.items()} | {p.node: n for n, p in subject.parameters.items()}
    name = names.get(source, source.name)
    kind = dtype_name(next(n for n in chain(joined) if narrow(n)))
    return violation(
        NAME, f"{name} is {kind} where it is added to the scores of the router {router}", at, path=[source, at],
        hint="keep the bias in fp32: its steps are 1e-3, and near 1 those of bf16 are 8e-3",
    )  # fmt: skip


def _operator(subject: Subject, node: Node, told: set[str]) -> Iterator[Violation]:
    """``dsv4.route``: logits that were never held in less than fp32, and such a bias; ``told``: nodes already reported."""
    logits, bias = argument(node, "logits"), argument(node, "bias")
    low = rounded_at(logits)
    if low is not None and not told & {n.name for n in chain(logits)}:
        yield violation(
            NAME, f"dsv4.route decides on logits that were {dtype_name(low)}", low, path=[low, logits, node],
            hint="multiply in fp32; widening the result restores nothing",
        )  # fmt: skip
    if bias is not None and rounded_at(bias) is not None and node.name not in told:
        yield _bias(subject, module_of(node) or node.name, bias, node)


def _backward(subject: Subject, router: _Router, flows: set[Node]) -> Iterator[Violation]:
    if router.weight is None:
        return
    gradient = next((p.gradient for p in subject.parameters.values() if p.node is router.weight), None)
    products = [user for user in products_of(router.weight) if user in flows]
    product = low_product([*gradient_products(gradient, flows), *products])
    if product is not None:
        yield violation(
            NAME, f"the router {router.name} goes backward in {dtype_name(product)}", product,
            path=[*_operands(product), product], hint=WITHOUT_AUTOCAST,
        )  # fmt: skip


def _stream(subject: Subject, router: _Router, product: Node, flows: set[Node]) -> Iterator[Violation]:
    """The experts' sum goes back to the dtype of the activations before it joins them."""
    name = router.name.rpartition(".")[0] if router.weight is not None else router.name
    block = name.rpartition(".")[0]  # the module that holds router and experts
    weight = set(forms(router.weight)) if router.weight is not None else set()
    entering = next((low for n in product.all_input_nodes if n not in weight and (low := rounded_at(n))), None)
    if not block or entering is None:
        return
    size = value(entering).numel()  # type: ignore[union-attr]  # a narrow node is a tensor
    for node in subject.nodes:
        tensor = value(node)
        if node in flows or not within(module_of(node), block) or tensor is None or not wide(node) or tensor.numel() != size:
            continue
        for form, user in consumers(node):
            if user in flows or within(module_of(user), block) or not wide(user):
                continue
            if any(narrow(n) for n in user.all_input_nodes if n is not form):
                yield violation(
                    NAME,
                    f"the {dtype_name(node)} sum of the experts of {block} makes the residual stream {dtype_name(user)}",
                    node, path=[entering, node, user], hint=f"cast the sum back to {dtype_name(entering)}",
                )  # fmt: skip
                return


def _settings(subject: Subject, at: Node) -> Iterator[Violation]:
    """Process settings under which an fp32 product is none on the device; those of CUDA do not concern a CPU graph."""
    tensor = next((v for n in [at, *at.all_input_nodes] if (v := value(n)) is not None), None)
    on_cpu = tensor is not None and tensor.device.type == "cpu"
    for setting, on in subject.reduced_precision.items():
        if on and not (on_cpu and ".cuda." in setting):
            yield violation(
                NAME, f"fp32 products of routers may be taken in less than fp32: {setting}", at,
                hint="torch.set_float32_matmul_precision('highest'), and no allow_tf32",
            )  # fmt: skip


RULE = Rule(
    NAME, "a router multiplies, scores, adds its bias and chooses in fp32, forward and backward", check,
    ("joint", "forward"),
)  # fmt: skip
