"""A run as a whole: log, stages, checkpoints, resuming bit for bit, dying at the worst moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dsv4c import ModelConfig
from dsv4c.errors import CheckpointError, ConfigError, NonFiniteError
from dsv4c.train.checkpoint import list_checkpoints
from dsv4c.train.loop import FORCED, Run, RunConfig
from dsv4c.train.optim import OptimConfig

CONSOLE = Console(file=open(os.devnull, "w"))  # noqa: SIM115  # lives as long as the tests


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "to be or not to be, that is the question. " * (i + 1))
    return folder


@pytest.fixture
def config(text: Path, tmp_path: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig.preset("tiny", index_topk=4), data=(str(text),), steps=6, seq_len=32, batch_size=1, log_every=1,
        save_every=2, compile=False, out=str(tmp_path / "run"), cache_dir=str(tmp_path / "cache"),
        optim=OptimConfig(lr=1e-3, warmup_steps=2),
    )  # fmt: skip


def log_of(out: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]


def losses_of(out: str | Path) -> list[dict[str, float]]:
    return [r["losses"] for r in log_of(out)]


def test_a_run_logs_every_objective_and_keeps_its_last_checkpoints(config: RunConfig) -> None:
    Run(replace(config, keep=2), CONSOLE).train()
    records = log_of(config.out)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert all(list(r["losses"]) == ["lm", "mtp", "seq_balance", "indexer_kl"] for r in records)
    assert all(len(r["expert_load"]) == 6 for r in records)
    assert [p.name for p in list_checkpoints(Path(config.out) / "checkpoints")] == ["step-00000004", "step-00000006"]


def test_two_runs_with_one_seed_have_the_same_losses_bit_for_bit(config: RunConfig, tmp_path: Path) -> None:
    for name in ("a", "b"):
        Run(replace(config, out=str(tmp_path / name), steps=3), CONSOLE).train()
    assert losses_of(tmp_path / "a") == losses_of(tmp_path / "b")


_KILLED_WHILE_WRITING = """
import os, signal, sys
from dsv4c.train import checkpoint
publish = checkpoint.publish
def killed(temporary, target):
    if target.name == "step-00000004":
        os.kill(os.getpid(), signal.SIGKILL)
    publish(temporary, target)
