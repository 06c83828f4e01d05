"""Folder to folder: every way round gives the same bits, and no model is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from weight_folders import contents, rewrite, same

from dsv4c.config import ModelConfig
from dsv4c.errors import WeightsError
from dsv4c.model.transformer import DeepseekV4
from dsv4c.weights import check, convert, from_pretrained, save_weights
from dsv4c.weights.shards import Planned, ShardWriter
from dsv4c.weights.stream import Source

LAYOUTS = ["hf", "released", "dsv4c"]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("start", LAYOUTS)
@pytest.mark.parametrize("to", LAYOUTS)
def test_converting_writes_the_very_files_that_saving_would(model: DeepseekV4, start: str, to: str, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "start", layout=start, max_shard_bytes=700_000)
    save_weights(model, tmp_path / "saved", layout=to, max_shard_bytes=500_000)
    convert(tmp_path / "start", tmp_path / "converted", to=to, max_shard_bytes=500_000)
    assert files(tmp_path / "converted") == files(tmp_path / "saved")


def test_released_to_ours_to_hugging_face_to_released_is_the_same_bit_for_bit(model: DeepseekV4, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "first", layout="released", dtype="released")
    # A block whose largest value was rounded down to half the range has a smaller scale that holds it just as well.
    convert(tmp_path / "first", tmp_path / "a", to="released", dtype="released")
    assert same(from_pretrained(tmp_path / "a"), from_pretrained(tmp_path / "first"))
    convert(tmp_path / "a", tmp_path / "b", to="dsv4c")
    convert(tmp_path / "b", tmp_path / "c", to="hf")
    convert(tmp_path / "c", tmp_path / "d", to="released", dtype="released")
    assert files(tmp_path / "d") == files(tmp_path / "a")


def test_keeping_low_precision_loses_nothing(model: DeepseekV4, config: ModelConfig, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "a", layout="released", dtype="released")
    convert(tmp_path / "a", tmp_path / "b", to="hf")
    key = "model.layers.2.mlp.experts.gate_up_proj"
    assert Source(tmp_path / "b").headers[key].dtype == "BF16"  # scales are powers of two
    assert same(from_pretrained(tmp_path / "a"), from_pretrained(tmp_path / "b"))
    scale = "layers.2.ffn.experts.5.w3.scale"
    rewrite(tmp_path / "a", {scale: contents(tmp_path / "a")[scale].float() * 1.7})
    convert(tmp_path / "a", tmp_path / "c", to="hf")
    assert Source(tmp_path / "c").headers[key].dtype == "F32"
    assert same(from_pretrained(tmp_path / "a"), from_pretrained(tmp_path / "c"))


def test_bf16_rounds_what_the_release_rounds_and_nothing_else(model: DeepseekV4, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to="released", dtype=torch.bfloat16)
    stored = contents(tmp_path / "b")
    assert torch.equal(stored["layers.0.hc_attn_fn"], model.layers[0].hc_attn.fn)
    assert torch.equal(stored["layers.2.ffn.gate.bias"], model.layers[2].ffn.gate.bias)
    assert torch.equal(stored["layers.0.attn.wq_a.weight"], model.layers[0].attn.wq_a.weight.bfloat16())


def test_the_mtp_layer_can_be_left_out_and_done_without(model: DeepseekV4, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to="released", without_mtp=True)
    config = ModelConfig.from_json(tmp_path / "b")
    assert config.num_nextn_predict_layers == 0
    assert check(tmp_path / "b", config).ok
    rewrite(tmp_path / "a", {key: None for key in contents(tmp_path / "a") if key.startswith("mtp.")})
    with pytest.raises(WeightsError, match="without_mtp"):
        convert(tmp_path / "a", tmp_path / "c", to="released")
    assert not (tmp_path / "c").exists()
    convert(tmp_path / "a", tmp_path / "c", to="released", without_mtp=True)
    assert files(tmp_path / "c") == files(tmp_path / "b")


def test_no_more_than_one_part_is_read_at_a_time(model: DeepseekV4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_weights(model, tmp_path / "a", layout="dsv4c")
    sizes: list[int] = []
    read = Source.read

    def counted(self: Source, key: str, select: tuple[int | slice, ...] = ()) -> torch.Tensor:
        piece = read(self, key, select)
        sizes.append(piece.numel())
        return piece

    monkeypatch.setattr(Source, "read", counted)
    convert(tmp_path / "a", tmp_path / "b", to="hf")
    assert max(sizes) == model.embed.weight.numel()  # an expert's matrix and every unstacked tensor are smaller
    assert model.layers[0].ffn.experts.w13.numel() > max(sizes) // 2


def test_shards_hold_to_their_limit_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    plan = [Planned(f"t{i}", (n,), torch.float32) for i, n in enumerate((3, 5, 40, 1, 1))]
    writer = ShardWriter(tmp_path, plan, max_shard_bytes=40)
    assert [[t.key for t in shard] for shard in writer.shards] == [["t0", "t1"], ["t2"], ["t3", "t4"]]
    for t in plan:
        values = torch.arange(t.shape[0], dtype=torch.float32)
        assert writer.write(t.key, values[:1]) == 4
        if t.bytes > 4:
            writer.write(t.key, values[1:])
    writer.close()
    source = Source(tmp_path)
    assert {key: source.read(key).tolist() for key in source.headers}["t2"] == list(range(40))
    assert {h.file for h in source.headers.values()} == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}


def test_tensors_out_of_their_order_are_a_defect_of_the_caller(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, [Planned("a", (2,), torch.float32), Planned("b", (1,), torch.float32)])
    with pytest.raises(RuntimeError, match="of a were planned"):
        writer.write("b", torch.zeros(1))
    writer.write("a", torch.zeros(1))
    with pytest.raises(RuntimeError, match="a is not complete"):
        writer.close()
