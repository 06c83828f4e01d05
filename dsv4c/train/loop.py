"""A training run from its first step to its report: stages, schedule, log, checkpoints, and what stops it.

Ties together the loader, the step, the log and the checkpoints; decides when, never how.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from dsv4c.compile.backend import Passes
from dsv4c.config import ModelConfig
from dsv4c.errors import CheckpointError, ConfigError, NonFiniteError
from dsv4c.model.transformer import DeepseekV4
from dsv4c.torch_compat import compile_counts
from dsv4c.train.checkpoint import latest_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from dsv4c.train.data import Loader, make_loader
from dsv4c.train.diagnosis import first_nonfinite_tensor
from dsv4c.train.log import LOG, PASSES, RunLog
from dsv4c.train.optim import OptimConfig, SplitOptimizer, build_optimizer
from dsv4c.train.schedule import LrSchedule, Stage, lr_factor, mtp_coef, parse_stages, stage_at
from dsv4c.train.step import TrainStep

FORCED = "BENCHMARK ONLY: experts are assigned in turn, not chosen by the router; the balance objective is off"


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run depends on. What stands before ``steps`` must be the same when it is resumed; that the corpus
    and the tokenizer are the same is checked by content."""

    model: ModelConfig
    seq_len: int = 256
    batch_size: int = 4
    grad_accum: int = 1
    dtype: str = "fp32"
    seed: int = 0
    optim: OptimConfig = field(default_factory=OptimConfig)
    decay: str = "cosine"
    decay_start: int | None = None
    mtp_coef_after_decay: float | None = None  # None: the coefficient stays
    stages: str = "sparse"
    steps: int = 300
    data: tuple[str, ...] = ()  # empty: the running Python's standard library
    tokenizer: str = "bytes"
    text_field: str = "text"
    out: str = "runs/latest"
    cache_dir: str | None = None
    resume: bool = False
    compile: bool = True
    only: tuple[str, ...] = ()  # of the passes: these alone
    skip: tuple[str, ...] = ()  # all but these
    until: str = ""  # up to and including this one
    recompute: str = "off"  # "off", "all", or layer indices: "0,1,5"
    log_every: int = 10
    save_every: int = 100
    keep: int = 3
    device: str = "cpu"

    def must_match(self) -> dict[str, Any]:
        """The part that a checkpoint is checked against."""
        values = asdict(self) | {"model": self.model.to_dict(), "optim": asdict(self.optim)}
        names = list(values)
        return {k: v for k, v in values.items() if names.index(k) < names.index("steps")}


