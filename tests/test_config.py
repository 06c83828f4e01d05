"""ModelConfig: nonsense is refused with a message that names the field and what would be allowed."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest

from dsv4c.config import ModelConfig
from dsv4c.errors import ConfigError
from dsv4c.presets import PRESETS

FIELDS = {f.name: f for f in dataclasses.fields(ModelConfig)}
NAN, INF = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "int": ["3", "false", True, 1.5, NAN, INF, [3], None],
    "int | None": ["3", "false", True, 1.5, NAN, INF, [3]],
    "float": ["0.1", "false", True, NAN, INF, [0.1], None],
    "bool": ["false", "true", 0, 1, None],
    "str": ["nothing", "", 1, True, None],
    "tuple[int, ...]": ["0, 4", 4, None, [0.0], ["4"], [True, 0, 4, 8, 4, 0]],
}


def wrong_values() -> list[Any]:
    cases = []
    for name, f in FIELDS.items():
        values = list(WRONG[str(f.type)])
        low, high = f.metadata["low"], f.metadata["high"]
        if not str(f.type).startswith("tuple"):
            values += [low - 1] if low is not None else []
            values += [high + 1] if high is not None else []
        cases += [pytest.param(name, value, id=f"{name}={value!r}") for value in values]
    return cases


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.preset("tiny", **changes)
    message = str(caught.value)
    for part in ("where:", "allowed:", "do:"):
        assert part in message
    return message


@pytest.mark.parametrize(("name", "value"), wrong_values())
def test_every_field_refuses_a_value_of_the_wrong_type_or_range_by_name(name: str, value: Any) -> None:  # B66
    message = refused(**{name: value})
    assert f"{name} is {value!r}" in message
    assert f"ModelConfig.{name}" in message


def test_every_coefficient_refuses_to_be_negative() -> None:  # B66
    for name in ("mtp_loss_coef", "seq_balance_loss_coef", "indexer_kl_coef", "router_bias_update_rate"):
        assert "at least 0" in refused(**{name: -1})


def test_an_indexer_loss_without_a_csa_layer_is_refused() -> None:  # B66
    assert "no layer has an indexer" in refused(compress_ratios=(0, 0, 8, 8, 8, 0), indexer_kl_coef=0.01)
    ModelConfig.preset("tiny", compress_ratios=(0, 0, 8, 8, 8, 0), indexer_kl_coef=0)


def test_a_length_at_which_every_entry_is_selected_warns() -> None:  # B66
    config = ModelConfig.preset("tiny", index_topk=16)
    with pytest.warns(UserWarning, match="index_topk=16 selects every compressed entry at sequence length 64"):
        config.warn_if_everything_is_selected(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.warn_if_everything_is_selected(68)
        config.replace(indexer_kl_coef=0.0).warn_if_everything_is_selected(64)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"compress_ratios": (0, 0, 4, 3, 4, 0)}, "layer 3 has compress ratio 3"),  # B67
        ({"compress_ratios": (0, 0, 4, 128, 4, 0)}, "layer 3 has compress ratio 128"),
        ({"compress_ratios": (0, 0, 4, 8)}, "4 entries for 5 layers and 1 MTP layers"),
        ({"compress_ratios": (0, 0, 4, 8, 4, 4)}, "the MTP layer has compress ratio 4"),
        ({"hca_ratio": 4, "compress_ratios": (0, 0, 4, 4, 4, 0)}, "hca_ratio is 4"),
        ({"num_hash_layers": 6}, "num_hash_layers is 6 for 5 layers"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15"),
        ({"qk_rope_head_dim": 34}, "qk_rope_head_dim is 34"),
        ({"o_groups": 3}, "3 output groups"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of 8 experts"),
        ({"index_head_dim": 8}, "index_head_dim 8 is smaller"),
        ({"index_head_dim": 48}, "index_head_dim is 48 with indexer_hadamard on"),
        ({"rope_beta_fast": 0.5}, "rope_beta_fast is 0.5 and rope_beta_slow is 1"),
    ],
)
def test_values_that_contradict_each_other_are_refused(changes: dict[str, Any], says: str) -> None:
    assert says in refused(**changes)


def test_an_unknown_field_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mtp_loss_coef'"):
        ModelConfig.preset("tiny").replace(mtp_los_coef=0.1)


def test_an_unknown_preset_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'flash'"):
        ModelConfig.preset("flsh")


def test_whole_numbers_written_as_floats_and_floats_as_whole_numbers_keep_their_type() -> None:
    config = ModelConfig.preset("tiny", hidden_size=64.0, rope_theta=10000, compress_ratios=[0, 0, 4, 8, 4, 0])
    assert config == ModelConfig.preset("tiny")
    assert type(config.hidden_size) is int
    assert type(config.rope_theta) is float
    assert hash(config) == hash(ModelConfig.preset("tiny"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_config(name: str) -> None:
    config = ModelConfig.preset(name)
    assert config.objectives == ("lm", "mtp", "seq_balance", "indexer_kl")


def test_the_released_schedules_have_the_layers_of_the_specification() -> None:  # invariant 31
    counts = {}
    for name in ("flash", "pro"):
        config = ModelConfig.preset(name)
        kinds = [k.attention for k in config.layer_kinds[: config.num_hidden_layers]]
        counts[name] = (len(config.compress_ratios), kinds.count("swa"), kinds.count("csa"), kinds.count("hca"))
        assert [k.router for k in config.layer_kinds[:4]] == ["hash", "hash", "hash", "learned"]
        assert config.layer_kinds[-1].name == "swa-learned"
    assert counts == {"flash": (44, 2, 21, 20), "pro": (62, 0, 30, 31)}


def test_objectives_that_are_off_are_not_named() -> None:
    off = {"mtp_loss_coef": 0.0, "seq_balance_loss_coef": 0.0, "indexer_kl_coef": 0.0}
    assert ModelConfig.preset("tiny", **off).objectives == ("lm",)
    assert "seq_balance" not in ModelConfig.preset("tiny", force_balanced_routing=True).objectives