checkpoint.publish = killed
sys.argv = ["dsv4c", *sys.argv[1:]]
from dsv4c.cli.main import main
main()
"""


def arguments(config: RunConfig, out: Path, *more: str) -> list[str]:
    return [
        "train", "--set", "index_topk=4", "--data", config.data[0], "--steps", "6", "--seq-len", "32", "--batch-size", "1",
        "--log-every", "1", "--save-every", "2", "--no-compile", "--out", str(out), "--cache-dir", str(config.cache_dir),
        *more,
    ]  # fmt: skip


def test_a_run_killed_while_it_writes_a_checkpoint_resumes_bit_for_bit(config: RunConfig, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([sys.executable, "-m", "dsv4c", *arguments(config, whole)], check=True, capture_output=True)
    killed = subprocess.run([sys.executable, "-c", _KILLED_WHILE_WRITING, *arguments(config, broken)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert [p.name for p in list_checkpoints(broken / "checkpoints")] == ["step-00000002"]
    again = subprocess.run(
        [sys.executable, "-m", "dsv4c", *arguments(config, broken, "--resume")], capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert "resumed from" in again.stdout
    assert losses_of(broken) == losses_of(whole)
    assert (broken / "report.html").stat().st_size > 10_000


def test_resuming_without_a_checkpoint_or_with_another_setting_is_refused(config: RunConfig) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        Run(replace(config, resume=True), CONSOLE)
    Run(replace(config, steps=2), CONSOLE).train()
    with pytest.raises(CheckpointError, match="seq_len"):
        Run(replace(config, resume=True, seq_len=16), CONSOLE)
    with pytest.raises(ConfigError, match="already at step 2"):
        Run(replace(config, resume=True, steps=2), CONSOLE)


def test_the_stages_of_one_run_train_what_they_say(config: RunConfig) -> None:
    run = Run(replace(config, stages="dense:2,indexer_warmup:2@1e-3,sparse"), CONSOLE)
    snapshots: list[dict[str, torch.Tensor]] = []
    step = run.step.step

    def watched(batches: Any) -> dict[str, float]:
        before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        result = step(batches)
        snapshots.append({n: (p.detach() != before[n]).any() for n, p in run.model.named_parameters()})
        return result

    run.step.step = watched  # type: ignore[method-assign]
    run.train()

    def moved(i: int, indexer: bool) -> bool:
        return any(bool(v) for n, v in snapshots[i].items() if (".indexer." in n) == indexer)

    assert [(moved(i, False), moved(i, True)) for i in (0, 2, 4)] == [(True, False), (False, True), (True, True)]
    names = [set(r["losses"]) for r in log_of(config.out)]
    assert "indexer_kl" not in names[0]
    assert {"indexer_kl", "lm"} <= names[2]
    assert [r["stage"] for r in log_of(config.out)] == ["dense"] * 2 + ["indexer_warmup"] * 2 + ["sparse"] * 2


def test_a_non_finite_loss_ends_the_run_and_names_the_last_good_checkpoint(config: RunConfig) -> None:  # B61
    run = Run(config, CONSOLE)
    step = run.step.step

    def poisoned(batches: Any) -> dict[str, float]:
        if run.step.steps == 4:
            with torch.no_grad():
                run.model.layers[2].ffn.experts.w13[0] = float("nan")
        return step(batches)

    run.step.step = poisoned  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match=r"step 5: the loss (?s:.*)layers\.2\.ffn\.experts\.w13(?s:.*)step-00000004"):
        run.train()


def test_an_update_that_leaves_an_infinity_is_not_saved(config: RunConfig) -> None:
    run = Run(config, CONSOLE)
    step = run.step.step

    def overflowing(batches: Any) -> dict[str, float]:
        result = step(batches)
        if run.step.steps == 4:
            with torch.no_grad():
                run.model.head.weight[0, 0] = float("inf")
        return result

    run.step.step = overflowing  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match=r"step 4 left(?s:.*)head\.weight(?s:.*)step-00000002"):
        run.train()
    assert [p.name for p in list_checkpoints(Path(config.out) / "checkpoints")] == ["step-00000002"]


def test_a_finished_run_goes_on_with_more_steps_and_from_moved_data(config: RunConfig, tmp_path: Path) -> None:
    Run(replace(config, steps=2), CONSOLE).train()
    moved = tmp_path / "moved"
    shutil.copytree(config.data[0], moved)
    Run(replace(config, steps=3, resume=True, data=(str(moved),)), CONSOLE).train()
    assert [r["step"] for r in log_of(config.out)] == [1, 2, 3]


def test_forced_routing_says_so_at_every_log_line(config: RunConfig) -> None:
    model = config.model.replace(force_balanced_routing=True)
    Run(replace(config, model=model, steps=2), CONSOLE).train()
    records = log_of(config.out)
    assert [r["banner"] for r in records] == [FORCED, FORCED]
    assert all("seq_balance" not in r["losses"] for r in records)


def test_the_mtp_coefficient_falls_when_the_learning_rate_decays(config: RunConfig) -> None:
    Run(replace(config, decay_start=4, mtp_coef_after_decay=0.1), CONSOLE).train()
    ratios = [r["losses"]["mtp"] / r["metrics"]["raw/mtp"] for r in log_of(config.out)]
    assert ratios == pytest.approx([0.3, 0.3, 0.3, 0.3, 0.1, 0.1], rel=1e-5)


def test_a_termination_signal_finishes_the_step_and_saves(config: RunConfig) -> None:
    run = Run(replace(config, steps=500, save_every=1000), CONSOLE)

    def send() -> None:
        while run.step.steps < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    run.train()
    thread.join()
    (saved,) = list_checkpoints(Path(config.out) / "checkpoints")
    assert saved.name == f"step-{run.step.steps:08d}"
    assert run.step.steps < 500
