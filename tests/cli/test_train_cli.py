"""Wrong inputs on the command line: each message says what is wrong, where, what is allowed and what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dsv4c.cli.main import main


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Exit status and everything printed."""
    monkeypatch.setattr(sys, "argv", ["dsv4c", *args])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        main()
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out + captured.err


WRONG = {
    "a preset that does not exist": (["--preset", "flesh"], ["'flesh'", "did you mean 'flash'"]),
    "a setting that nothing reads": (["--set", "index_top_k=8"], ["index_top_k", "did you mean 'index_topk'"]),
    "the text 'false' for a number": (["--set", "indexer_kl_coef=false"], ["indexer_kl_coef is False", "a number"]),
    "a quoted 'false' for a truth value": (["--set", 'indexer_hadamard="false"'], ["'false'", "true or false"]),
    "a negative coefficient": (["--set", "mtp_loss_coef=-1"], ["mtp_loss_coef is -1", "at least 0"]),
    "a NaN coefficient": (["--set", "seq_balance_loss_coef=NaN"], ["seq_balance_loss_coef is nan", "finite"]),
    "an indexer loss without an indexer": (["--set", "compress_ratios=[0,0,8,8,8,0]"], ["no layer has an indexer", "CSA"]),
    "an unknown compress ratio": (["--set", "compress_ratios=[0,0,4,16,4,0]"], ["layer 3", "{0, 4, 8}"]),
    "a setting without a value": (["--set", "mtp_loss_coef"], ["key=value"]),
    "a path that does not exist": (["--data", "/no/such/file.txt"], ["/no/such/file.txt"]),
    "an unknown dtype": (["--dtype", "fp8"], ["'fp8'", "fp32, bf16"]),
    "an unknown training stage": (["--stages", "dens:10,sparse"], ["'dens'", "did you mean 'dense'"]),
    "a list of layers that is none": (["--recompute", "some"], ["'some'", "0,1,5"]),
    "a preset and a config": (["--preset", "tiny", "--config", "x.json"], ["--preset and --config"]),
    "a batch of nothing": (["--batch-size", "0"], ["batch_size"]),
    "a negative learning rate": (["--lr", "-1"], ["lr is -1"]),
    "a learning rate that overflows": (["--lr", "1e38"], ["lr is 1e+38"]),
    "too long a warm-up": (["--warmup-steps", "9"], ["warmup_steps is 9", "0 to 2"]),
    "a device that does not exist": (["--device", "foo"], ["device 'foo'", "cpu, cuda"]),
    "a seed that is too large": (["--seed", "99999999999999999999"], ["seed is 99999999999999999999", "2^63"]),
    "a negative MTP coefficient": (["--mtp-coef-after-decay", "-1"], ["--mtp-coef-after-decay", "positive"]),
    "a NaN MTP coefficient": (["--mtp-coef-after-decay", "nan"], ["--mtp-coef-after-decay", "positive"]),
    "a warm-up of an indexer that is off": (
        ["--stages", "dense:1,indexer_warmup:1", "--set", "indexer_kl_coef=0"], ["nothing to train"],
    ),
    "rows longer than the model": (["--seq-len", "100000"], ["seq_len is 100000", "65536"]),
    "widths that no block of scales divides": (
        ["--set", "attention_kv_precision=fp8", "--set", "head_dim=112"],
        ["attention_kv_precision is fp8", "multiple of 64"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_refused_with_a_message_and_status_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # B66
    args, expected = WRONG[name]
    out = tmp_path / "run"
    small = ["--steps", "2", "--no-compile", "--out", str(out), "--cache-dir", str(tmp_path / "cache")]
    status, text = run(monkeypatch, capsys, "train", *small, *args)
    assert status == 2
    assert "Traceback" not in text
    for part in expected:
        assert part in text
    assert not out.exists() or not list(out.iterdir())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"text": "fine"}\n{"text": 3}\n', ["broken.jsonl:2"]),
        ('{"text": "fine"}\nnot json\n', ["broken.jsonl:2"]),
        ('{"body": "no text field"}\n', ["broken.jsonl:1", "body"]),
    ],
)
def test_a_broken_jsonl_line_is_named_with_file_and_line(
    content: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "broken.jsonl"
    data.write_text(content)
    status, text = run(monkeypatch, capsys, "train", "--data", str(data), "--no-compile", "--out", str(tmp_path / "run"))
    assert status == 2
    assert all(part in text for part in expected)


def test_a_run_folder_that_is_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "file"
    out.write_text("mine")
    status, text = run(monkeypatch, capsys, "train", "--steps", "1", "--no-compile", "--out", str(out))
    assert status == 2
    assert "is not a folder" in text
    assert out.read_text() == "mine"


def test_several_processes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # B64
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, text = run(monkeypatch, capsys, "train", "--steps", "1", "--no-compile", "--out", str(tmp_path / "run"))
    assert status == 2
    assert "WORLD_SIZE is 2" in text


def test_a_config_with_a_typo_names_file_and_nearest_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dsv4c import ModelConfig

    values = ModelConfig.preset("tiny").to_dict()
    values["hidden_sizes"] = values.pop("hidden_size")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    status, text = run(monkeypatch, capsys, "train", "--config", str(path), "--out", str(tmp_path / "run"))
    assert status == 2
    assert "hidden_size" in text
    assert "config.json" in text


def test_weights_check_answers_no_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    from dsv4c import DeepseekV4, ModelConfig

    folder = tmp_path / "weights"
    DeepseekV4(ModelConfig.preset("tiny")).save_pretrained(folder, layout="released")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop("layers.2.ffn.gate.bias")
    save_file(tensors, file)
    for index in folder.glob("*.index.json"):
        index.unlink()
    status, text = run(monkeypatch, capsys, "weights", "check", str(folder))
    assert status == 1
    assert "layers.2.ffn.gate.bias" in text


def test_a_nan_in_training_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # B61
    text_file = tmp_path / "text.txt"
    text_file.write_text("to be or not to be " * 100)
    status, text = run(
        monkeypatch, capsys, "train", "--data", str(text_file), "--steps", "5", "--seq-len", "16", "--batch-size", "1",
        "--lr", "1e30", "--warmup-steps", "0", "--no-compile", "--out", str(tmp_path / "run"),
        "--cache-dir", str(tmp_path / "cache"),
    )  # fmt: skip
    assert status == 1
    assert "is not finite" in text
    assert "step 2" in text
    assert "report:" not in text


def test_env_prints_versions_and_what_hides_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    status, text = run(monkeypatch, capsys, "env", "--json")
    facts = json.loads(text)
    assert status == 0
    assert facts["packages"]["torch"]
    assert facts["settings"]["TORCH_COMPILE_DISABLE"] == "1"


def test_every_command_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["train"], ["report"], ["env"], ["weights", "convert"], ["bench", "step"], ["bench", "compile"]):
        status, text = run(monkeypatch, capsys, *command, "--help")
        assert status == 0
        assert "Usage" in text