class _StopRequest:
    """SIGINT and SIGTERM ask for an orderly end: the step is finished and a checkpoint written."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:  # asked twice: at once
            raise KeyboardInterrupt
        self.signal = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextmanager
def _compiling(console: Console, on: bool) -> Iterator[None]:
    """Says what a first step is waiting for: how many regions are compiled so far."""
    if not on:
        yield
        return
    began, before, done = time.perf_counter(), compile_counts().graphs, threading.Event()

    def text() -> str:
        n = compile_counts().graphs - before
        return f"compiling: {n} regions, {time.perf_counter() - began:.0f} s"

    with console.status(text()) as status:

        def watch() -> None:
            while not done.wait(0.5):
                status.update(text())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
    if compile_counts().graphs > before:
        console.print(text().replace("compiling", "compiled"), highlight=False)


class Run:
    """One training run; :meth:`train` does all of it and returns the last log record."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self.config, self.console = config, console
        self.out = Path(config.out)
        self.checkpoints = self.out / "checkpoints"
        self.stopped_by: int | None = None
        resume_from = self._resume_from()
        self.stages = parse_stages(config.stages, config.steps)
        self.schedule = LrSchedule(
            config.steps, config.optim.warmup_steps, config.optim.min_lr_ratio, config.decay, config.decay_start
        )
        device = preflight(config, self.stages)
        config.model.warn_if_everything_is_selected(config.seq_len)
        torch.manual_seed(config.seed)
        with device:
            self.model = DeepseekV4(config.model)
        layers = config.recompute
        self.model.set_recompute(layers if layers in ("off", "all") else _indices(layers))
        self.loader: Loader = make_loader(
            list(config.data) or None, tokenizer=config.tokenizer, seq_len=config.seq_len, batch_size=config.batch_size,
            seed=config.seed, cache_dir=config.cache_dir, vocab_size=config.model.vocab_size,
            text_field=config.text_field,
        )  # fmt: skip
        self.optimizer: SplitOptimizer = build_optimizer(self.model, config.optim)
        self.first_step = 0
        if resume_from is not None:
            state = load_checkpoint(resume_from, model=self.model, optimizer=self.optimizer, config=config.must_match())
            self.loader.load_state_dict(state["loader_state"])
            self.first_step = state["step"]
            console.print(f"resumed from {resume_from} at step {self.first_step}", highlight=False)
        if self.first_step >= config.steps:
            raise ConfigError(
                f"the run is already at step {self.first_step}", where=str(self.out), allowed=f"steps > {self.first_step}",
                do="ask for more with --steps, or start another run",
            )  # fmt: skip
        self.step = TrainStep(
            self.model, self.optimizer, grad_accum=config.grad_accum, dtype=config.dtype,
            grad_clip=config.optim.grad_clip, compile=config.compile,
            passes=Passes(only=config.only, skip=config.skip, until=config.until),
        )  # fmt: skip
        self.step.steps = self.first_step
        self.regions_told = 0

    def _resume_from(self) -> Path | None:
        if not self.config.resume:
            return None
        found = latest_checkpoint(self.checkpoints)
        if found is None:
            raise CheckpointError(
                "there is no checkpoint to resume from", where=str(self.checkpoints), allowed="a folder step-NNNNNNNN",
                do="start the run without --resume, or name its folder with --out",
            )  # fmt: skip
        return found

    def _enter(self, stage: Stage, log: RunLog) -> None:
        """Freeze and thaw what the stage says."""
        self.model.set_stage(stage.name)
        log.set_objectives(self.model.objectives)

    def _set_rates(self, step: int, stage: Stage) -> float:
        """The learning rate and the MTP coefficient of this step; both are functions of the step alone."""
        c = self.config
        factor = 1.0 if stage.lr is not None else lr_factor(step, self.schedule)
        self.optimizer.set_lr(factor, peak=stage.lr)
        if c.mtp_coef_after_decay is not None and c.model.predicts_two_ahead:
            coef = mtp_coef(step, self.schedule, high=c.model.mtp_loss_coef, low=c.mtp_coef_after_decay)
            self.model.mtp_loss_coef = coef
        return (c.optim.lr if stage.lr is None else stage.lr) * factor

    def _save(self, step: int) -> Path:
        """A checkpoint, unless the update has left something in the model that is not finite."""
        if (wrong := first_nonfinite_tensor(self.model)) is not None:
            error = NonFiniteError(
                f"the update of step {step} left a value that is not finite", where=wrong, allowed="finite numbers",
                do="no checkpoint was written: resume from an earlier one, with a lower learning rate",
            )  # fmt: skip
            raise self._with_checkpoint(error)
        return save_checkpoint(
            self.checkpoints, step=step, model=self.model, optimizer=self.optimizer,
            loader_state=dict(self.loader.state_dict()), extra={}, config=self.config.must_match(), keep=self.config.keep,
        )  # fmt: skip

    def train(self) -> dict[str, Any]:
        """Train to the last step, or to a SIGINT or SIGTERM; raises NonFiniteError with the last good checkpoint named."""
        c = self.config
        log = RunLog(
            self.out, console=self.console, total_steps=c.steps, objectives=self.model.objectives,
            banner=FORCED if c.model.force_balanced_routing else None,
            resume_step=self.first_step if c.resume else None,
        )  # fmt: skip
        record: dict[str, Any] = {}
        entered: Stage | None = None
        with log, _StopRequest() as stop:
            settings = asdict(c) | {"model": c.model.to_dict(), "optim": asdict(c.optim)}
            log.start(settings, command=["dsv4c", *sys.argv[1:]])
            for step in range(self.first_step, c.steps):
                stage = stage_at(step, self.stages)
                is_new = stage != entered
                if is_new:
                    self._enter(stage, log)
                    entered = stage
                lr = self._set_rates(step, stage)
                batches = [self.loader.next_batch() for _ in range(c.grad_accum)]
                try:
                    with _compiling(self.console, on=is_new and c.compile):
                        result = self.step.step(batches)
                    self._say_what_passes_did(step)
                except NonFiniteError as error:
                    raise self._with_checkpoint(error) from error
                tokens = sum(b["input_ids"].numel() for b in batches)
                done = step + 1
                log.advance(done, tokens=tokens, loss=result["loss"])
                asked = stop.signal  # read once: a signal that comes later is for the next step
                ends = done == c.steps or asked is not None
                if done % c.log_every == 0 or step == self.first_step or ends:
                    record = self._log(log, done, result, lr, stage)
                if done % c.save_every == 0 or ends:
                    self._save(done)
                if asked is not None:
                    self.stopped_by = asked
                    self.console.print(f"stopped by signal {asked} after step {done}; go on with --resume")
                    break
        return record

    def _say_what_passes_did(self, step: int) -> None:
        """A line a region on the console, everything in ``passes.jsonl``; regions are compiled at any step's first need."""
        compiler = self.model.compiler
        new = compiler.regions[self.regions_told :] if compiler is not None else []
        if not new:
            return
        self.regions_told += len(new)
        with (self.out / PASSES).open("a", encoding="utf-8") as file:
            for region in new:
                file.write(json.dumps({"step": step} | asdict(region)) + "\n")
                self.console.print(f"  {region}", highlight=False, soft_wrap=True)

    def _log(self, log: RunLog, done: int, result: dict[str, float], lr: float, stage: Stage) -> dict[str, Any]:
        names = self.model.objectives
        norms = {k.removeprefix("grad_norm/"): v for k, v in result.items() if k.startswith("grad_norm/")}
        metrics = {k: v for k, v in result.items() if k.startswith("raw/") or k == "captured_mass"}
        counts = compile_counts()
        return log.log(
            done, losses={k: result[k] for k in names if k in result}, lr=lr, stage=stage.name,
            metrics={**metrics, "expert_load": self.step.expert_load, "graphs": counts.graphs,
                     "graph_breaks": counts.graph_breaks},
            grad_norm={"global": result["grad_norm"], **norms},
        )  # fmt: skip

    def _with_checkpoint(self, error: NonFiniteError) -> NonFiniteError:
        kept = list_checkpoints(self.checkpoints) if self.checkpoints.exists() else []
        named = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        if kept and kept[-1].name == f"step-{self.step.steps:08d}":
            named = f"{kept[-1]} holds the very state that failed"
            named += f"; the one before it is {kept[-2]}" if len(kept) > 1 else "; there is none before it"
        return NonFiniteError(error.what, where=error.where, allowed=error.allowed, do=f"{error.do}; {named}")


