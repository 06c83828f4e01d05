"""From one layout to another, folder to folder, without building a model.

Reads with :class:`dsv4c.weights.stream.Source` and writes with :mod:`dsv4c.weights.write`, one part at a time, so that
the memory needed is that of one expert's matrix or of the largest unstacked tensor, whatever the size of the model.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from dsv4c.config import ModelConfig
from dsv4c.config_layouts import read
from dsv4c.weights.check import CheckReport, check
from dsv4c.weights.keymap import Entry, Part
from dsv4c.weights.shards import MAX_SHARD_BYTES
from dsv4c.weights.stream import DTYPES, EXACT_SCALES, FP4_CODES, FP8_CODES, Source
from dsv4c.weights.write import Progress, StoreAs, write


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str,
    dtype: StoreAs = "keep",
    config: ModelConfig | None = None,
    without_mtp: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CheckReport:
    """Write the weights of folder ``src`` to folder ``dst`` in the layout ``to``; returns the comparison of ``src``.

    ``dtype`` ``"keep"`` loses nothing: floating-point tensors stay what they are, fp8 and FP4 become bf16 where their
    scales are powers of two (then bf16 holds every value) and fp32 otherwise. Else as ``dtype`` of
    :func:`dsv4c.weights.model_io.save_weights`. ``without_mtp`` leaves the MTP layer out, or does without it where
    ``src`` has none. Raises :class:`dsv4c.errors.WeightsError` before anything is written if ``src`` does not fit its
    config.
    """
    source = Source(src)
    settings = read(source.folder) if config is None else config
    if without_mtp:
        decoder = settings.compress_ratios[: settings.num_hidden_layers]
        settings = settings.replace(num_nextn_predict_layers=0, compress_ratios=decoder)
    report = check(source, settings, allow_unexpected=("mtp.*",) if without_mtp else ())
    report.raise_if_bad()

    def fetch(part: Part) -> Tensor:
        return source.read(*part.place(report.layout))

    def kept(entry: Entry) -> torch.dtype:
        keys = {part.place(report.layout)[0] for part in entry.parts}
        return functools.reduce(torch.promote_types, (lossless_dtype(source, key) for key in sorted(keys)))

    write(dst, settings, to, fetch, kept, store_as=dtype, max_shard_bytes=max_shard_bytes, overwrite=overwrite,
          progress=progress)  # fmt: skip
    return report


def lossless_dtype(source: Source, key: str) -> torch.dtype:
    """The narrowest dtype that holds every value of a stored tensor once it is decoded."""
    stored, scale = source.headers[key].dtype, source.scale_key(key)
    if stored in FP4_CODES | FP8_CODES:
        exact = scale is not None and source.headers[scale].dtype in EXACT_SCALES
        return torch.bfloat16 if exact else torch.float32
    return DTYPES[stored]
