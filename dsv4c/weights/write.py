"""Writing a model's tensors as a folder of one layout, from whatever can give their parts.

Saving a model and converting a folder are the same act with another source: ``fetch`` gives a part, ``dtype_of`` says
how a key is to be stored. Tensors are written part by part as they come; the folder appears when all of it is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dsv4c.config import ModelConfig
from dsv4c.config_layouts import write_hf, write_released
from dsv4c.errors import WeightsError
from dsv4c.weights.keymap import WRITABLE, Entry, Layout, Part, Storage, entries, named_layout
from dsv4c.weights.quant import encode_fp4, encode_fp8, fp4_scale_shape, fp8_scale_shape
from dsv4c.weights.shards import MAX_SHARD_BYTES, Planned, ShardWriter, new_folder

StoreAs = torch.dtype | Literal["keep", "released"]
Progress = Callable[[int, int], None]  # bytes written, bytes in all

# Published folders hold the Hugging Face settings at the top, whatever their tensors are called.
_CONFIGS: dict[Layout, dict[str, Callable[[ModelConfig], dict[str, Any]]]] = {
    "hf": {"config.json": write_hf},
    "released": {"config.json": write_hf, "inference/config.json": write_released},
    "dsv4c": {"config.json": ModelConfig.to_dict},
}
_QUANTISED = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Encoding:
    """How a quantised tensor is stored: what of its shape is left, its dtype, the shape of its scales."""

    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    dtype: torch.dtype
    inputs_per_code: int
    scale_shape: Callable[[tuple[int, ...]], tuple[int, ...]]


ENCODINGS: dict[Storage, Encoding] = {
    "fp8": Encoding(encode_fp8, torch.float8_e4m3fn, 1, fp8_scale_shape),
    "fp4": Encoding(encode_fp4, torch.int8, 2, fp4_scale_shape),
}


def stored_dtype(entry: Entry, store_as: StoreAs, kept: Callable[[Entry], torch.dtype]) -> torch.dtype:
    """The dtype of an unquantised key: as it is, or the specification's table with ``store_as`` for its bf16."""
    if entry.storage == "int64":
        return torch.int64
    if store_as == "keep":
        return kept(entry)
    if entry.storage == "fp32":
        return torch.float32
    return store_as if isinstance(store_as, torch.dtype) else torch.bfloat16


def plan(config: ModelConfig, layout: Layout, store_as: StoreAs, kept: Callable[[Entry], torch.dtype]) -> list[Planned]:
    """Every tensor that a folder will hold, scales included, in order."""
    out: list[Planned] = []
    for entry in entries(config, layout):
        code = ENCODINGS.get(entry.storage) if store_as == "released" else None
        if code is None:
            out.append(Planned(entry.key, entry.shape, stored_dtype(entry, store_as, kept)))
            continue
        packed = (*entry.shape[:-1], entry.shape[-1] // code.inputs_per_code)
        out.append(Planned(entry.key, packed, code.dtype))
        out.append(Planned(_scale_name(entry.key), code.scale_shape(entry.shape), torch.float8_e8m0fnu))
    return out


def write(
    folder: str | Path,
    config: ModelConfig,
    layout: str,
    fetch: Callable[[Part], Tensor],
    kept: Callable[[Entry], torch.dtype],
    *,
    store_as: StoreAs = "keep",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write every key of ``layout``, the index and the config. An error leaves nothing and has replaced nothing."""
    known = named_layout(layout, WRITABLE)
    _check_dtype(known, store_as)
    planned = plan(config, known, store_as, kept)
    total, done = sum(p.bytes for p in planned), 0
    with new_folder(folder, overwrite=overwrite) as work:
        writer = ShardWriter(work, planned, max_shard_bytes)
        for entry in entries(config, known):
            for key, piece in _pieces(entry, store_as, fetch):
                done += writer.write(key, piece)
                if progress is not None:
                    progress(done, total)
        writer.close()
        for name, spelled in _CONFIGS[known].items():
            (work / name).parent.mkdir(exist_ok=True)
            settings = spelled(config) | (_QUANTISED if store_as == "released" and spelled is write_hf else {})
            (work / name).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _pieces(entry: Entry, store_as: StoreAs, fetch: Callable[[Part], Tensor]) -> Iterable[tuple[str, Tensor]]:
    code = ENCODINGS.get(entry.storage) if store_as == "released" else None
    if code is None:
        return ((entry.key, fetch(part)) for part in entry.parts)
    (part,) = entry.parts  # the released layout has one key for each part
    try:
        codes, scale = code.encode(fetch(part))
    except WeightsError as error:
        raise WeightsError(error.what, where=entry.key, allowed=error.allowed, do=error.do) from None
    return [(entry.key, codes), (_scale_name(entry.key), scale)]


def _scale_name(key: str) -> str:
    return key.removesuffix(".weight") + ".scale"


def _check_dtype(layout: Layout, store_as: StoreAs) -> None:
    if store_as == "released" and layout != "released":
        raise WeightsError(
            f"fp8 and FP4 tensors cannot be stored in the {layout} layout",
            where="dtype",
            allowed="dtype 'released' with the released layout alone",
            do="choose layout 'released', or store as bf16",
        )
    if store_as not in ("keep", "released", *_FLOATS):
        names = ", ".join(str(d) for d in _FLOATS)
        raise WeightsError(
            f"weights cannot be stored as {store_as!r}", where="dtype", allowed=f"{names}, 'released'", do="choose one"
        )
