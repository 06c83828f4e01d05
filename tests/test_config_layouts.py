"""Reading and writing the published settings files: every spelling gives the same model, every contradiction an error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dsv4c.config import ModelConfig
from dsv4c.config_layouts import read, write_hf, write_released
from dsv4c.errors import ConfigError
from dsv4c.presets import PRESETS
from tests.published_settings import FLASH, FLASH_INFERENCE, FLASH_RATIOS, YARN

RELEASED_FLASH = ModelConfig.preset("flash", indexer_kl_coef=0.0)  # published files say nothing of objectives

# One other valid value of every field, so that a field that a layout drops is seen.
OTHER: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 64,
    "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 4, "o_lora_rank": 8, "sliding_window": 9,
    "compress_ratios": (4, 0, 8, 4, 0, 0), "index_n_heads": 2, "index_head_dim": 64, "index_topk": None,
    "n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_hash_layers": 0,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0, "hca_ratio": 16, "max_position_embeddings": 512,
    "rope_theta": 5000.0, "compress_rope_theta": 40000.0, "rope_factor": 4.0, "rope_original_length": 0,
    "rope_beta_fast": 16.0, "rope_beta_slow": 2.0, "hc_mult": 2, "hc_sinkhorn_iters": 5, "hc_eps": 1e-5,
    "rms_norm_eps": 1e-5, "swiglu_limit": 0.5, "swiglu_limit_shared": False, "initializer_range": 0.01,
    "hc_init_scale": 1.0, "indexer_hadamard": False, "indexer_qk_precision": "fp4", "indexer_proj_precision": "fp8",
    "attention_kv_precision": "fp8", "keep_fp32_parameters": False, "mtp_loss_coef": 0.1,
    "seq_balance_loss_coef": 0.0, "indexer_kl_coef": 0.5, "indexer_kl_target": "selected",
    "router_bias_update_rate": 0.0, "force_balanced_routing": True,
}  # fmt: skip
ALONG = {  # what has to change with it
    "num_hidden_layers": {"compress_ratios": (0, 0, 4, 8, 0)},
    "num_nextn_predict_layers": {"compress_ratios": (0, 0, 4, 8, 4)},
    "hca_ratio": {"compress_ratios": (0, 0, 4, 16, 4, 0)},
}


def without(settings: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k not in keys}


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(source)
    assert "where:" in str(caught.value)
    assert "do:" in str(caught.value)
    return str(caught.value)


def test_the_published_settings_are_the_flash_preset() -> None:  # B67
    assert read(FLASH) == RELEASED_FLASH


def test_the_released_inference_settings_are_the_flash_preset() -> None:
    assert read(FLASH_INFERENCE) == RELEASED_FLASH
    assert read(FLASH_INFERENCE | {"n_mtp_layers": 1}) == RELEASED_FLASH


def test_flat_and_nested_rope_settings_give_the_same_config() -> None:  # B67
    main = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125}
    compress = without(YARN, "type") | {"rope_type": "yarn", "rope_theta": 160000, "attention_factor": 1.0}
    nested = without(FLASH, "rope_scaling") | {"rope_parameters": {"main": main, "compress": compress}}
    flat = without(FLASH, "rope_scaling") | {"rope_parameters": without(YARN, "type") | {"rope_type": "yarn"}}
    assert read(nested) == read(flat) == read(without(nested, "rope_theta", "compress_rope_theta")) == read(FLASH)


def test_yarn_belongs_to_the_compressed_layers_alone() -> None:  # B02
    main = {"rope_type": "yarn", "rope_theta": 10000, "factor": 16}
    nested = {"main": main, "compress": {"rope_type": "default", "rope_theta": 160000}}
    message = refused(without(FLASH, "rope_scaling") | {"rope_parameters": nested})
    assert "the rotation type is 'yarn'" in message
    assert "rope_parameters.main" in message


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default", "rope_theta": 10000}])
def test_without_rope_scaling_yarn_is_off(scaling: dict[str, Any] | None) -> None:
    assert read(FLASH | {"rope_scaling": scaling}).rope_original_length == 0
    assert read(without(FLASH, "rope_scaling")).rope_original_length == 0


def test_a_schedule_without_the_mtp_slot_gets_one_and_nothing_shifts() -> None:  # B67
    assert read(FLASH | {"compress_ratios": FLASH_RATIOS[:43]}) == RELEASED_FLASH
    assert read(FLASH_INFERENCE | {"n_mtp_layers": 1, "compress_ratios": FLASH_RATIOS[:43]}) == RELEASED_FLASH


def test_the_mtp_slot_is_dropped_where_there_is_no_mtp_layer() -> None:  # B67
    for off in (FLASH | {"num_nextn_predict_layers": 0}, FLASH_INFERENCE | {"n_mtp_layers": 0}):
        config = read(off)
        assert config.compress_ratios == tuple(FLASH_RATIOS[:43])
        assert config.num_nextn_predict_layers == 0
    assert read(FLASH_INFERENCE | {"compress_ratios": FLASH_RATIOS[:43]}).num_nextn_predict_layers == 0


def test_layer_types_and_rates_spell_the_same_schedule() -> None:
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    kinds = [names[m] for m in FLASH_RATIOS[:43]]
    routers = ["hash_moe"] * 3 + ["moe"] * 40
    spelled = without(FLASH, "compress_ratios", "num_hash_layers") | {"layer_types": kinds, "mlp_layer_types": routers}
    assert read(spelled) == RELEASED_FLASH
    for rates in ({"compress_rates": {names[4]: 4, names[128]: 64}}, {"compress_rate_csa": 4, "compress_rate_hca": 64}):
        config = read(spelled | rates)
        assert config.hca_ratio == 64
        assert config.compress_ratios[3] == 64
        assert read(FLASH | rates) == config  # 128 names the kind where the rate is given apart from it


def test_legacy_keys_have_the_defaults_of_transformers() -> None:
    assert read(without(FLASH, "num_hash_layers", "qk_rope_head_dim", "num_nextn_predict_layers")) == RELEASED_FLASH
    assert read(without(FLASH, "qk_rope_head_dim") | {"partial_rotary_factor": 0.25}).qk_rope_head_dim == 128


def test_an_unknown_ratio_names_the_layer_and_what_is_allowed() -> None:  # B67
    for settings in (FLASH, FLASH_INFERENCE):
        message = refused(settings | {"compress_ratios": [0, 8, *FLASH_RATIOS[2:]]})
        assert "layer 1 has compress ratio 8" in message
        assert "{0, 4, 128}" in message


@pytest.mark.parametrize(
    ("change", "says", "allowed"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'", '"sqrtsoftplus"'),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'", '"noaux_tc"'),
        ({"norm_topk_prob": False}, "norm_topk_prob is False", "true"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1", "true"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'", "false"),  # B66
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'", '"silu"'),
        ({"attention_bias": True}, "attention_bias is True", "false"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1", "0.0"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8", "1"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2", "1"),
        ({"output_router_logits": True}, "output_router_logits is True", "false"),
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'", '"deepseek_v4"'),
        ({"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates.compressed_sparse_attention is 8", "4"),
        ({"rope_scaling": YARN | {"attention_factor": 1.277}}, "rope_scaling.attention_factor is 1.277", "1.0"),  # B04
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "the rotation type is 'linear'", "default, yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "without original_max_position_embeddings", "both"),
        ({"rope_scaling": 16}, "rope_scaling is 16", "an object"),
        ({"rope_parameters": {"main": {}}}, "rope_parameters has the keys main", "main and compress"),
        ({"layer_types": ["full_attention"] * 43}, "layer 0 is 'full_attention'", "sliding_attention"),
        ({"layer_types": "sliding_attention"}, "layer_types is", "a list"),
        ({"mlp_layer_types": ["dense"] * 43}, "the router of layer 0 is 'dense'", "hash_moe, moe"),
        ({"mlp_layer_types": ["moe", "hash_moe"] + ["moe"] * 41}, "layer 1 has a hash router after", "first layers"),
        ({"partial_rotary_factor": "0.125"}, "partial_rotary_factor is '0.125'", "a number"),
        ({"index_topk_all": True}, "index_topk is 512", "262144 or null"),
        ({"indexer_hadamard": "false"}, "indexer_hadamard is 'false'", "true or false"),  # B66
        ({"hidden_size": "4096"}, "hidden_size is '4096'", "a number"),
    ],
)  # fmt: skip
def test_an_unsupported_value_names_the_key_and_what_is_allowed(change: dict[str, Any], says: str, allowed: str) -> None:
    message = refused(FLASH | change)
    assert says in message
    assert allowed in message.split("allowed:")[1]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rope_parameters": {"rope_type": "yarn", **without(YARN, "type"), "rope_theta": 5000}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", **without(YARN, "type"), "factor": 4}}, "rope_factor"),
        ({"rope_original_length": 0}, "rope_original_length"),
        ({"layer_types": ["sliding_attention"] * 43}, "compress_ratios"),
        ({"mlp_layer_types": ["moe"] * 43}, "num_hash_layers"),
        ({"partial_rotary_factor": 0.5}, "qk_rope_head_dim"),
        ({"compress_rate_hca": 8, "compress_rates": {"heavily_compressed_attention": 16}}, "hca_ratio"),
        ({"intermediate_size": 1024}, "moe_intermediate_size"),
    ],
)
def test_two_keys_that_disagree_are_both_named(change: dict[str, Any], name: str) -> None:
    message = refused(FLASH | change)
    assert f"two keys disagree on {name}" in message


@pytest.mark.parametrize(
    ("settings", "wrong", "near"),
    [
        (FLASH, "hidden_sizes", "hidden_size"),
        (FLASH, "indexer_kl_coeff", "indexer_kl_coef"),
        (FLASH_INFERENCE, "n_layer", "n_layers"),
        (ModelConfig.preset("tiny").to_dict(), "mtp_coef", "mtp_loss_coef"),
        (FLASH | {"rope_scaling": YARN | {"factors": 2}}, None, "factor"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    settings: dict[str, Any], wrong: str | None, near: str
) -> None:
    message = refused(settings if wrong is None else settings | {wrong: 1})
    assert f"did you mean '{near}'" in message


def test_missing_keys_are_named_all_at_once_in_the_layouts_own_spelling() -> None:
    message = refused(without(FLASH, "hidden_size", "index_topk", "compress_ratios"))
    assert "3 settings are missing: hidden_size, compress_ratios (or layer_types), index_topk" in message
    message = refused(without(FLASH_INFERENCE, "n_heads", "compress_rope_theta"))
    assert "2 settings are missing: n_heads, compress_rope_theta" in message
    assert "2 settings are missing: vocab_size, q_lora_rank" in refused(
        without(ModelConfig.preset("tiny").to_dict(), "vocab_size", "q_lora_rank")
    )


def test_an_empty_object_is_in_no_layout() -> None:
    assert "which layout" in refused({})


def test_objectives_are_settings_of_every_layout() -> None:
    for settings in (FLASH, FLASH_INFERENCE, RELEASED_FLASH.to_dict()):
        assert read(settings | {"indexer_kl_coef": 0.01}) == ModelConfig.preset("flash")


def test_a_wrong_value_in_a_file_is_named_by_file_and_by_the_files_own_key(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FLASH_INFERENCE | {"dim": -1}))
    assert f"{path}: dim (ModelConfig.hidden_size)" in refused(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{\n "hidden_size": 64,\n "head_dim": \n}', "line 4, column 1"),
        ("[1]", "holds a list"),
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' stands twice"),
        ("\x00", "line 1, column 1"),
    ],
)
def test_a_file_that_is_no_settings_object_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    message = refused(path)
    assert says in message
    assert str(path) in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "config.json") in refused(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_layout_writes_it_reads_back(name: str, tmp_path: Path) -> None:
    config = ModelConfig.preset(name)
    for settings in (write_hf(config), write_released(config), config.to_dict()):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        assert ModelConfig.from_json(tmp_path) == ModelConfig.from_json(tmp_path / "config.json") == config


def test_every_field_survives_every_layout_and_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    assert OTHER.keys() == {f.name for f in dataclasses.fields(ModelConfig)}
    for name, value in OTHER.items():
        config = ModelConfig.preset("tiny", **{name: value, **ALONG.get(name, {})})
        assert config != ModelConfig.preset("tiny"), name
        assert read(write_hf(config)) == config, name
        assert read(write_released(config)) == config, name
        assert read(config.to_dict()) == config, name
        theirs = transformers.DeepseekV4Config(**write_hf(config))
        assert read(json.loads(theirs.to_json_string())) == config, name


def test_transformers_rotates_as_many_channels_as_is_written() -> None:
    transformers = pytest.importorskip("transformers")
    for width in (48, 98, 110):
        for rotated in range(2, width + 1, 2):
            config = ModelConfig.preset("tiny", head_dim=width, qk_rope_head_dim=rotated, index_head_dim=128)
            settings = write_hf(config)
            assert int(width * settings["rope_parameters"]["compress"]["partial_rotary_factor"]) == rotated
            assert read(settings) == config
    theirs = transformers.DeepseekV4Config(
        **write_hf(ModelConfig.preset("tiny", head_dim=98, qk_rope_head_dim=58, index_head_dim=64))
    )
    assert theirs.qk_rope_head_dim == 58


def test_transformers_reads_the_same_model_from_what_is_written() -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("tiny", "flash", "pro"):
        config = ModelConfig.preset(name)
        theirs = transformers.DeepseekV4Config(**write_hf(config))
        rates = {"sliding_attention": 0} | theirs.compress_rates
        assert [rates[t] for t in theirs.layer_types] == list(config.compress_ratios[: config.num_hidden_layers])
        assert theirs.mlp_layer_types.count("hash_moe") == config.num_hash_layers
        assert theirs.qk_rope_head_dim == config.qk_rope_head_dim
        assert theirs.rope_parameters["compress"]["rope_theta"] == config.compress_rope_theta
        assert theirs.rope_parameters["compress"]["attention_factor"] == 1.0
        assert theirs.rope_parameters["main"]["rope_type"] == "default"  # B02
