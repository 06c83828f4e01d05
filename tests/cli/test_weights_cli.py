"""``dsv4c weights``: what is printed, and the exit status 0 (done), 1 (does not fit), 2 (cannot be used)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from dsv4c.cli.weights import app
from dsv4c.config import ModelConfig
from dsv4c.model.transformer import DeepseekV4
from dsv4c.weights import save_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "hf"
    torch.manual_seed(0)
    save_weights(DeepseekV4(ModelConfig.preset("tiny")), path)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


def test_inspect_lists_keys_shapes_and_the_layout(folder: Path) -> None:
    result = run("inspect", folder, "--filter", "*layers.0.self_attn.sinks")
    assert result.exit_code == 0
    assert "model.layers.0.self_attn.sinks" in result.stdout
    assert "layout hf: 1 tensors, 4 elements, 16 bytes" in result.stdout


def test_inspect_prints_json(folder: Path) -> None:
    result = run("inspect", folder, "--json")
    told = json.loads(result.stdout)
    assert told["layout"] == "hf"
    assert told["tensors"] == len(told["keys"])
    assert told["keys"]["model.norm.weight"] == {"shape": [64], "dtype": "F32", "file": "model.safetensors"}


def test_check_says_yes(folder: Path) -> None:
    result = run("check", folder)
    assert result.exit_code == 0
    assert "every key, shape and dtype fits" in result.stdout
    assert json.loads(run("check", folder, "--json").stdout)["ok"] is True


def test_check_says_no_with_exit_status_1_and_the_keys(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    result = run("check", tmp_path)
    assert result.exit_code == 1
    assert "model.norm.weight" in result.stdout
    told = run("check", tmp_path, "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["missing"] == ["model.norm.weight"]
    assert run("check", tmp_path, "--allow-missing", "model.norm.*").exit_code == 0


def test_convert_writes_another_layout_that_fits(folder: Path, tmp_path: Path) -> None:
    result = run("convert", folder, tmp_path / "out", "--to", "released", "--dtype", "released", "--shard-gb", "0.0002")
    assert result.exit_code == 0, result.stderr
    assert "wrote 504 tensors in" in result.stdout
    assert "(released layout)" in result.stdout
    assert run("check", tmp_path / "out").exit_code == 0
    assert run("check", tmp_path / "out", "--config", tmp_path / "out" / "inference" / "config.json").exit_code == 0


def test_convert_says_what_it_did_not_copy(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for path in folder.iterdir():
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    result = run("convert", tmp_path / "in", tmp_path / "out", "--to", "dsv4c", "--dtype", "bf16", "--without-mtp")
    assert result.exit_code == 0
    assert "not copied: tokenizer.json" in result.stdout


def test_an_input_that_cannot_be_used_is_told_without_a_traceback_and_with_exit_status_2(
    folder: Path, tmp_path: Path
) -> None:
    cases = [
        (("inspect", tmp_path / "nowhere"), "there are no weights here"),
        (("check", folder, "--config", tmp_path / "none.json"), "there is no such config file"),
        (("convert", folder, folder, "--to", "hf"), "the folder is not empty"),
        (("convert", folder, tmp_path / "o", "--to", "hf", "--dtype", "released"), "cannot be stored in the hf layout"),
    ]
    for words, says in cases:
        result = run(*words)
        assert result.exit_code == 2, words
        assert says in result.stderr
        assert "where:" in result.stderr
        assert "Traceback" not in result.output


def test_an_option_that_does_not_exist_is_a_usage_error(folder: Path, tmp_path: Path) -> None:
    assert run("convert", folder, tmp_path / "o", "--to", "gguf").exit_code == 2
    assert run("convert", folder, tmp_path / "o").exit_code == 2
    assert not (tmp_path / "o").exists()
