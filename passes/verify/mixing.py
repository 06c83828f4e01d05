"""``mixing``: residual streams are mixed by the transpose of the matrix that Sinkhorn made, as the formula has it.

``X'_k = post_k y + sum_j comb_jk X_j``: the first index of comb is summed.  Untransposed, comb passes every test of shapes
and of row and column sums, and is wrong; so does a comb of another mixing.  The operator sums the right index; what remains
to be shown is that it gets comb, post and the streams as they belong together.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from dsv4c.passes.flow import carries
from dsv4c.passes.graph import argument, find, is_backward, module_of, op_name
from dsv4c.passes.terms import Values, bare
from dsv4c.passes.verify.report import Violation, violation
from dsv4c.passes.verify.rule import Checked, Rule
from dsv4c.passes.verify.subject import Subject

NAME = "mixing"
PRE, POST = "dsv4.hc_pre", "dsv4.hc_post"
_TURNS = ("aten.t", "aten.transpose", "aten.permute", "aten.mT", "aten.numpy_T")


def check(subject: Subject) -> Iterator[Checked | Violation]:
    values = Values(subject.graph)
    for mix in find(subject.graph.graph, POST):
        if not is_backward(mix):
            yield from _mix(mix, values)


def _mix(mix: Node, values: Values) -> Iterator[Checked | Violation]:
    made, wrong = {}, False
    for name, index in (("post", 1), ("comb", 2)):
        node, turned = argument(mix, name), None
        while carries(node) and op_name(node) != "getitem":
            turned = node if op_name(node) in _TURNS else turned
            node = node.args[0]
        if turned is not None:
            wrong = True
            yield violation(
                NAME, f"{name} of {mix.name} is transposed on its way from where it was made", turned, path=[turned, mix],
                hint=f"pass {name} as {PRE} returns it: {POST} sums its first index",
            )  # fmt: skip
        source = node.args[0] if op_name(node) == "getitem" and node.args[1] == index else None
        if not isinstance(source, Node) or op_name(source) != PRE:
            wrong = True
            yield violation(
                NAME, f"{name} of {mix.name} is not what {PRE} returned as {name}", mix, path=[node, mix],
                hint=f"pass output {index} of {PRE}",
            )  # fmt: skip
        else:
            made[name] = source
    if wrong:
        return
    pre = made["comb"]
    if made["post"] is not pre or not values.same(bare(argument(mix, "streams")), bare(argument(pre, "streams"))):
        yield violation(
            NAME, f"{mix.name} mixes by a matrix that was not made of the streams it mixes", mix,
            path=[made["post"], pre, mix], hint="post, comb and streams belong to one mixing",
        )  # fmt: skip
        return
    yield Checked(f"{module_of(mix)}: {mix.name}")


RULE = Rule(
    NAME, "residual streams are mixed by comb and post as they were made of these streams, the first index of comb summed",
    check, ("joint", "forward"),
)  # fmt: skip