def preflight(c: RunConfig, stages: tuple[Stage, ...]) -> torch.device:
    """Refuse what could only fail later, before a model is built or a text is read; the device to train on."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}", where="environment", allowed="one process",
            do="start one process: gradients are not summed over processes",
        )  # fmt: skip
    if any(s.name == "indexer_warmup" for s in stages) and not c.model.trains_indexer:
        raise ConfigError(
            "the indexer warm-up has nothing to train: indexer_kl_coef is 0", where=f"--stages {c.stages}",
            allowed="indexer_kl_coef > 0", do="set indexer_kl_coef, or leave the stage out",
        )  # fmt: skip
    if c.seq_len > c.model.max_position_embeddings:
        raise ConfigError(
            f"seq_len is {c.seq_len}", where="--seq-len", do="use shorter rows",
            allowed=f"at most max_position_embeddings = {c.model.max_position_embeddings}",
        )  # fmt: skip
    after = c.mtp_coef_after_decay
    if after is not None and not (c.model.predicts_two_ahead and 0 < after < math.inf):
        raise ConfigError(
            f"the MTP coefficient after the decay is {after}", where="--mtp-coef-after-decay",
            allowed="a positive number, for a model whose MTP objective is on", do="correct it, or leave it out",
        )  # fmt: skip
    if not 0 <= c.seed < 2**63:
        raise ConfigError(f"seed is {c.seed}", where="--seed", allowed="0 to 2^63 - 1", do="choose another")
    out = Path(c.out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a folder", where="--out", allowed="a folder, new or empty", do="choose another")
    if not c.resume and (out / LOG).exists():
        raise ConfigError(
            "this folder already holds the log of a run", where=str(out), allowed="a folder without a run",
            do="go on with --resume, or choose another --out",
        )  # fmt: skip
    try:
        torch.empty(0, device=c.device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {c.device!r} cannot be used: {str(error).splitlines()[0]}", where="--device", allowed="cpu, cuda",
            do="choose a device that `dsv4c env` lists",
        ) from error  # fmt: skip
    return torch.device(c.device)


def _indices(text: str) -> list[int]:
    try:
        return [int(i) for i in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"recompute is {text!r}", where="--recompute", allowed="off, all, or layer indices such as 0,1,5",
            do="correct the list",
        ) from error  # fmt: skip
