"""Learning rate, MTP weight and training stage as functions of the step."""

from __future__ import annotations

import math

import pytest

from dsv4c.errors import ConfigError
from dsv4c.train.schedule import LrSchedule, Stage, lr_factor, mtp_coef, parse_stages, stage_at


def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step() -> None:
    schedule = LrSchedule(100, warmup_steps=4)
    assert [lr_factor(s, schedule) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("shape", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_the_decay_is_halfway_down_in_its_middle(shape: str, middle: float) -> None:
    assert lr_factor(50, LrSchedule(101, shape=shape)) == pytest.approx(middle)


def test_a_quarter_of_the_way_the_cosine_has_the_closed_form_value() -> None:
    expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert lr_factor(25, LrSchedule(101)) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("step", [99, 100, 5000])
def test_the_last_step_and_whatever_follows_run_at_the_minimum(shape: str, step: int) -> None:
    assert lr_factor(step, LrSchedule(100, 10, 0.1, shape)) == pytest.approx(0.1, abs=1e-15)


def test_the_plateau_lasts_until_the_decay_starts() -> None:
    schedule = LrSchedule(100, warmup_steps=10, decay_start=80)
    assert {lr_factor(s, schedule) for s in range(10, 81)} == {1.0}
    assert lr_factor(81, schedule) < 1.0


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
def test_the_factor_stays_between_zero_and_one_and_never_rises_after_the_warm_up(shape: str, warmup: int) -> None:
    factors = [lr_factor(s, LrSchedule(20, warmup, 0.1, shape)) for s in range(25)]
    assert all(0 < f <= 1 for f in factors)
    assert all(a >= b for a, b in zip(factors[warmup:], factors[warmup + 1 :], strict=False))


def test_a_run_of_one_step_has_a_learning_rate() -> None:
    assert lr_factor(0, LrSchedule(1)) == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total_steps": 0}, "total_steps is 0"),
        ({"total_steps": 10, "warmup_steps": 11}, "warmup_steps is 11"),
        ({"total_steps": 10, "warmup_steps": -1}, "warmup_steps is -1"),
        ({"total_steps": 10, "warmup_steps": 2.5}, "integer"),
        ({"total_steps": 10, "warmup_steps": True}, "integer"),
        ({"total_steps": 10, "min_ratio": 1.5}, "ratio is 1.5"),
        ({"total_steps": 10, "min_ratio": math.nan}, "ratio is nan"),
        ({"total_steps": 10, "shape": "cosin"}, "did you mean 'cosine'"),
        ({"total_steps": 10, "warmup_steps": 5, "decay_start": 3}, "decay_start is 3"),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LrSchedule(**settings)  # type: ignore[arg-type]  # wrong on purpose


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="step is -1"):
        lr_factor(-1, LrSchedule(10))


def test_the_mtp_weight_drops_when_the_learning_rate_starts_to_decay() -> None:
    schedule = LrSchedule(100, warmup_steps=10, decay_start=80)
    assert [mtp_coef(s, schedule) for s in (0, 10, 79, 80, 99)] == [0.3, 0.3, 0.3, 0.1, 0.1]


def test_the_mtp_weight_never_drops_without_a_decay() -> None:
    assert mtp_coef(99, LrSchedule(100, shape="constant")) == 0.3


STAGES = "dense:100,indexer_warmup:20@1e-3,sparse"


def test_stages_follow_each_other_and_the_last_takes_the_rest() -> None:
    assert parse_stages(STAGES, 500) == (
        Stage("dense", 0, 100),
        Stage("indexer_warmup", 100, 120, 1e-3),
        Stage("sparse", 120, None),
    )


@pytest.mark.parametrize(
    ("step", "name"),
    [(0, "dense"), (99, "dense"), (100, "indexer_warmup"), (119, "indexer_warmup"), (120, "sparse"), (9999, "sparse")],
)
def test_a_step_belongs_to_the_stage_that_covers_it(step: int, name: str) -> None:
    assert stage_at(step, parse_stages(STAGES)).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no training stage"),
        ("dence:10,sparse", "did you mean 'dense'"),
        ("dense:0,sparse", "'0' is no number of steps"),
        ("dense:-3,sparse", "'-3' is no number of steps"),
        ("dense:1.5,sparse", "'1.5' is no number of steps"),
        ("dense:,sparse", "'' is no number of steps"),
        ("dense,sparse", "'dense' has no number of steps"),
        ("dense:5,dense:5,sparse", "'dense' is given twice"),
        ("sparse:5,dense", "'dense' cannot follow 'sparse'"),
        ("dense:5,,sparse", "unknown stage ''"),
        ("indexer_warmup:5@zero,sparse", "'zero' is no learning rate"),
        ("indexer_warmup:5@-1,sparse", "'-1' is no learning rate"),
        ("dense:80,sparse:40", "take 120 steps"),
        ("dense:100,sparse", "leaves none for 'sparse'"),
        ("dense:10,sparse:20", "take 30 steps and the run has 100"),
    ],
)
def test_stages_that_cannot_be_meant_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_stages(text, 100)


def test_a_step_past_the_last_counted_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match="no stage covers step 30"):
        stage_at(30, parse_stages("dense:10,sparse:20"))
