"""``no-recompute-of-random``: what was chosen or drawn in the forward is kept, not chosen or drawn again in the backward.

Recomputed activations are rounded as they were the first time only as long as the same kernels run: a near-tie that falls
the other way sends a token to another expert than the gradient is for, and a random number drawn again is another one.
Choices among integers that are kept may be made again: there is no rounding in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch.fx import Node

from dsv4c.passes.flow import floating
from dsv4c.passes.graph import is_backward, module_of, op_name
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "no-recompute-of-random"
CHOICES = frozenset(
    ("dsv4.route", "dsv4.indexer_topk", "aten.topk", "aten.sort", "aten.argsort", "aten.argmax", "aten.argmin",
     "aten.kthvalue")
)  # fmt: skip
_DRAWS = (
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "native_dropout",
    "dropout", "multinomial", "normal", "uniform", "exponential", "philox_rand", "inductor_random", "inductor_seeds",
)  # fmt: skip
RANDOM = frozenset(f"{space}.{name}" for space in ("aten", "prims", "rngprims") for name in _DRAWS)


def check(subject: Subject) -> Iterator[Checked | Violation]:
    first: Counter[tuple[str, str]] = Counter()
    for node in subject.nodes:
        if node.op != "call_function" or op_name(node) not in CHOICES | RANDOM:
            continue
        drawn = op_name(node) in RANDOM
        again = _is_recomputed(node) or (is_backward(node) and (subject.stage == "backward" or first[_what(node)] > 0))
        first[_what(node)] += not is_backward(node)
        if not again or (not drawn and _is_exact(node)):
            yield Checked(f"{module_of(node)}: {node.name}")
            continue
        did = "draws again" if drawn else "chooses again"
        yield violation(
            NAME, f"the backward pass {did} what {op_name(node)} {'drew' if drawn else 'chose'} in the forward pass", node,
            path=[*node.all_input_nodes[:2], node],
            hint=f"save {op_name(node)}'s results: CheckpointPolicy.MUST_SAVE for it in the checkpoint's context_fn",
        )  # fmt: skip


def _what(node: Node) -> tuple[str, str]:
    return op_name(node), module_of(node)


def _policy(node: Node) -> str:
    """``MUST_SAVE``, ``PREFER_RECOMPUTE``, ... inside a checkpointed region, empty outside."""
    return str(getattr(node.meta.get("recompute"), "name", ""))


def _is_recomputed(node: Node) -> bool:
    return _policy(node).endswith("RECOMPUTE")


def _is_exact(node: Node) -> bool:
    """Whether all that decides the choice is integers that are saved, or computed from such."""
    waiting, seen = list(node.all_input_nodes), set()
    while waiting:
        at = waiting.pop()
        if at in seen or at.op == "placeholder" or _policy(at).endswith("SAVE"):
            continue
        seen.add(at)
        if floating(at) or not at.all_input_nodes:
            return False
        waiting += at.all_input_nodes
    return True


RULE = Rule(
    NAME, "choices and random numbers of the forward pass are saved, never made again in the backward pass", check,
    ("joint", "backward"),
)  # fmt: skip
