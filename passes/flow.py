"""How numbers flow through a graph: values that only change their form, products of a weight, dtypes.

Forward and backward are told apart by what the tangents reach: marks on nodes are lost inside custom autograd functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch.fx import Node

from dsv4c.passes.graph import depends, op_name, reach, value

CASTS = frozenset({"aten._to_copy", "aten.to", "prims.convert_element_type", "aten.type_as", "to", "float", "type_as"})
_FORMS = (
    "view reshape t transpose permute unsqueeze squeeze expand clone contiguous detach flatten unflatten select slice "
    "movedim split chunk unbind narrow mT alias _unsafe_view _reshape_alias split_with_sizes lift_fresh_copy"
)
SHAPES = frozenset(_FORMS.split(" ")) | frozenset(f"aten.{name}" for name in _FORMS.split(" ")) | {"getitem"}
"""Operations that give their first input's numbers in another shape, as torch calls and in graphs of operators."""
PRODUCTS = frozenset(
    ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.matmul", "aten.linear", "aten.einsum", "aten.mv",
     "aten._grouped_mm", "aten._scaled_mm", "dsv4.grouped_mm", "linear", "matmul", "einsum", "bmm")
)  # fmt: skip


def floating(node: Node) -> bool:
    tensor = value(node)
    return tensor is not None and tensor.is_floating_point()


def narrow(node: Node) -> bool:
    """Whether the node is a tensor of a float type below fp32."""
    tensor = value(node)
    return tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize < 4


def wide(node: Node) -> bool:
    """Whether the node is a tensor of fp32 or fp64."""
    return floating(node) and not narrow(node)


def dtype_name(node: Node) -> str:
    tensor = value(node)
    return str(tensor.dtype).removeprefix("torch.") if tensor is not None else "no tensor"


def carries(node: Node) -> bool:
    """Whether the node is its first input in another shape or dtype."""
    return node.op in ("call_function", "call_method") and _name(node) in CASTS | SHAPES and bool(node.all_input_nodes)


def _name(node: Node) -> str:
    return str(node.target) if node.op == "call_method" else op_name(node)


def is_product(node: Node) -> bool:
    return node.op in ("call_function", "call_method") and _name(node) in PRODUCTS


def chain(node: Node, until: Callable[[Node], bool] | None = None) -> list[Node]:
    """The node and what it is another form of, back to where its numbers were computed (the last of the list)."""
    found = [node]
    while carries(found[-1]) and not (until and until(found[-1])):
        source = found[-1].all_input_nodes[0]
        if value(source) is None and not source.all_input_nodes:
            break
        found.append(source)
    return found


def forms(node: Node) -> list[Node]:
    """The node and everything that is it in another shape or dtype."""
    found = [node]
    for other in found:
        found += [u for u in other.users if carries(u) and u.all_input_nodes[0] is other and u not in found]
    return found


def consumers(node: Node) -> Iterator[tuple[Node, Node]]:
    """(form, user): the operations that compute with the node in whatever form."""
    for form in forms(node):
        for user in form.users:
            if user.op != "output" and not (carries(user) and user.all_input_nodes[0] is form):
                yield form, user


def rounded_at(node: Node) -> Node | None:
    """Where the numbers of this value were last held in less than fp32, itself included; None where they never were."""
    return next((n for n in chain(node) if narrow(n)), None)


def backward_nodes(tangents: Iterable[Node]) -> set[Node]:
    """Everything that a gradient flows through."""
    return reach(t for t in tangents if t is not None)


def live(nodes: Iterable[Node]) -> set[Node]:
    """The nodes that an output depends on."""
    return depends(n for n in nodes if n.op == "output")


def products_of(weight: Node) -> list[Node]:
    """The operations that compute with a weight in whatever form, in forward and backward."""
    return list(dict.fromkeys(user for _, user in consumers(weight)))


def gradient_products(gradient: Node | None, flows: set[Node]) -> list[Node]:
    """The products that a parameter's gradient is the sum of."""
    waiting, found = [gradient] if gradient is not None else [], []
    while waiting:
        node = chain(waiting.pop(), is_product)[-1]
        if is_product(node):
            found.append(node)
        elif op_name(node) == "aten.add":
            waiting += [n for n in node.all_input_nodes if n in flows]
    return found


def low_product(products: Iterable[Node]) -> Node | None:
    """The first product that has an operand or a result in less than fp32."""
    return next((p for p in products if is_product(p) and any(narrow(n) for n in [p, *p.all_input_nodes])), None)
