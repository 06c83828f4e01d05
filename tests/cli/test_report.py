"""The report: one page with everything in it, from a whole run, a running one or a broken one."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsv4c.cli import report_figures
from dsv4c.cli.report import write_report
from dsv4c.errors import DataError
from dsv4c.train.log import RunLog

OBJECTIVES = ["lm", "mtp", "seq_balance", "indexer_kl"]
CONFIG = {"model": {"hidden_size": 64, "compress_ratios": [0, 4]}, "data": "<script>alert(1)</script>"}


def record_run(folder: Path, *, steps: int = 8, **changes: Any) -> Path:
    settings: dict[str, Any] = {"total_steps": 10, "objectives": OBJECTIVES[:3], "tensorboard": False}
    with RunLog(folder, console=Console(file=io.StringIO()), **(settings | changes)) as log:
        log.start(CONFIG, command=["dsv4c", "train", "--steps", "10"])
        for step in range(1, steps + 1):
            sparse = step > steps // 2
            log.set_objectives(OBJECTIVES if sparse else OBJECTIVES[:3])
            log.advance(step, tokens=1234)
            log.log(
                step, lr=1e-4 * step, stage="sparse" if sparse else "dense",
                losses={name: 5.0 / (step + i) for i, name in enumerate(log.objectives)},
                grad_norm={"global": 2.0, "attention": 1.0} | ({"indexer": 0.1} if sparse else {}),
                metrics={"expert_load": [[3, 1, 0, 4], [2, 2, 2, 2]]} | ({"captured_mass": 0.5} if sparse else {}),
            )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = record_run(tmp_path_factory.mktemp("runs") / "tiny")
    checkpoint = folder / "checkpoints" / "step-00000008"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(bytes(2_500_000))
    (folder / "checkpoints" / "step-00000009.tmp-1").mkdir()
    return write_report(folder).read_text()


class Outline(HTMLParser):
    """Text, open tags and ids of a page; fails on a tag closed out of order."""

    VOID = ("meta", "br", "link", "img", "path", "use", "image")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "svg"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_is_well_formed_and_no_id_occurs_twice(page: str) -> None:
    outline = Outline(page)
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))


def test_the_page_needs_nothing_outside_itself(page: str) -> None:
    links = re.findall(r"""(?:src|href)=["']([^"']*)|url\(([^)]*)\)|@import""", page)
    targets = ["".join(link).strip("\"'") for link in links]
    assert all(t.startswith(("#", "data:")) for t in targets), targets
    assert "<script" not in page


def test_every_objective_has_a_curve_and_its_values(page: str) -> None:
    text = Outline(page).text
    for name in OBJECTIVES:
        assert re.search(rf"{name}: [\d.e-]+ at step 8\. Pale", text), name
    assert "indexer_kl 0.625 0.4545 0.4545" in text


def test_every_figure_of_the_issue_is_there(page: str) -> None:
    titles = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    for title in ("learning rate", "gradient norm by group", "tokens per second", "expert load at step 8"):
        assert title in titles
    assert {"busiest expert / mean", "captured mass", "indexer", "attention", "sparse"} <= set(titles)
    assert Outline(page).tags.count("figure") == 10


def test_figures_follow_the_colour_of_the_page(page: str) -> None:
    assert report_figures.INK not in page
    assert "currentColor" in page
    assert "prefers-color-scheme: dark" in page


def test_settings_versions_command_and_checkpoints_are_listed(page: str) -> None:
    text = Outline(page).text
    for words in ("model.hidden_size 64", "model.compress_ratios [0, 4]", "dsv4c train --steps 10", "torch 2."):
        assert words in text
    assert "step-00000008 2.5 MB" in text
    assert ".tmp-" not in text


def test_text_of_the_run_is_escaped(page: str) -> None:
    assert "&lt;script&gt;alert(1)" in page


def test_a_banner_and_values_that_were_not_finite_are_at_the_top(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "run", steps=2, banner="routing is forced to be balanced")
    with RunLog(
        folder, console=Console(file=io.StringIO()), total_steps=10, objectives=["lm"], resume_step=2, tensorboard=False
    ) as log:
        log.log(3, losses={"lm": float("nan")}, lr=1.0)
    head = Outline(write_report(folder).read_text()).text.split("Losses")[0]
    assert "routing is forced to be balanced" in head
    assert "step 3: loss=nan, losses.lm=nan" in head


def test_a_run_killed_in_the_middle_of_its_last_line_is_reported_up_to_there(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "run", steps=2)
    with open(folder / "log.jsonl", "a") as file:
        file.write('{"step": 3, "losses": {"lm": 1.')
    assert "step 2 of 10" in Outline(write_report(folder).read_text()).text


def test_a_single_log_line_is_enough(tmp_path: Path) -> None:
    assert "1 log lines" in Outline(write_report(record_run(tmp_path / "run", steps=1)).read_text()).text


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "run.json").unlink(), "holds no run: run.json is missing"),
        (lambda f: (f / "run.json").write_text("{"), "description cannot be read"),
        (lambda f: (f / "log.jsonl").unlink(), "has logged nothing yet"),
        (lambda f: (f / "log.jsonl").write_text('{"step'), "has logged nothing yet"),
        (lambda f: (f / "log.jsonl").write_text('x\n{"step": 1, "losses": {}}\n'), r"log\.jsonl:1"),
        (lambda f: f.rename(f.with_name("gone")), "there is no such run"),
    ],
)
def test_what_is_no_run_is_refused_with_the_file_at_fault(tmp_path: Path, break_it: Any, message: str) -> None:
    folder = record_run(tmp_path / "run", steps=1)
    break_it(folder)
    with pytest.raises(DataError, match=message):
        write_report(folder)


def test_smoothing_keeps_a_straight_line_and_the_length() -> None:
    line = [float(v) for v in range(20)]
    smoothed = report_figures.smooth(line, 5)
    assert smoothed[:18] == pytest.approx(line[:18])
    assert len(smoothed) == 20


def test_imbalance_is_one_when_balanced_and_the_number_of_experts_at_worst() -> None:
    assert report_figures.imbalance([[2, 2, 2, 2], [8, 0, 0, 0]]) == [1.0, 4.0]
