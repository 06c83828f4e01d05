"""What the tests of weight folders share: comparing models, reading a folder as it is stored, damaging one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from dsv4c.weights.quant import encode_fp4, encode_fp8
from dsv4c.weights.stream import Source


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Whether two models hold the same bits."""
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder as it is stored."""
    source = Source(folder)
    return {key: source.raw(key) for key in source.headers}


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace (or, with None, remove) tensors of a folder that has one file."""
    tensors = {key: tensor.clone() for key, tensor in contents(folder).items()} | change
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def quantised(weight: torch.Tensor, storage: str) -> tuple[torch.Tensor, torch.Tensor]:
    return encode_fp8(weight) if storage == "fp8" else encode_fp4(weight)
