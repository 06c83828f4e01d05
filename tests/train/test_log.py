"""The log of a run: every objective in every line, everywhere; resuming; strict JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]  # ships no types

from dsv4c.errors import ConfigError, DataError
from dsv4c.train.log import RunLog, read_log

OBJECTIVES = ("lm", "mtp", "seq_balance", "indexer_kl")
LOSSES = {"lm": 5.0, "mtp": 1.5, "seq_balance": 0.001, "indexer_kl": 0.25}
BANNER = "routing is forced to be balanced: these losses mean nothing"


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100), out


def open_log(folder: Path, **changes: Any) -> RunLog:
    settings: dict[str, Any] = {
        "console": console()[0],
        "total_steps": 10,
        "objectives": OBJECTIVES,
        "tensorboard": False,
    }
    return RunLog(folder, **(settings | changes))


def write(log: RunLog, step: int, **changes: Any) -> dict[str, Any]:
    log.advance(step, tokens=64, loss=6.75)
    settings: dict[str, Any] = {"losses": LOSSES, "lr": 1e-4}
    return log.log(step, **(settings | changes))


def test_a_record_holds_everything_people_watch(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        write(
            log, 1, stage="sparse", grad_norm={"global": 2.0, "moe": 1.0},
            metrics={"captured_mass": torch.tensor(0.75), "expert_load": torch.tensor([[3, 1], [2, 2]])},
        )  # fmt: skip
    (record,) = read_log(tmp_path / "log.jsonl")
    assert record["losses"] == LOSSES
    assert record["loss"] == pytest.approx(sum(LOSSES.values()))
    assert record["expert_load"] == [[3, 1], [2, 2]]
    assert record["metrics"] == {"captured_mass": 0.75}
    assert record["grad_norm"] == {"global": 2.0, "moe": 1.0}
    assert (record["step"], record["lr"], record["stage"], record["tokens"]) == (1, 1e-4, "sparse", 64)
    assert record["tokens_per_s"] > 0


@pytest.mark.parametrize("terminal", [False, True])
def test_every_objective_is_on_the_screen_by_name_at_every_line(tmp_path: Path, terminal: bool) -> None:
    screen, out = console(terminal=terminal)
    with open_log(tmp_path, console=screen) as log:
        for step in (1, 2):
            write(log, step)
    lines = [line for line in out.getvalue().splitlines() if f"step {1}/10" in line or "step 2/10" in line]
    assert len(lines) == 2
    for line in lines:
        assert all(f"{name} {value:.4g}" in line for name, value in LOSSES.items())
        assert "tokens/s" in line
        assert "left 0:" in line


def test_without_a_terminal_there_are_lines_and_no_bar(tmp_path: Path) -> None:
    screen, out = console()
    with open_log(tmp_path, console=screen) as log:
        log.advance(1, tokens=64, loss=6.75)
        assert out.getvalue() == ""
        write(log, 2)
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert len(out.getvalue().splitlines()) == 1


def test_every_objective_is_in_tensorboard_by_name(tmp_path: Path) -> None:
    with open_log(tmp_path, tensorboard=True) as log:
        write(log, 3, grad_norm={"global": 2.0}, metrics={"expert_load": [[3, 1]]})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {f"loss/{name}" for name in OBJECTIVES} | {
        "loss/total",
        "lr",
        "tokens_per_s",
        "grad_norm/global",
    } <= found.keys()
    assert found["loss/mtp"].value == 1.5
    assert found["loss/mtp"].step == 3
    assert found["expert_load_max_over_mean/00"].value == 1.5


@pytest.mark.parametrize("missing", OBJECTIVES)
def test_an_objective_that_is_on_and_missing_is_an_error_not_a_zero(tmp_path: Path, missing: str) -> None:
    with open_log(tmp_path) as log:
        with pytest.raises(ConfigError, match=f"is on and missing: {missing}"):
            write(log, 1, losses={k: v for k, v in LOSSES.items() if k != missing})
        assert read_log(tmp_path / "log.jsonl") == []


def test_an_objective_that_is_off_may_not_appear(tmp_path: Path) -> None:
    with open_log(tmp_path, objectives=("lm", "mtp", "seq_balance")) as log:
        with pytest.raises(ConfigError, match="is off and present: indexer_kl"):
            write(log, 1)
        log.set_objectives(OBJECTIVES)
        write(log, 1)


def test_the_banner_is_at_every_line_in_every_place(tmp_path: Path) -> None:
    screen, out = console()
    with open_log(tmp_path, console=screen, banner=BANNER) as log:
        for step in (1, 2, 3):
            write(log, step)
    assert out.getvalue().count(BANNER) == 3
    assert [r["banner"] for r in read_log(tmp_path / "log.jsonl")] == [BANNER] * 3


def test_values_that_json_does_not_have_are_null_and_named(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    with open_log(tmp_path) as log:
        write(log, 1, losses=LOSSES | {"mtp": float("nan")}, grad_norm={"global": float("inf")})
    line = (tmp_path / "log.jsonl").read_text()
    record = json.loads(line, parse_constant=refuse)
    assert record["losses"]["mtp"] is None
    assert record["losses"]["lm"] == 5.0
    assert set(record["nonfinite"]) == {"loss=nan", "losses.mtp=nan", "grad_norm.global=inf"}


def test_each_line_is_on_the_disk_when_log_returns(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        write(log, 1)
        assert [r["step"] for r in read_log(tmp_path / "log.jsonl")] == [1]


def test_resuming_drops_what_came_after_the_checkpoint_and_a_half_written_line(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        for step in (1, 2, 3, 4):
            write(log, step)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 5, "los')
    with open_log(tmp_path, resume_step=2) as log:
        write(log, 3, lr=7.0)
    records = read_log(tmp_path / "log.jsonl")
    assert [(r["step"], r["lr"]) for r in records] == [(1, 1e-4), (2, 1e-4), (3, 7.0)]
    assert [r["tokens"] for r in records] == [64, 128, 192]


def test_a_new_run_does_not_write_into_the_log_of_another(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        write(log, 1)
    with pytest.raises(ConfigError, match="already holds the log of a run"):
        open_log(tmp_path)


def test_a_broken_line_in_the_middle_of_a_log_is_named_by_number(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "losses": {}}\n{"step": 2\n{"step": 3, "losses": {}}\n')
    with pytest.raises(DataError, match=r"log\.jsonl:2"):
        read_log(path)


def test_run_json_says_what_ran_and_remembers_each_resumption(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.start({"hidden_size": 8}, command=["dsv4c", "train", "--steps", "10"])
        write(log, 1)
    first = json.loads((tmp_path / "run.json").read_text())
    assert first["config"] == {"hidden_size": 8}
    assert first["command"] == ["dsv4c", "train", "--steps", "10"]
    assert first["versions"]["torch"] == torch.__version__
    assert first["resumed"] == []
    with open_log(tmp_path, resume_step=1) as log:
        log.start({"hidden_size": 8}, command=["dsv4c", "train", "--resume"])
    second = json.loads((tmp_path / "run.json").read_text())
    assert second["started"] == first["started"]
    assert second["command"] == first["command"]
    assert [(r["step"], r["command"]) for r in second["resumed"]] == [(1, ["dsv4c", "train", "--resume"])]


def test_time_left_does_not_count_the_first_step_which_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 101.0, 102.0, 102.0])
    monkeypatch.setattr("dsv4c.train.log.time.perf_counter", lambda: next(clock))
    screen, out = console()
    with open_log(tmp_path, console=screen) as log:
        for step in (1, 2, 3):
            log.advance(step, tokens=64)
        log.log(3, losses=LOSSES, lr=1.0)
    assert "left 0:00:07" in out.getvalue()
