"""A folder that does not fit is refused before anything is read, with everything that is wrong in one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from weight_folders import contents, rewrite

from dsv4c.config import ModelConfig
from dsv4c.errors import WeightsError
from dsv4c.model.transformer import DeepseekV4
from dsv4c.weights import check, load_weights, save_weights
from dsv4c.weights.stream import Source

BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"
TABLE = "model.layers.0.mlp.gate.tid2eid"


@pytest.fixture
def folder(model: DeepseekV4, tmp_path: Path) -> Path:
    save_weights(model, tmp_path / "hf")
    return tmp_path / "hf"


def refused(folder: Path, config: ModelConfig, **options: Any) -> str:
    torch.manual_seed(1)
    fresh = DeepseekV4(config)
    before = {k: v.clone() for k, v in fresh.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        load_weights(fresh, folder, **options)
    assert all(torch.equal(v, before[k]) for k, v in fresh.state_dict().items())  # refused before anything was read
    message = str(caught.value)
    for part in ("where:", "allowed:", "do:"):
        assert part in message
    return message


def test_a_folder_that_fits_is_ok_in_every_layout(model: DeepseekV4, config: ModelConfig, tmp_path: Path) -> None:
    for layout in ("hf", "released", "dsv4c"):
        save_weights(model, tmp_path / layout, layout=layout)
        report = check(tmp_path / layout, config)
        assert (report.ok, report.layout, report.summary()) == (True, layout, "")


def test_everything_that_is_wrong_is_said_at_once(folder: Path, config: ModelConfig) -> None:
    rewrite(
        folder,
        {
            "model.norm.weight": None,
            "lm_head.weight": torch.zeros(2, 2),
            "model.layers.0.extra": torch.zeros(1),
            TABLE: torch.zeros(320, 2),
            "model.layers.1.self_attn.sinks": torch.zeros(4, dtype=torch.int64),
        },
    )
    report = check(folder, config)
    assert report.missing == ["model.norm.weight"]
    assert report.unexpected == ["model.layers.0.extra"]
    assert report.misshapen == ["lm_head.weight is [2, 2], not [320, 64]"]
    assert len(report.wrong_dtype) == 2
    message = refused(folder, config)
    assert "1 missing (model.norm.weight); 1 unexpected (model.layers.0.extra); 1 misshapen (lm_head.weight" in message


def test_a_model_of_another_size_is_told_by_counts_and_first_keys(folder: Path, config: ModelConfig) -> None:
    wider = config.replace(hidden_size=128)
    message = refused(folder, wider)
    assert "misshapen (model.embed_tokens.weight is [320, 64], not [320, 128]" in message
    assert ", ..." in message


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"allow_missing": ("*",)}])
def test_a_missing_router_bias_is_an_error_and_never_zeros(folder: Path, config: ModelConfig, options: Any) -> None:  # B14
    rewrite(folder, {BIAS: None})
    assert f"1 missing ({BIAS})" in refused(folder, config, **options)


def test_a_missing_expert_table_is_an_error(folder: Path, config: ModelConfig) -> None:
    rewrite(folder, {TABLE: None})
    assert f"1 missing ({TABLE})" in refused(folder, config, strict=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_router_bias_that_is_not_finite_is_refused(folder: Path, config: ModelConfig, value: float) -> None:  # B14
    bias = contents(folder)[BIAS].clone()
    bias[3] = value
    rewrite(folder, {BIAS: bias})
    assert f"{BIAS}[3] is {value}" in refused(folder, config)


def test_an_expert_table_out_of_range_or_with_a_repeated_expert_is_refused(folder: Path, config: ModelConfig) -> None:
    table = contents(folder)[TABLE].clone()
    table[5] = torch.tensor([1, 8])
    rewrite(folder, {TABLE: table})
    assert f"{TABLE}[5, 1] is expert 8 of 8" in refused(folder, config)
    table[5] = torch.tensor([3, 3])
    rewrite(folder, {TABLE: table})
    assert f"{TABLE}[5] sends a token to one expert twice: [3, 3]" in refused(folder, config)


def test_weights_without_an_mtp_layer_need_permission_and_leave_it_as_it_was(folder: Path, config: ModelConfig) -> None:
    rewrite(folder, {key: None for key in contents(folder) if key.startswith("mtp.")})
    assert "allow_missing=('mtp.*',)" in refused(folder, config)
    fresh = DeepseekV4(config)
    before = fresh.mtp[0].e_proj.weight.clone()
    report = load_weights(fresh, folder, allow_missing=("mtp.*",))
    assert torch.equal(fresh.mtp[0].e_proj.weight, before)
    assert all(key.startswith("mtp.") for key in report.not_loaded)
    assert len(report.not_loaded) > 20
    with torch.device("meta"):
        empty = DeepseekV4(config)
    with pytest.raises(WeightsError, match="no initial value to keep"):
        load_weights(empty, folder, allow_missing=("mtp.*",))


def test_an_mtp_layer_that_the_model_lacks_is_unexpected(folder: Path, config: ModelConfig) -> None:
    plain = config.replace(num_nextn_predict_layers=0, compress_ratios=config.compress_ratios[:5])
    assert "unexpected (mtp.0." in refused(folder, plain)
    load_weights(DeepseekV4(plain), folder, allow_unexpected=("mtp.*",))


def test_half_a_stack_of_experts_is_refused(model: DeepseekV4, config: ModelConfig, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "w", layout="released")
    rewrite(tmp_path / "w", {"layers.0.ffn.experts.3.w1.weight": None})
    with pytest.raises(WeightsError, match=r"1 of the 16 tensors that make up layers\.0\.ffn\.experts\.w13 are missing"):
        load_weights(DeepseekV4(config), tmp_path / "w", strict=False)


def test_codes_without_scales_and_scales_without_codes_are_refused(
    model: DeepseekV4, config: ModelConfig, tmp_path: Path
) -> None:
    save_weights(model, tmp_path / "w", layout="released", dtype="released")
    key = "layers.0.attn.wq_a"
    rewrite(tmp_path / "w", {f"{key}.scale": None})
    assert check(tmp_path / "w", config).wrong_dtype == [f"{key}.weight is F8_E4M3 without {key}.scale"]
    rewrite(tmp_path / "w", {f"{key}.scale": torch.ones(1, 1), f"{key}.weight": torch.ones(32, 64)})
    assert f"{key}.scale" in check(tmp_path / "w", config).unexpected
    never = "layers.0.ffn.gate.weight"  # the router is never quantised
    rewrite(tmp_path / "w", {never: torch.ones(8, 64).to(torch.float8_e4m3fn)})
    assert check(tmp_path / "w", config).wrong_dtype == [f"{never} is F8_E4M3, not BF16 or F16 or F32 or F64"]


def test_a_folder_without_weights_or_with_foreign_ones_is_refused(tmp_path: Path, config: ModelConfig) -> None:
    with pytest.raises(WeightsError, match="there are no weights here"):
        check(tmp_path, config)
    rewrite_foreign = tmp_path / "model.safetensors"
    from safetensors.torch import save_file

    save_file({"transformer.h.0.weight": torch.zeros(1)}, rewrite_foreign)
    with pytest.raises(WeightsError, match="in no known layout"):
        check(tmp_path, config)


def test_a_damaged_file_an_absent_shard_and_a_broken_index_are_named(
    model: DeepseekV4, config: ModelConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "w"
    save_weights(model, folder, max_shard_bytes=10**6)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[:-10])
    with pytest.raises(WeightsError, match="not a whole safetensors file") as caught:
        check(folder, config)
    assert str(shards[1]) in str(caught.value)
    shards[1].unlink()
    with pytest.raises(WeightsError, match="a file that is not there") as caught:
        check(folder, config)
    assert str(shards[1]) in str(caught.value)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shards[1].name, shards[0].name))
    with pytest.raises(WeightsError, match="stand in the index and in no file"):
        Source(folder)
    index.write_text("{")
    with pytest.raises(WeightsError, match="the index cannot be read"):
        Source(folder)


def test_one_key_in_two_files_without_an_index_is_refused(folder: Path) -> None:
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(WeightsError, match=r"is in two files: copy\.safetensors and model\.safetensors"):
        Source(folder)
