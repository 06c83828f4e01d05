"""What a forward accepts: refuses what cannot be meant before anything is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4c.config import ModelConfig
from dsv4c.errors import DataError
from dsv4c.model.objectives import IGNORED


def checked_inputs(
    config: ModelConfig, input_ids: Tensor | None, targets: Tensor | None, document_ids: Tensor | None,
    padding_mask: Tensor | None, position_ids: Tensor | None, other: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The ids, after refusing what cannot be meant."""
    if "labels" in other:
        raise DataError(
            "labels is not an argument: Hugging Face labels are unshifted", where="DeepseekV4.forward",
            allowed="targets: targets[t] is the token to predict at position t, already shifted, -100 ignored",
            do="pass targets = labels shifted one position to the left, with -100 at the end",
        )  # fmt: skip
    if other or input_ids is None:
        raise DataError(
            f"unknown argument {next(iter(other))!r}" if other else "input_ids is missing", where="DeepseekV4.forward",
            allowed="input_ids, targets, document_ids, padding_mask, position_ids, counts",
            do="pass input_ids [B,S]: hash routers choose experts by token id, embeddings alone cannot be routed",
        )  # fmt: skip
    if input_ids.dim() != 2 or input_ids.shape[1] < 1 or input_ids.dtype not in (torch.int32, torch.int64):
        raise DataError(
            f"input_ids is {input_ids.dtype} {list(input_ids.shape)}", where="DeepseekV4.forward",
            allowed="int64 [B,S] with S >= 1", do="pass a batch of token ids",
        )  # fmt: skip
    if targets is not None and targets.dtype not in (torch.int32, torch.int64):
        raise DataError(
            f"targets is {targets.dtype}", where="DeepseekV4.forward, targets", allowed="int64 token ids, -100 for none",
            do="pass the ids of the tokens to predict",
        )  # fmt: skip
    named = {"targets": targets, "document_ids": document_ids, "padding_mask": padding_mask, "position_ids": position_ids}
    for name, value in named.items():
        if value is not None and value.shape != input_ids.shape:
            raise DataError(
                f"{name} is {list(value.shape)} for input_ids {list(input_ids.shape)}", where=f"DeepseekV4.forward, {name}",
                allowed="the shape of input_ids", do="pass one value per token",
            )  # fmt: skip
    if padding_mask is not None and padding_mask.dtype != torch.bool:
        raise DataError(
            f"padding_mask is {padding_mask.dtype}", where="DeepseekV4.forward, padding_mask",
            allowed="bool, True for real tokens", do="pass mask.bool(), not an additive mask",
        )  # fmt: skip
    if input_ids.shape[1] > config.max_position_embeddings:
        raise DataError(
            f"{input_ids.shape[1]} tokens in a row", where="DeepseekV4.forward, input_ids",
            allowed=f"at most max_position_embeddings = {config.max_position_embeddings}", do="use shorter rows",
        )  # fmt: skip
    # Reading values is free on a CPU and would stall an accelerator; the loader has checked them there.
    has_values = type(input_ids) is Tensor and not torch.compiler.is_compiling()
    if has_values and input_ids.device.type == "cpu" and input_ids.numel():
        _check_range("input_ids", input_ids, config.vocab_size, "")
        if targets is not None and (named_targets := targets[targets != IGNORED]).numel():
            _check_range("targets", named_targets, config.vocab_size, f", or {IGNORED} for no target")
    return input_ids.long()


def _check_range(name: str, ids: Tensor, vocab_size: int, also: str) -> None:
    low, high = (int(v) for v in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"token id {low if low < 0 else high}", where=f"DeepseekV4.forward, {name}",
            allowed=f"0 to {vocab_size - 1} (vocab_size {vocab_size}){also}",
            do="use the tokenizer that the model was made for",
        )  # fmt: skip
