"""``dsv4c bench ops``: every row at small shapes, and the table it prints."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from dsv4c.bench import operators
from dsv4c.bench.operators import Comparison, Shapes, compare_operators, difference
from dsv4c.cli.bench import app

SMALL = Shapes(tokens=32, heads=2, head_dim=16, rotary=8, hidden=16, index_dim=8, topk=4, chunk=8)
ROWS = [
    "rope_, in place", "rope", "sinkhorn", "sinkhorn, and back", "hc_pre and hc_post, and back", "indexer_topk",
    "indexer_kl_target",
]  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return compare_operators(SMALL, repeats=1, compiled=False)


def test_every_operator_has_a_row_that_says_what_was_reached(result):
    assert [r["operator"] for r in result["rows"]] == ROWS
    for row in result["rows"]:
        assert row["ratio"] == row["seconds"][row["peer"]] / row["seconds"]["dsv4c"]
        assert row["reached"] is (None if row["bar"] is None else row["ratio"] >= row["bar"])


def test_memory_is_measured_where_it_is_what_the_operator_is_for(result):
    measured = {r["operator"]: r["memory_share"] for r in result["rows"] if "peak_bytes" in r}
    assert set(measured) == {"indexer_topk", "indexer_kl_target"}


def test_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compare_operators(SMALL, repeats=1, compiled=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_sides_that_differ_are_not_timed(monkeypatch):
    monkeypatch.setattr(operators, "processor_seconds", lambda *_, **__: pytest.fail("was timed"))
    one = torch.ones(3)
    with pytest.raises(AssertionError, match=r"this: the sides differ by 1\.0e-03"):
        operators._row(Comparison("this", {"peer": lambda: one}, lambda: one * 1.001), 1)


@pytest.mark.parametrize(("a", "b"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_what_is_not_finite_is_a_difference(a, b):
    assert difference(torch.tensor([a]), torch.tensor([b])) == float("inf")


def test_the_command_prints_a_table_or_json_and_saves(monkeypatch, tmp_path, result):
    monkeypatch.setattr(operators, "compare_operators", lambda **_: result)
    monkeypatch.setenv("COLUMNS", "200")
    table = CliRunner().invoke(app, ["ops", "--save", str(tmp_path / "ops.jsonl")])
    assert table.exit_code == 0 and all(name in table.stdout for name in ROWS)
    printed = CliRunner().invoke(app, ["ops", "--json"])
    assert json.loads(printed.stdout)["rows"] == json.loads((tmp_path / "ops.jsonl").read_text())["rows"]
