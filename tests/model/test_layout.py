"""Where tokens and entries stand: windows, visibility, documents and padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4c.model.layout import LayerLayout, Rows, layer_layout, rows
from dsv4c.ops.visibility import entry_mask, window_mask
from tests.model.conftest import EXAMPLES, SPEC

LENGTHS = st.lists(st.integers(1, 11), min_size=1, max_size=5)


def placed(lengths: list[int], pad_left: int = 0, pad_right: int = 0) -> tuple[Rows, list[int], list[bool]]:
    """Rows of one batch row, and for each token its document and whether it is real."""
    documents = [d for d, n in enumerate(lengths) for _ in range(n)]
    documents = [documents[0]] * pad_left + documents + [documents[-1]] * pad_right
    real = [False] * pad_left + [True] * sum(lengths) + [False] * pad_right
    ids = torch.zeros(1, len(documents), dtype=torch.long)
    return rows(ids, torch.tensor([documents]), torch.tensor([real]), None), documents, real


def visible_entries(at: LayerLayout) -> Tensor:
    return entry_mask(at.start, at.entry_end, 0)[0]


@pytest.mark.parametrize("ratio", [4, 8])
def test_an_entry_is_visible_from_the_last_token_of_its_window_on(ratio: int) -> None:
    # invariant 12, B08: floor((t+1)/m); t//m is wrong at t % m == m-1
    at = layer_layout(rows(torch.zeros(1, 40, dtype=torch.long), None, None, None), SPEC, ratio)
    seen = visible_entries(at)
    assert seen.sum(-1).tolist() == [(t + 1) // ratio for t in range(40)]
    assert all(seen[t, : (t + 1) // ratio].all() for t in range(40))
    if ratio == 4:
        assert [int(seen[t].sum()) for t in (2, 3, 6, 7, 11)] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_token_sees_itself_and_what_fits_in_the_window(window: int) -> None:
    # invariant 13
    at = rows(torch.zeros(1, 20, dtype=torch.long), None, None, None)
    mask = window_mask(at.start, 0, 0, 20, window)[0]
    for t in range(20):
        assert mask[t].nonzero().flatten().tolist() == list(range(max(0, t - window + 1), t + 1))


@pytest.mark.parametrize(("n_tokens", "n_entries"), [(1, 0), (3, 0), (4, 1), (5, 1), (10, 2), (12, 3)])
def test_a_tail_shorter_than_the_ratio_makes_no_entry(n_tokens: int, n_entries: int) -> None:
    # B10
    at = layer_layout(rows(torch.zeros(2, n_tokens, dtype=torch.long), None, None, None), SPEC, 4)
    assert at.entry_end.shape == (2, n_entries)
    assert at.entry_end[0].tolist() == [4 * p + 3 for p in range(n_entries)]
    assert at.entry_has_previous[0].tolist() == [p > 0 for p in range(n_entries)]


@EXAMPLES
@given(lengths=LENGTHS, left=st.integers(0, 5), right=st.integers(0, 5), ratio=st.sampled_from([4, 8]))
def test_windows_start_with_the_document(lengths: list[int], left: int, right: int, ratio: int) -> None:
    at, documents, real = placed(lengths, left, right)
    layout = layer_layout(at, SPEC, ratio)
    first = left
    expected: list[tuple[int, bool]] = []  # last token of each window, whether a window of the document precedes it
    for n in lengths:
        expected += [(first + p * ratio + ratio - 1, p > 0) for p in range(n // ratio)]
        first += n
    n_tokens = len(documents)
    ends = layout.entry_end[0].tolist()
    assert ends == [end for end, _ in expected] + [n_tokens] * (n_tokens // ratio - len(expected))
    assert layout.entry_has_previous[0, : len(expected)].tolist() == [previous for _, previous in expected]
    assert layout.real[0].tolist() == real
    seen = visible_entries(layout)
    for t in range(n_tokens):
        mine = [
            p for p, (end, _) in enumerate(expected)
            if real[t] and documents[end] == documents[t] and end <= t
        ]  # fmt: skip
        assert seen[t].nonzero().flatten().tolist() == mine


@EXAMPLES
@given(lengths=LENGTHS, left=st.integers(0, 5), right=st.integers(0, 5))
def test_the_window_never_leaves_the_document(lengths: list[int], left: int, right: int) -> None:
    at, documents, real = placed(lengths, left, right)
    mask = window_mask(at.start, 0, 0, len(documents), 4)[0]
    for t in range(len(documents)):
        expected = [
            s for s in range(max(0, t - 3), t + 1)
            if documents[s] == documents[t] and real[s] == real[t]
        ]  # fmt: skip
        assert mask[t].nonzero().flatten().tolist() == expected


def test_positions_count_from_the_start_of_the_document() -> None:
    at, _, _ = placed([3, 1, 4], pad_left=2)
    assert at.positions[0].tolist() == [0, 1, 0, 1, 2, 0, 0, 1, 2, 3]
    assert at.start[0].tolist() == [0, 0, 2, 2, 2, 5, 6, 6, 6, 6]
    assert at.end[0].tolist() == [1, 1, 4, 4, 4, 5, 9, 9, 9, 9]


def test_document_ids_need_not_grow_and_may_come_back() -> None:
    ids = torch.zeros(1, 6, dtype=torch.long)
    at = rows(ids, torch.tensor([[7, 7, 2, 2, 7, 7]]), None, None)
    assert at.start[0].tolist() == [0, 0, 2, 2, 4, 4]


def test_rows_without_documents_are_one_document() -> None:
    at = rows(torch.zeros(2, 5, dtype=torch.long), None, None, None)
    assert bool((at.start == 0).all()) and bool((at.end == 4).all()) and bool(at.real.all())
    given_positions = torch.arange(5, 10).expand(2, 5)
    assert torch.equal(rows(torch.zeros(2, 5).long(), None, None, given_positions).positions, given_positions)
