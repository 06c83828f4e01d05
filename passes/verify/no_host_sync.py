"""``no-host-sync``: nothing in a step waits for a value on the host.

Reading a number (``.item()``, ``bool(tensor)``), asking how many elements pass a test (``nonzero``, a boolean mask as index)
and moving a tensor between devices stall the queue of an accelerator every time they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dsv4c.passes.graph import op_name, value
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "no-host-sync"
READS = ("aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.equal", "aten.allclose")
COUNTS = frozenset(
    ("aten.nonzero", "aten.argwhere", "aten.masked_select", "aten.unique", "aten._unique2", "aten.unique_dim",
     "aten.unique_consecutive", "aten.bincount")
)  # fmt: skip
COPIES = ("aten._to_copy", "prims.device_put", "aten.copy", "aten.copy_", "prims.convert_element_type", "aten.to")
INDEXES = ("aten.index", "aten.index_put", "aten._unsafe_index", "aten._unsafe_index_put", "aten.index_put_")


def check(subject: Subject) -> Iterator[Checked | Violation]:
    for node in subject.nodes:
        if node.op != "call_function":
            continue
        found = _wait(node)
        if found is None:
            yield Checked(node.name)
        else:
            yield violation(NAME, found[0], node, path=[*node.all_input_nodes[:2], node], hint=found[1])


def _wait(node: Node) -> tuple[str, str] | None:
    """(what waits, what to write instead), None for a node that does not wait."""
    name = op_name(node)
    if name in READS:
        return f"{node.name} reads a number from the device", "keep it a tensor: torch.where, masked_fill, clamp"
    if name in INDEXES and (mask := _mask(node)) is not None:
        if "put" in name and value(node) is not None and _is_scalar(node.args[2]):
            return None  # masked assignment of one number is where()
        why = "how many elements that are is known on the device only"
        hint = "use torch.where or masked_fill, which keep the shape"
        return f"{node.name} indexes by the boolean mask {mask.name}: {why}", hint
    if name in COUNTS or _has_unknown_size(node):
        return f"{node.name} ({name}) has a size that is known on the device only", "use torch.where, sort or searchsorted"
    source = node.args[0] if name in COPIES and node.args else None
    before, after = value(source) if isinstance(source, Node) else None, value(node)
    if before is not None and after is not None and before.device.type != after.device.type:
        return f"{node.name} copies from {before.device} to {after.device}", f"make it on {after.device} from the start"
    return None


def _mask(node: Node) -> Node | None:
    indices = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else ()
    return next((i for i in indices if isinstance(i, Node) and (t := value(i)) is not None and t.dtype == torch.bool), None)


def _is_scalar(item: object) -> bool:
    tensor = value(item) if isinstance(item, Node) else None
    return tensor is not None and tensor.dim() == 0


def _has_unknown_size(node: Node) -> bool:
    """Whether the node makes a tensor with a size that depends on data, which its inputs do not have."""

    def unknown(held: object) -> set[str]:
        sizes: list[Any] = [n for n in held.shape if isinstance(n, torch.SymInt)] if isinstance(held, Tensor) else []
        return {str(s) for n in sizes for s in n.node.expr.free_symbols if str(s).startswith("u")}

    own = set().union(*(unknown(h) for h in _held(node)))
    return bool(own - set().union(*(unknown(h) for source in node.all_input_nodes for h in _held(source))))


def _held(node: Node) -> tuple[object, ...]:
    held = node.meta.get("val")
    return tuple(held) if isinstance(held, (list, tuple)) else (held,)


RULE = Rule(
    NAME, "no operation of the step reads a value on the host, has a size that depends on data, or changes the device",
    check, ("joint", "forward", "backward"),
)  # fmt: skip
