"""Saving and loading a model, in every layout, by us and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from weight_folders import contents, quantised, rewrite, same

from dsv4c.config import ModelConfig
from dsv4c.errors import WeightsError
from dsv4c.model.transformer import DeepseekV4
from dsv4c.weights import from_pretrained, load_weights, save_weights
from dsv4c.weights.keymap import tensors
from dsv4c.weights.quant import decode_fp4, decode_fp8

LAYOUTS = ["hf", "released", "dsv4c"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_model_comes_back_bit_for_bit(model: DeepseekV4, layout: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "w", layout=layout, max_shard_bytes=500_000)
    assert (tmp_path / "w" / "model.safetensors.index.json").exists()
    loaded = DeepseekV4.from_pretrained(tmp_path / "w")
    assert same(model, loaded)
    assert loaded.config == model.config
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in model.parameters()]


def test_a_meta_model_is_filled_tensor_by_tensor(model: DeepseekV4, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "w")
    with torch.device("meta"):
        empty = DeepseekV4(model.config)
    load_weights(empty, tmp_path / "w")
    assert same(model, empty)


def test_bf16_parameters_stay_bf16_and_fp32_ones_stay_fp32(model: DeepseekV4, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "w")
    loaded = from_pretrained(tmp_path / "w", dtype=torch.bfloat16)
    assert loaded.embed.weight.dtype is torch.bfloat16
    assert torch.equal(loaded.embed.weight, model.embed.weight.bfloat16())
    assert loaded.layers[2].ffn.gate.bias.dtype is torch.float32
    assert torch.equal(loaded.layers[0].hc_attn.fn, model.layers[0].hc_attn.fn)
    save_weights(loaded, tmp_path / "again")
    assert same(loaded, from_pretrained(tmp_path / "again", dtype=torch.bfloat16))


def test_bf16_storage_follows_the_specification(model: DeepseekV4, config: ModelConfig, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "w", layout="dsv4c", dtype=torch.bfloat16)
    stored = contents(tmp_path / "w")
    wanted = {"fp32": torch.float32, "int64": torch.int64}
    for tensor in tensors(config):
        assert stored[tensor.name].dtype is wanted.get(tensor.storage, torch.bfloat16), tensor.name


def test_released_storage_decodes_to_what_was_encoded(model: DeepseekV4, config: ModelConfig, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "w", layout="released", dtype="released")
    state, loaded = model.state_dict(), from_pretrained(tmp_path / "w").state_dict()
    for tensor in tensors(config):
        for part in tensor.parts:
            name, select = part.place("dsv4c")
            expected = state[name][select]
            if tensor.storage in ("fp8", "fp4"):
                decode = decode_fp8 if tensor.storage == "fp8" else decode_fp4
                expected = decode(*quantised(expected, tensor.storage))
            elif tensor.storage == "bf16":
                expected = expected.bfloat16().float()
            assert torch.equal(loaded[name][select], expected), name


def test_hugging_face_spelling_of_scales_is_read(model: DeepseekV4, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "w")
    key = "model.layers.0.self_attn.q_a_proj.weight"
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    codes, scale = quantised(model.layers[0].attn.wq_a.weight.detach(), "fp8")
    codes3, scale3 = quantised(model.layers[0].ffn.experts.w13.detach(), "fp8")
    change: dict[str, Any] = {key: codes, key + "_scale_inv": scale.float()}
    rewrite(tmp_path / "w", change | {stack: codes3, stack + "_scale_inv": scale3.float()})
    loaded = from_pretrained(tmp_path / "w")
    assert torch.equal(loaded.layers[0].attn.wq_a.weight, decode_fp8(codes, scale))
    assert torch.equal(loaded.layers[0].ffn.experts.w13, decode_fp8(codes3, scale3))


def test_transformers_loads_both_published_layouts_and_computes_the_same(model: DeepseekV4, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tame = DeepseekV4(model.config)
    ids = torch.randint(0, model.config.vocab_size, (2, 40))
    expected = tame(ids).logits
    for layout in ("hf", "released"):
        save_weights(tame, tmp_path / layout, layout=layout, max_shard_bytes=500_000)
        theirs, info = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path / layout, output_loading_info=True)
        assert not any(info.values())
        assert (theirs(ids).logits - expected).abs().max() < 2e-5


def test_what_transformers_saves_is_loaded(model: DeepseekV4, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_weights(model, tmp_path / "ours")
    theirs = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = from_pretrained(tmp_path / "theirs", allow_missing=("mtp.*",)).state_dict()
    kept = {name: t for name, t in model.state_dict().items() if not name.startswith("mtp.")}
    assert all(torch.equal(loaded[name], t) for name, t in kept.items())


def test_a_folder_that_is_not_empty_is_not_overwritten_unless_told(model: DeepseekV4, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "w")
    with pytest.raises(WeightsError, match="the folder is not empty") as caught:
        save_weights(model, tmp_path / "w")
    assert "overwrite=True" in str(caught.value)
    save_weights(model, tmp_path / "w", layout="released", overwrite=True)
    assert same(model, from_pretrained(tmp_path / "w"))
    (tmp_path / "w" / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"more than weights: tokenizer\.json"):
        save_weights(model, tmp_path / "w", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["w"]


def test_a_save_that_fails_leaves_nothing_and_replaces_nothing(model: DeepseekV4, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "w")
    broken = from_pretrained(tmp_path / "w")
    with torch.no_grad():
        broken.layers[4].attn.wq_a.weight[0, 0] = float("nan")
    with pytest.raises(WeightsError, match="not finite") as caught:
        save_weights(broken, tmp_path / "w", layout="released", dtype="released", overwrite=True)
    assert "layers.4.attn.wq_a.weight" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["w"]
    assert same(model, from_pretrained(tmp_path / "w"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layout": "gguf"}, "there is no layout 'gguf'"),
        ({"layout": "transformers"}, "there is no layout 'transformers'"),
        ({"dtype": "released"}, "cannot be stored in the hf layout"),
        ({"dtype": torch.int8}, "cannot be stored as torch.int8"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(model: DeepseekV4, tmp_path: Path, options: Any, says: str) -> None:
    with pytest.raises(WeightsError, match=says) as caught:
        save_weights(model, tmp_path / "w", **options)
    assert "allowed:" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_values_or_without_config_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    with torch.device("meta"):
        empty = DeepseekV4(config)
    with pytest.raises(WeightsError, match="on the meta device"):
        save_weights(empty, tmp_path / "w")
    with pytest.raises(WeightsError, match="has no ModelConfig"):
        save_weights(torch.nn.Linear(1, 1), tmp_path / "w")
    changed = DeepseekV4(config)
    changed.extra = torch.nn.Linear(1, 1)
    with pytest.raises(WeightsError, match=r"2 tensors of the model are not those of its config: extra\.bias"):
        save_weights(changed, tmp_path / "w")


def test_progress_ends_at_everything(model: DeepseekV4, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    save_weights(model, tmp_path / "w", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(t.numel() * t.element_size() for t in model.state_dict().values())
    load_weights(model, tmp_path / "w", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
