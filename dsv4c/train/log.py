"""The log of a run: progress on the screen, `log.jsonl`, TensorBoard and `run.json`.

The training loop calls `advance` after every step (it moves the bar) and `log` at every log line.  One rule holds in
all three places: each objective that is on appears by its name in every line, and one that is missing is an error.
A loss that is not there must never read as 0.0.

`log.jsonl` has one object per logged step, strict JSON, flushed:

    step, time (Unix seconds), stage, lr, loss (sum of the objectives), losses {objective: value}, metrics {name:
    value}, grad_norm {group: value}, expert_load [layers][E], tokens (so far), tokens_per_s, and, where they apply,
    banner and nonfinite: names of values that were NaN or infinite, which JSON does not have; they are null in their
    places.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from dsv4c.errors import ConfigError, DataError
from dsv4c.train.manifest import versions, write_json

LOG, RUN, PASSES = "log.jsonl", "run.json", "passes.jsonl"
RATE_MEMORY = 0.9
"""Share of the old value in the running mean of the step time that "time left" comes from."""


class RunLog:
    """Writes the log of one run into ``out_dir`` (module docstring); a context manager.

    Args:
        out_dir: folder of the run, created if missing.
        console: where lines and the bar go; without a terminal there is no bar, only lines.
        total_steps: length of the run.
        objectives: names of the objectives that are on; `set_objectives` when a stage changes them.
        banner: repeated at every log line, in all places: for a switch under which the numbers mean something else.
        resume_step: steps done by the checkpoint that the run continues from; later lines are dropped, the rest stays.
            None starts a new log.
        tensorboard: whether to write TensorBoard events into ``out_dir/tensorboard``.

    Raises:
        ConfigError: a new run in a folder that has a log already.
    """

    def __init__(
        self,
        out_dir: str | Path,
        *,
        console: Console,
        total_steps: int,
        objectives: Sequence[str],
        banner: str | None = None,
        resume_step: int | None = None,
        tensorboard: bool = True,
    ) -> None:
        self.folder, self.console, self.total_steps, self.banner = Path(out_dir), console, total_steps, banner
        self.folder.mkdir(parents=True, exist_ok=True)
        self.set_objectives(objectives)
        path = self.folder / LOG
        if resume_step is None and path.exists() and path.stat().st_size:
            raise ConfigError(
                "this folder already holds the log of a run",
                where=str(path),
                do="resume that run, or choose another folder",
            )
        self.tokens = self._keep_until(path, resume_step) if resume_step is not None else 0
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # closed in close()
        purge = None if resume_step is None else resume_step + 1
        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge) if tensorboard else None
        self._resumed = resume_step is not None
        self._step = resume_step or 0
        self._step_time, self._steps_timed = math.nan, 0
        self._last = self._last_log = time.perf_counter()
        self._tokens_at_log = self.tokens
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("train", total=total_steps, completed=self._step, status="")
        self._progress.start()

    def set_objectives(self, objectives: Iterable[str]) -> None:
        """The objectives that every line must have from now on."""
        self.objectives = tuple(objectives)
        if not self.objectives or len(set(self.objectives)) < len(self.objectives):
            raise ConfigError(f"objectives are {list(self.objectives)}", allowed="at least one name, each once")

    def start(self, config: Mapping[str, Any], *, command: Sequence[str] | None = None) -> None:
        """Writes `run.json`: config, versions, command, start; a resumed run keeps those and adds itself under
        ``resumed``.
        """
        path = self.folder / RUN
        now = datetime.now(UTC).isoformat(timespec="seconds")
        this = {"command": list(sys.argv if command is None else command), "versions": versions(), "started": now}
        run = json.loads(path.read_text()) if self._resumed and path.exists() else None
        if run is None:
            run = {
                "config": dict(config),
                "total_steps": self.total_steps,
                "banner": self.banner,
                **this,
                "resumed": [],
            }
        else:
            run["total_steps"] = self.total_steps
            run["resumed"].append({"step": self._step, **this})
        write_json(path, run)

    def advance(self, step: int, *, tokens: int, loss: float | None = None) -> None:
        """Moves the bar to ``step`` (steps done, from 1) after ``tokens`` more tokens."""
        now = time.perf_counter()
        taken = (now - self._last) / max(1, step - self._step)
        # The first step compiles; averaged in, it would dominate the estimate for a long time.
        memory = RATE_MEMORY if self._steps_timed > 1 else 0.0
        self._step_time = taken if memory == 0 else memory * self._step_time + (1 - memory) * taken
        self._steps_timed += 1
        self._step, self._last = step, now
        self.tokens += tokens
        rate = tokens / taken if taken > 0 else 0.0
        shown = "" if loss is None else f"loss {loss:.4f}  "
        self._progress.update(self._task, completed=step, status=f"{shown}{rate:,.0f} tokens/s")

    def log(
        self,
        step: int,
        *,
        losses: Mapping[str, Any],
        lr: float,
        metrics: Mapping[str, Any] | None = None,
        grad_norm: Mapping[str, float] | None = None,
        stage: str | None = None,
    ) -> dict[str, Any]:
        """One log line, everywhere.

        Args:
            losses: every objective that is on, and no other; floats or 0-dim tensors.
            metrics: further values; ``expert_load`` [layers,E] may be a tensor.
            grad_norm: as `dsv4c.train.optim.clip_gradients` returns it.

        Returns:
            The record as written.

        Raises:
            ConfigError: an objective that is on and missing, or one that is off and present.
        """
        self._check_objectives(step, losses)
        now = time.perf_counter()
        rate = (self.tokens - self._tokens_at_log) / max(now - self._last_log, 1e-9)
        self._last_log, self._tokens_at_log = now, self.tokens
        values = {name: float(value) for name, value in losses.items()}
        plain = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in (metrics or {}).items()}
        record: dict[str, Any] = {
            "step": step,
            "time": time.time(),
            "stage": stage,
            "lr": lr,
            "loss": sum(values.values()),
        }
        record |= {"losses": values, "metrics": plain, "grad_norm": dict(grad_norm or {})}
        record |= {"expert_load": plain.pop("expert_load", None), "tokens": self.tokens, "tokens_per_s": rate}
        if self.banner:
            record["banner"] = self.banner
        line: dict[str, Any]
        line, nonfinite = _finite(record)
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._print(record)
        self._write_board(record)
        return line

    def _check_objectives(self, step: int, losses: Mapping[str, Any]) -> None:
        missing = [name for name in self.objectives if name not in losses]
        extra = [name for name in losses if name not in self.objectives]
        if missing or extra:
            problem = f"is on and missing: {', '.join(missing)}" if missing else f"is off and present: {', '.join(extra)}"
            raise ConfigError(
                f"an objective {problem}", where=f"the record of step {step}",
                allowed=f"exactly {', '.join(self.objectives)}",
                do="return every objective that is on at every step, and tell the log when a stage changes them",
            )  # fmt: skip

    def _print(self, record: dict[str, Any]) -> None:
        parts = [f"step {record['step']}/{self.total_steps}", f"loss {record['loss']:.4f}"]
        parts += [f"{name} {value:.4g}" for name, value in record["losses"].items()]
        mass = record["metrics"].get("captured_mass")
        parts += [f"captured {mass:.3f}"] if isinstance(mass, float) else []
        parts += [f"grad {record['grad_norm']['global']:.3g}"] if "global" in record["grad_norm"] else []
        parts += [f"lr {record['lr']:.3g}", f"{record['tokens_per_s']:,.0f} tokens/s", f"left {self._time_left()}"]
        parts += [str(record["stage"])] if record["stage"] else []
        if self.banner:
            self.console.print(self.banner, style="bold yellow", markup=False, highlight=False, soft_wrap=True)
        self._progress.console.print("  ".join(parts), markup=False, highlight=False, soft_wrap=True)

    def _time_left(self) -> str:
        if not self._steps_timed:
            return "?"
        seconds = round((self.total_steps - self._step) * self._step_time)
        minutes, hours = seconds // 60, seconds // 3600
        return f"{hours}:{minutes % 60:02d}:{seconds % 60:02d}"

    def _write_board(self, record: dict[str, Any]) -> None:
        if self._board is None:
            return
        step = record["step"]
        scalars = {"loss/total": record["loss"], "lr": record["lr"], "tokens_per_s": record["tokens_per_s"]}
        scalars |= {f"loss/{name}": value for name, value in record["losses"].items()}
        scalars |= {f"grad_norm/{name}": value for name, value in record["grad_norm"].items()}
        scalars |= {f"metric/{k}": v for k, v in record["metrics"].items() if isinstance(v, (int, float))}
        for layer, load in enumerate(record["expert_load"] or []):
            scalars[f"expert_load_max_over_mean/{layer:02d}"] = max(load) * len(load) / (sum(load) or 1)
        for name, value in scalars.items():
            self._board.add_scalar(name, value, step)
        if self.banner:
            self._board.add_text("banner", self.banner, step)
        self._board.flush()

    @staticmethod
    def _keep_until(path: Path, step: int) -> int:
        """Drops lines past ``step`` and a half-written last one, all at once; returns the tokens counted by then."""
        kept = [r for r in read_log(path) if r["step"] <= step] if path.exists() else []
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return int(kept[-1]["tokens"]) if kept else 0

    def close(self) -> None:
        """Stops the bar and closes the files."""
        self._progress.stop()
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a `log.jsonl`; a last line without its end, left by a killed run, is passed over.

    Raises:
        DataError: a line before the last that is no record; the message has its number.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["step"], record["losses"]
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise DataError("a line of the log is no record", where=f"{path}:{number}") from error
        records.append(record)
    return records


def _finite(value: Any, path: str = "") -> tuple[Any, list[str]]:
    """``value`` with None for every NaN and infinity, and where those were."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, [f"{path}={value}"]
    if isinstance(value, Mapping):
        pairs = {k: _finite(v, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
        return {k: v for k, (v, _) in pairs.items()}, [p for _, where in pairs.values() for p in where]
    if isinstance(value, (list, tuple)):
        items = [_finite(v, f"{path}[{i}]") for i, v in enumerate(value)]
        return [v for v, _ in items], [p for _, where in items for p in where]
    return value, []
