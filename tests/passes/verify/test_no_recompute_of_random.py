"""The rule ``no-recompute-of-random``: what was chosen or drawn in the forward pass is kept for the backward pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dsv4c.passes.verify import Subject, verify
from tests.passes.verify.traced import B, S, graph, messages, model

RULE = ["no-recompute-of-random"]


@pytest.mark.parametrize("kind", ["swa-hash", "csa", "hca", "mtp"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_right_model_is_proved(kind: str, recompute: bool) -> None:
    found = verify(model(kind, recompute=recompute), RULE)
    assert found.ok, str(found)
    assert found.checked[RULE[0]] >= 3  # the router and both orders of the experts' rows


def marked(found: Subject, **policies: str) -> Subject:
    """The graph with checkpoint policies on the nodes with these names, ``PREFER_RECOMPUTE`` on all others."""
    for node in found.nodes:
        if node.op == "call_function":
            node.meta["recompute"] = SimpleNamespace(name=policies.get(node.name, "PREFER_RECOMPUTE"))
    return found


def chooses(x: Tensor) -> Tensor:
    return torch.sort(torch.relu(x), stable=True, dim=-1).indices.argsort()


@pytest.mark.parametrize(
    ("policies", "says"),
    [
        ({"sort": "MUST_SAVE"}, []),  # the second sort orders integers that are saved
        ({"sort": "MUST_SAVE", "sort_1": "MUST_SAVE"}, []),
        ({"relu": "MUST_SAVE"}, []),  # the choice is of saved values: the same bits
        ({}, ["aten.sort chose", "aten.sort chose"]),
    ],
)
def test_a_choice_may_be_made_again_of_what_is_saved_only(policies: dict[str, str], says: list[str]) -> None:
    found = messages(verify(marked(graph(chooses, torch.ones(B, S)), **policies), RULE))
    assert [any(s in m for s in says) for m in found] == [True] * len(says)


def test_random_numbers_may_never_be_drawn_again() -> None:
    found = verify(marked(graph(lambda x: x * torch.rand_like(x), torch.ones(B, S))), RULE)
    assert "draws again what aten.rand_like drew" in messages(found)[0]


def test_without_checkpointing_nothing_is_recomputed() -> None:
    found = verify(graph(chooses, torch.ones(B, S)), RULE)
    assert found.ok and found.checked[RULE[0]] == 2


def test_a_choice_in_the_backward_graph_is_reported() -> None:
    found = graph(
        lambda x, g: g.gather(-1, torch.relu(x).topk(2).indices), torch.ones(B, S), torch.ones(B, S), stage="backward"
    )
    for node in found.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    (message,) = messages(verify(found, RULE))
    assert "the backward pass chooses again what aten.topk chose" in message
