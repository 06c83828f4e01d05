"""Every fusion: how often it fires in each layer kind, and that the graph computes what it did before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4c.errors import FusionError
from dsv4c.passes.base import operators
from dsv4c.passes.fuse import FUSIONS, fuse
from dsv4c.passes.fuse.expand import expanded
from dsv4c.passes.graph import find, reach
from tests.passes.fuse.graphs import KINDS, captured, copied, run

# Matches of each fusion's chains in one layer of a kind; in the last, an MTP layer stands behind it.
EXPECTED = {
    "derotation": dict.fromkeys(KINDS, (1, 1)) | {"csa-mtp": (2, 2)},
    "indexer-scaling": {kind: (1, 1, 1) if kind.startswith("csa") else (0, 0, 0) for kind in KINDS},
    "distillation": {kind: (1,) if kind.startswith("csa") else (0,) for kind in KINDS},
    "hyper-connections": dict.fromkeys(KINDS, (1, 1)) | {"csa-mtp": (2, 2)},
}
# Operators that are gone and operators that have come where a fusion fired.
OPERATORS = {
    "derotation": {
        "dsv4.sparse_attention": -1, "dsv4.sparse_attention_backward": -1, "dsv4.rope": -2,
        "dsv4.sparse_attention_derotated": 1, "dsv4.sparse_attention_derotated_backward": 1,
    },
    "indexer-scaling": {
        "dsv4.indexer_topk": -1, "dsv4.indexer_topk_backward": -1, "dsv4.rope": -2, "dsv4.hadamard": -4, "aten.mul": -2,
        "dsv4.indexer_select": 1, "dsv4.indexer_select_backward": 1,
    },
    "distillation": {"dsv4.indexer_kl_target": -1, "dsv4.indexer_kl": -1, "dsv4.indexer_distillation": 1},
    "hyper-connections": {
        "dsv4.hc_post": -1, "dsv4.hc_pre": -1, "dsv4.hc_post_backward": -1, "dsv4.hc_pre_backward": -1, "aten.add": -1,
        "dsv4.hc_post_pre": 1, "dsv4.hc_post_pre_backward": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUSIONS)
def test_it_fires_as_often_as_the_layer_has_its_chain(name: str, kind: str) -> None:
    _, subject = captured(kind)
    graph = copied(subject)
    before = operators(graph.graph)
    fired = fuse(FUSIONS[name], graph)
    assert tuple(fired.matches.values()) == EXPECTED[name][kind]
    assert not fired.excused
    after, times = operators(graph.graph), EXPECTED[name][kind][0]
    changed = {
        k: after[k] - before[k]
        for k in before.keys() | after.keys()
        if after[k] != before[k] and k not in ("getitem", "aten.detach")
    }
    assert changed == ({k: n * times for k, n in OPERATORS[name].items()} if times else {})


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_them_together_change_no_value_no_gradient_and_no_reach(kind: str) -> None:
    # in fp64: what is left is no rounding of sums that cancel
    model, subject = captured(kind, torch.float64)
    graph = copied(subject)
    expected = run(graph, model)
    trained = reached(graph)
    for fusion in FUSIONS.values():
        fuse(fusion, graph)
    assert reached(graph) == trained
    assert_equal(run(graph, model), expected, 1e-10)


@pytest.mark.parametrize("name", FUSIONS)
def test_one_alone_changes_no_value_and_no_gradient_in_fp32(name: str) -> None:
    model, subject = captured("csa-learned")
    graph = copied(subject)
    expected = run(graph, model)
    fuse(FUSIONS[name], graph)
    # all gradients as one vector: a base or a scale alone is a few sums over tokens that may cancel, and is judged in fp64
    found, expected = (torch.cat([t.flatten() for t in ts if t is not None]) for ts in (run(graph, model), expected))
    assert_equal([found], [expected], 1e-5)


def assert_equal(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert float((a - b).norm()) <= tolerance * max(float(b.norm()), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_written_out_again_the_graph_is_what_it_was(kind: str) -> None:
    model, subject = captured(kind, torch.float64)
    graph = copied(subject)
    before, expected = operators(graph.graph), run(graph, model)
    for fusion in FUSIONS.values():
        fuse(fusion, graph)
    again = expanded(graph)
    after = operators(again.graph)
    ours = {k for k in before | after if k.startswith("dsv4.") and k not in ("dsv4.hadamard", "dsv4.rope")}
    assert {k: after[k] for k in ours} == {k: before[k] for k in ours}
    # The output is rotated once more and back: in fp32 tables cos^2 + sin^2 is 1 to 1e-7 only.
    assert_equal(run(again, model), expected, 1e-6)
    assert expanded(again) is again


def reached(graph: torch.fx.GraphModule) -> list[list[bool]]:
    """For each tangent, which of the outputs it reaches."""
    tangents = [n for n in graph.graph.find_nodes(op="placeholder") if "Tangent" in type(n.meta["desc"]).__name__]
    (output,) = graph.graph.find_nodes(op="output")
    return [[node in reach([t]) for node in output.args[0]] for t in tangents]


def test_the_output_before_its_rotation_is_neither_made_nor_kept() -> None:
    _, subject = captured("swa-learned")
    graph = copied(subject)
    fuse(FUSIONS["derotation"], graph)
    (forward,) = find(graph.graph, "dsv4.sparse_attention_derotated")
    (backward,) = find(graph.graph, "dsv4.sparse_attention_derotated_backward")
    assert any(node in backward.all_input_nodes for node in forward.users)  # the rotated output is what the backward keeps


def test_scores_and_rotated_queries_of_the_indexer_are_not_written() -> None:
    _, subject = captured("csa-learned")
    graph = copied(subject)
    fuse(FUSIONS["indexer-scaling"], graph)
    assert not list(find(graph.graph, "dsv4.hadamard", "dsv4.indexer_topk"))
    (select,) = find(graph.graph, "dsv4.indexer_select")
    config = subject.graph and captured("csa-learned")[0].config
    assert select.args[7] == pytest.approx(config.index_head_dim**-0.5 * config.index_n_heads**-0.5)


def test_a_quantised_indexer_keeps_its_transforms_and_says_why() -> None:
    from dsv4c.compile.capture import capture_model
    from tests.passes.fuse.graphs import SEQ_LEN, build

    subject = capture_model(build("csa-learned", indexer_qk_precision="fp8"), seq_len=SEQ_LEN)
    fired = fuse(FUSIONS["indexer-scaling"], subject.graph)
    assert fired.total == 0
    assert len(fired.excused) == 3 and all("quantised" in line for line in fired.excused)


@pytest.mark.parametrize(
    ("name", "argument", "value", "differs"),
    [
        ("derotation", "inverse", False, "argument 'inverse': True was expected and False was found"),
        ("indexer-scaling", "inverse", True, "argument 'inverse': False was expected and True was found"),
    ],
)
def test_one_argument_that_differs_stops_it_and_is_named(name: str, argument: str, value: bool, differs: str) -> None:
    _, subject = captured("csa-learned")
    graph = copied(subject)
    pattern = FUSIONS[name].chains["forward"].pattern
    for node in find(graph.graph, "dsv4.rope"):
        if node.args[3] is not value:
            reads_core = "sparse_attention" in str(node.args[0].args[0] if node.args[0].args else "")
            if reads_core if name == "derotation" else any("hadamard" in u.name for u in node.users):
                node.args = (*node.args[:3], value)
    before = graph.graph.python_code("self").src
    with pytest.raises(FusionError) as error:
        fuse(FUSIONS[name], graph)
    text = str(error.value)
    assert pattern.op in text
    assert ("attention.py" if name == "derotation" else "indexer.py") in text
    assert differs in text
    assert graph.graph.python_code("self").src == before  # nothing was half done
