"""``dsv4c verify``: exit status, the table, JSON, the choice of rules and kinds, and refusals that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dsv4c.cli import main
from dsv4c.errors import ConfigError
from dsv4c.model.attention import Attention
from dsv4c.passes.verify import RULES
from tests.passes.verify.mutation import mutated

main._mount()
SMALL = ("--preset", "tiny", "--seq-len", "24", "--layer", "swa-hash")
STATIC = ("rotation", "scales", "mixing")
CHOSEN = tuple(word for rule in STATIC for word in ("--rule", rule))


def run(*args: str) -> Result:
    return CliRunner().invoke(main.app, ["verify", *args])


def test_a_right_model_is_proved_with_status_0() -> None:
    result = run(*SMALL, *CHOSEN)
    assert result.exit_code == 0
    for rule in STATIC:
        assert rule in result.stdout
    assert "proved" in result.stdout and "peak memory" in result.stdout
    assert "layers.0 (swa-hash) stands for layers 0, 1: 2 with the same code" in result.stdout


def test_a_violation_is_printed_in_full_with_status_1() -> None:
    with mutated(Attention.project, ("o = rotate(o, at.cos, at.sin, inverse=True)", "o = o")):
        result = run(*SMALL, *CHOSEN)
    assert result.exit_code == 1
    for part in ("1 violation", "rotation: layers.0.attn: output reaches the projection", "where:", "attention.py:", "do:"):
        assert part in result.stdout


def test_json_holds_verdict_places_and_cost() -> None:
    result = run(*SMALL, "--rule", "rotation", "--json")
    found = json.loads(result.stdout)
    assert found["ok"] is True and found["checked"] == {"rotation": 3} and found["seq_len"] == 24
    assert found["seconds"] > 0 and found["peak_bytes"] > 1e6


def test_every_kind_of_a_model_is_looked_at_once() -> None:
    found = json.loads(run("--seq-len", "96", "--rule", "rotation", "--json").stdout)
    assert found["checked"] == {"rotation": 18}  # swa 3, csa 8, hca 4, mtp 3
    assert len(found["notes"]) == 4


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--rule", "rotations"), "there is no rule 'rotations'"),
        (("--layer", "csa"), "this model has no layer of kind 'csa'"),
        (("--preset", "huge"), "there is no preset 'huge'"),
        (("--set", "head_dim=none"), "head_dim is 'none'"),
        (("--preset", "tiny", "--config", "config.json"), "both --preset and --config"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_work(args: tuple[str, ...], says: str) -> None:
    result = run(*args)
    assert isinstance(result.exception, ConfigError) and result.exception.exit_status == 2
    assert says in str(result.exception)


def test_a_setting_reaches_the_model() -> None:
    result = run(
        *SMALL, "--rule", "gradient-reach", "--set", "num_nextn_predict_layers=0", "--set", "compress_ratios=[0,0,4,8,4]"
    )
    assert result.exit_code == 0


def test_help_names_what_the_exit_status_means() -> None:
    assert "exit status 1" in run("--help").stdout


def test_every_rule_has_its_page() -> None:
    pages = Path(main.__file__).parents[2] / "docs" / "rules"
    own = {"rotation", "scales", "mixing", "memory-growth", "no-host-sync", "no-recompute-of-random"}
    assert own <= set(RULES)
    assert own <= {page.stem for page in pages.glob("*.md")}
