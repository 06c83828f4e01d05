"""What changes with the step: learning rate, MTP weight, training stage.

Everything here is a pure function of the step, counted from 0, so that a resumed run needs no state to continue the
same way. The training loop asks before each optimizer step.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dsv4c.errors import ConfigError
from dsv4c.model.transformer import STAGES

DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "linear": lambda t: 1 - t,
    "constant": lambda t: 1.0,
}
"""Shape of the decay: share of the way from min_ratio to 1 that is left at progress t in [0,1]."""


@dataclass(frozen=True)
class LrSchedule:
    """Linear warm-up, a plateau, then a decay to ``min_ratio`` of the peak.

    ``decay_start`` is the first step of the decay; left out, it follows the warm-up at once.  The paper warms up for
    2000 steps, stays at the peak for most of the training and decays by a cosine at the end (2.7e-4 to 2.7e-5).

    Raises:
        ConfigError: a value that cannot be meant.
    """

    total_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.1
    shape: str = "cosine"
    decay_start: int | None = None

    def __post_init__(self) -> None:
        for name in ("total_steps", "warmup_steps", "decay_start"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"{name} is {value!r}", allowed="an integer number of steps")
        if self.total_steps < 1:
            raise ConfigError(f"total_steps is {self.total_steps}", allowed="at least 1")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps}", allowed=f"0 to {self.total_steps}, the length of the run"
            )
        if isinstance(self.min_ratio, str) or not 0 <= self.min_ratio <= 1:
            raise ConfigError(f"the minimum learning-rate ratio is {self.min_ratio!r}", allowed="0 to 1")
        if self.shape not in DECAYS:
            raise ConfigError(f"unknown decay {self.shape!r}", allowed=", ".join(DECAYS), do=_nearest(self.shape, DECAYS))
        if self.decay_start is not None and not self.warmup_steps <= self.decay_start <= self.total_steps:
            raise ConfigError(
                f"decay_start is {self.decay_start}",
                allowed=f"{self.warmup_steps} (end of warm-up) to {self.total_steps} (end of run)",
            )

    @property
    def first_decay_step(self) -> int:
        """The first step of the decay; ``total_steps`` when the shape is constant and nothing ever decays."""
        if self.shape == "constant":
            return self.total_steps
        return self.warmup_steps if self.decay_start is None else self.decay_start


def lr_factor(step: int, schedule: LrSchedule) -> float:
    """Learning rate at ``step`` (from 0) as a share of the peak.

    Warm-up: (step+1) / warmup_steps, so that no step runs at 0.  Decay: min + (1-min) d(t) with
    t = (step - first) / (total - 1 - first), hence exactly ``min_ratio`` at the last step, and after it.
    """
    _check_step(step)
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    first = schedule.first_decay_step
    if step < first or schedule.shape == "constant":
        return 1.0
    progress = min(1.0, (step - first) / max(1, schedule.total_steps - 1 - first))
    return schedule.min_ratio + (1 - schedule.min_ratio) * DECAYS[schedule.shape](progress)


def mtp_coef(step: int, schedule: LrSchedule, *, high: float = 0.3, low: float = 0.1) -> float:
    """Weight of the multi-token-prediction loss: ``high`` until the learning rate decays, ``low`` from then on.

    Source: specification, section 7.  With no plateau and no warm-up the whole run is decay, and the weight always
    ``low``.
    """
    _check_step(step)
    return low if step >= schedule.first_decay_step else high


@dataclass(frozen=True)
class Stage:
    """Steps ``start`` (included) to ``stop`` (excluded; None: to the end) of one kind; ``lr`` is its own peak, if it
    has one.

    A stage with its own ``lr`` runs at that constant rate; the others follow the schedule of the whole run.
    """

    name: str
    start: int
    stop: int | None
    lr: float | None = None


def parse_stages(text: str, total_steps: int | None = None) -> tuple[Stage, ...]:
    """Reads ``"dense:100,indexer_warmup:20@1e-3,sparse"``: ``name[:steps][@lr]``, in the order of
    :data:`dsv4c.model.transformer.STAGES`, which says what each means.

    Only the last stage may have no count, and then takes the rest of the run.

    Raises:
        ConfigError: an unknown, repeated or misplaced stage, a count or rate that is no positive number, a missing
            count, or counts that do not add up to ``total_steps``.
    """
    items = [item.strip() for item in text.split(",")]
    if items == [""]:
        raise ConfigError("no training stage given", allowed='for example "dense:100,indexer_warmup:20,sparse"')
    stages: list[Stage] = []
    start = 0
    for position, item in enumerate(items):
        head, has_lr, rate = item.partition("@")
        name, has_count, count = head.partition(":")
        where = f"stage {position + 1} of {text!r}"
        _check_stage_name(name, [s.name for s in stages], where)
        stop = start + _positive_int(count, where) if has_count else None
        if stop is None and position < len(items) - 1:
            raise ConfigError(
                f"stage {name!r} has no number of steps", where=where, allowed="only the last stage may take the rest",
                do=f"write {name}:STEPS",
            )  # fmt: skip
        stages.append(Stage(name, start, stop, _positive_float(rate, where) if has_lr else None))
        start = stop if stop is not None else start
    _check_length(stages, start, total_steps, text)
    return tuple(stages)


def stage_at(step: int, stages: Sequence[Stage]) -> Stage:
    """The stage that ``step`` (from 0) belongs to; a step past the last counted stage belongs to none.

    Raises:
        ConfigError: a negative step, or one that no stage covers.
    """
    _check_step(step)
    for stage in stages:
        if stage.start <= step and (stage.stop is None or step < stage.stop):
            return stage
    raise ConfigError(
        f"no stage covers step {step}",
        where=f"stages end before step {stages[-1].stop}" if stages else "there are no stages",
        do="leave out the count of the last stage: it then takes the rest of the run",
    )


def _check_stage_name(name: str, before: list[str], where: str) -> None:
    order = list(STAGES)
    if name not in STAGES:
        raise ConfigError(f"unknown stage {name!r}", where=where, allowed=", ".join(order), do=_nearest(name, order))
    if name in before:
        raise ConfigError(f"stage {name!r} is given twice", where=where, allowed="each stage once")
    if before and order.index(name) < order.index(before[-1]):
        raise ConfigError(f"stage {name!r} cannot follow {before[-1]!r}", where=where, allowed=" -> ".join(order))


def _check_length(stages: list[Stage], counted: int, total: int | None, text: str) -> None:
    if total is None:
        return
    is_open = stages[-1].stop is None
    if counted > total or (is_open and counted == total):
        rest = f", which leaves none for {stages[-1].name!r}" if is_open else ""
        raise ConfigError(f"the stages take {counted} steps{rest}", where=text, allowed=f"the run has {total} steps")
    if not is_open and counted < total:
        raise ConfigError(
            f"the stages take {counted} steps and the run has {total}", where=text,
            do=f"leave out the count of {stages[-1].name!r}: it then takes the rest",
        )  # fmt: skip


def _check_step(step: int) -> None:
    if step < 0:
        raise ConfigError(f"step is {step}", allowed="steps count from 0")


def _positive_int(text: str, where: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{text!r} is no number of steps", where=where, allowed="a whole number, 1 or more")
    return int(text)


def _positive_float(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{text!r} is no learning rate", where=where, allowed="a positive number, such as 1e-3")
    return value


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""
