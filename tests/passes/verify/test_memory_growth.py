"""The rule ``memory-growth``: sizes as expressions in batch and sequence, in the model and in small graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dsv4c import Reach, ops
from dsv4c.compile.capture import capture_module
from dsv4c.passes.verify import verify
from dsv4c.passes.verify.memory_growth import largest, letters, written
from tests.passes.verify.mutation import CONFIGS
from tests.passes.verify.traced import RATIO, B, C, H, K, graph, messages, model, numbers, report, whole

S = 24  # P = 6 entries, of which 2 are selected


@pytest.mark.parametrize("kind", ["swa-hash", "csa", "hca", "mtp"])
def test_a_right_model_is_proved(kind: str) -> None:
    found = verify(model(kind, symbolic=True), ["memory-growth"])
    assert found.ok, str(found)
    assert found.checked["memory-growth"] > 100


def test_without_symbolic_sizes_the_rule_is_left_out() -> None:
    assert verify(graph(lambda x: x + 1, numbers(B, S)), ["memory-growth"]).rules == ()


def symbolic(function: Callable[..., Tensor], *args: Tensor) -> list[str]:
    return messages(report("memory-growth", function, *args, mode="symbolic"))


def test_linear_growth_is_proved() -> None:
    assert symbolic(lambda x, w: (x @ w).softmax(-1), numbers(B, S, C), numbers(C, 5)) == []


def test_rows_that_are_bounded_are_no_growth() -> None:
    def watch(x: Tensor) -> Tensor:
        n = torch.sym_min(x.shape[1], torch.sym_max(8, 65536 // x.shape[1]))
        return x[:, None] * torch.ones(n, 1, device=x.device)

    assert symbolic(watch, numbers(B, S)) == []


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: (x[:, :, None] - x[:, None]).abs(), "writes [B,S,S] (forward), which grows with the square of S"),
        (lambda x: x[:, :, None] * x[:, None, : x.shape[1] // 4], "[B,S,S//4]"),
        (lambda x: torch.ones(x.shape[1], x.shape[1], device=x.device), "[S,S]"),
        (lambda x: x[:, None] * x[None], "grows with the square of B"),
    ],
)
def test_growth_with_a_square_is_reported_with_its_expression(function: Callable[..., Tensor], says: str) -> None:
    assert any(says in m for m in symbolic(function, numbers(B, S)))


def test_bytes_are_those_at_65536_tokens() -> None:
    (message, *_) = symbolic(lambda x: x[:, :, None] * x[:, None], numbers(B, S))
    assert message.endswith("17.18 GB at S=65536")  # 4 bytes x 65536^2


def test_a_view_is_not_written() -> None:
    assert symbolic(lambda x: x[:, :, None].expand(-1, -1, x.shape[1]).sum(-1), numbers(B, S)) == []


class Selects(nn.Module):
    """An indexer whose selected keys are gathered for every query, or whose scores are all that is used."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.w, self.gathers = nn.Parameter(numbers(H)), gathers
        self.big = nn.Parameter(numbers(16 * C, 16 * C))  # its gradient is larger than K c, and does not grow

    def forward(self, q: Tensor, k: Tensor, start: Tensor, end: Tensor) -> dict[str, Tensor]:
        ids, scores = ops.indexer_topk(q, k, self.w.expand(q.shape[:3]), start, end, K, RATIO)
        if not self.gathers:
            return {"lm": scores.sum() + (self.big * 2).sum()}
        return {"lm": (k[torch.arange(len(k), device=k.device)[:, None, None], ids.clamp(min=0)] * scores[..., None]).sum()}


@pytest.mark.parametrize("gathers", [True, False])
def test_a_vector_for_every_selected_entry_is_reported(gathers: bool) -> None:
    args = (numbers(B, S, H, C), numbers(B, 7, C), whole(B, S), whole(B, 7))
    found = verify(capture_module(Selects(gathers), args, {"lm": Reach()}, dynamic={0: (0, 1), 1: (0,)}), ["memory-growth"])
    assert found.checked["memory-growth"] > 0
    assert any("2 selected entries for every query" in m for m in messages(found)) == gathers


def test_parts_of_a_tuple_are_sized_and_named() -> None:
    found = graph(lambda x: x.sort(-1), numbers(B, S), mode="symbolic")
    assert [str(w.elements) for w in written(found)] == [str(w.elements) for w in written(found)[::-1]]
    assert sorted(letters(found).values()) == ["B", "S"]
    assert largest(found, 1000, 2) == ["8 kB  B*S elements  aten.sort", "4 kB  B*S elements  aten.sort"]


def test_every_kind_of_layer_is_among_the_configurations() -> None:
    assert {"swa", "csa", "hca", "mtp"} <= set(CONFIGS)
