"""Checkpoints: restored exactly, and outspoken about damage and about what does not fit."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dsv4c.errors import CheckpointError
from dsv4c.train import manifest
from dsv4c.train.checkpoint import load_checkpoint, save_checkpoint
from dsv4c.train.optim import OptimConfig, build_optimizer

CONFIG: dict[str, Any] = {"model": {"hidden_size": 6, "layers": [0, 4]}, "lr": 0.01}


class SmallModel(nn.Module):
    """A parameter for AdamW, two for Muon (one a bf16 stack), and buffers of three dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(10, 6)
        self.proj = nn.Linear(6, 4, bias=False)
        self.w13 = nn.Parameter(torch.randn(2, 4, 6).bfloat16())
        self.norm = nn.RMSNorm(6)
        self.register_buffer("bias", torch.randn(4))
        self.register_buffer("table", torch.arange(6))
        self.register_buffer("derived", torch.ones(3), persistent=False)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step on gradients drawn from the global generator, so that its state matters as well."""
        for param in self.parameters():
            param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()


def run(seed: int = 0, steps: int = 2) -> tuple[SmallModel, torch.optim.Optimizer]:
    model = SmallModel(seed)
    optimizer = build_optimizer(model, OptimConfig(lr=0.01))
    for _ in range(steps):
        model.step(optimizer)
    return model, optimizer


def save(root: Path, step: int, *, seed: int = 0, keep: int = 3, **changes: Any) -> Path:
    model, optimizer = run(seed)
    settings: dict[str, Any] = {"loader_state": {"position": step}, "extra": {}, "config": CONFIG, "keep": keep}
    return save_checkpoint(root, step=step, model=model, optimizer=optimizer, **(settings | changes))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(2)
    model, optimizer = run()
    path = save_checkpoint(
        tmp_path, step=2, model=model, optimizer=optimizer, loader_state={}, extra={}, config=CONFIG
    )  # fmt: skip
    expected_draws = (random.random(), np.random.rand(), torch.rand(3))
    model.step(optimizer)

    other = SmallModel(seed=99)
    resumed = build_optimizer(other, OptimConfig(lr=0.5))
    load_checkpoint(path, model=other, optimizer=resumed)
    draws = (random.random(), np.random.rand(), torch.rand(3))
    other.step(resumed)
    assert draws[:2] == expected_draws[:2]
    assert torch.equal(draws[2], expected_draws[2])
    assert same(tensors(model), tensors(other))
    assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_plain_torch_optimizers_are_restored_as_well(tmp_path: Path) -> None:
    model = SmallModel()
    optimizer = torch.optim.AdamW(model.parameters())
    model.step(optimizer)
    path = save_checkpoint(
        tmp_path, step=1, model=model, optimizer=optimizer, loader_state={}, extra={}, config={}
    )  # fmt: skip
    model.step(optimizer)
    other = SmallModel(seed=5)
    resumed = torch.optim.AdamW(other.parameters())
    load_checkpoint(path, model=other, optimizer=resumed)
    other.step(resumed)
    assert same(tensors(model), tensors(other))


def test_states_of_the_loader_and_of_the_caller_come_back_exactly(tmp_path: Path) -> None:
    loader: dict[str, Any] = {
        "position": 2**60,
        "order": (3, 1, 2),
        "seen": {7: "a"},
        "weights": torch.arange(3, dtype=torch.bfloat16),
    }
    extra: dict[str, Any] = {
        "best": 0.1 + 0.2,
        "worst": float("inf"),
        "none": None,
        "array": np.arange(3, dtype=np.uint32),
        "empty": {},
    }
    path = save(tmp_path, 1, loader_state=loader, extra=extra)
    found = load_checkpoint(path, model=SmallModel(), optimizer=None)
    assert found["step"] == 1
    assert found["config"] == CONFIG
    weights, array = found["loader_state"].pop("weights"), found["extra"].pop("array")
    assert weights.dtype == torch.bfloat16
    assert torch.equal(weights, loader.pop("weights"))
    assert array.dtype == np.uint32
    assert array.tolist() == extra.pop("array").tolist()
    assert found["loader_state"] == loader
    assert found["extra"] == extra


def test_a_state_that_cannot_be_restored_exactly_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="loader_state/shards/1"):
        save(tmp_path, 1, loader_state={"shards": [1, {2, 3}]})
    assert not tmp_path.exists() or names(tmp_path) == []


def test_names_do_not_depend_on_which_parts_are_compiled(tmp_path: Path) -> None:
    model, optimizer = run()
    model.proj = torch.compile(model.proj)  # type: ignore[assignment]  # wraps the module, adds _orig_mod to the names
    path = save_checkpoint(
        tmp_path, step=1, model=model, optimizer=optimizer, loader_state={}, extra={}, config={}
    )  # fmt: skip
    other = SmallModel(seed=9)
    load_checkpoint(path, model=other, optimizer=build_optimizer(other, OptimConfig()))
    assert torch.equal(other.proj.weight, model.get_parameter("proj._orig_mod.weight"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("__0_0.distcp", truncate, "bytes"),
    ("__0_0.distcp", flip, "sha256"),
    (".metadata", flip, "sha256"),
    ("rank-00000.json", flip, "sha256"),
    ("rank-00000.json", Path.unlink, "missing"),
    (manifest.NAME, Path.unlink, "missing"),
    (manifest.NAME, truncate, "manifest"),
    (manifest.NAME, flip, "manifest"),
]


@pytest.mark.parametrize(("file", "damage", "words"), DAMAGE, ids=[f"{f}-{d.__name__}" for f, d, _ in DAMAGE])
def test_damage_is_named_with_the_file_and_the_older_checkpoint_that_is_whole(
    tmp_path: Path, file: str, damage: Callable[[Path], None], words: str
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    if damage is truncate and file == manifest.NAME:
        os.truncate(path / file, 100)
    else:
        damage(path / file)
    model = SmallModel(seed=3)
    before = tensors(model)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model=model, optimizer=None)
    message = str(caught.value)
    assert words in message
    assert file in message
    assert "step-00000001, which is whole" in message
    assert same(before, tensors(model))


def test_without_an_older_whole_checkpoint_the_message_says_so(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    flip(path / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="no other checkpoint in this folder is whole"):
        load_checkpoint(path, model=SmallModel(), optimizer=None)


def test_another_configuration_is_refused_by_key_before_any_tensor_is_touched(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    model, optimizer = run(seed=3)
    before, state = tensors(model), torch.get_rng_state()
    other = {"model": {"hidden_size": 8, "layers": [0, 4]}, "seed": 1}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model=model, optimizer=optimizer, config=other)
    message = str(caught.value)
    assert "model.hidden_size is 6 there and 8 here" in message
    assert "lr is 0.01 there and '(absent)' here" in message
    assert "seed is '(absent)' there and 1 here" in message
    assert "layers" not in message
    assert same(before, tensors(model))
    assert torch.equal(state, torch.get_rng_state())


def test_the_same_configuration_passes_with_tuples_for_lists(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    same_config = {"lr": 0.01, "model": {"hidden_size": 6, "layers": (0, 4)}}
    assert load_checkpoint(path, model=SmallModel(), optimizer=None, config=same_config)["step"] == 1


def test_another_model_is_refused_by_tensor_before_any_is_touched(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    model = SmallModel(seed=3)
    model.proj = nn.Linear(6, 5, bias=False)
    model.w13.data = model.w13.data.float()
    model.register_buffer("extra_buffer", torch.zeros(1))
    before = tensors(model)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model=model, optimizer=None)
    message = str(caught.value)
    assert "extra_buffer is not in the checkpoint" in message
    assert "proj.weight is [4, 6] torch.float32 there and [5, 6] torch.float32 here" in message
    assert "w13 is [2, 4, 6] torch.bfloat16 there" in message
    assert same(before, tensors(model))


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step-00000007"):
        load_checkpoint(tmp_path / "step-00000007", model=SmallModel(), optimizer=None)


def test_the_manifest_says_what_the_checkpoint_is(tmp_path: Path) -> None:
    path = save(tmp_path, 12)
    content = json.loads((path / manifest.NAME).read_text())
    assert content["format"] == manifest.FORMAT
    assert content["step"] == 12
    assert content["config"] == CONFIG
    assert content["versions"]["torch"] == torch.__version__
    assert content["files"].keys() == {p.name for p in path.iterdir()} - {manifest.NAME}


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 2)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 2"):
        load_checkpoint(path, model=SmallModel(), optimizer=None)


def test_a_checkpoint_survives_being_copied_elsewhere(tmp_path: Path) -> None:
    path = save(tmp_path / "here", 1)
    copied = shutil.copytree(path, tmp_path / "there" / path.name)
    assert load_checkpoint(copied, model=SmallModel(), optimizer=None)["step"] == 1
