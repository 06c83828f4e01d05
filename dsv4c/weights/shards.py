"""Writing a weight folder as a stream: no shard is ever held in memory, and no half-written folder ever appears.

The last step of saving and converting.  What will be written is planned first (:class:`Planned`), so that every header
can be written before the first tensor; a tensor may then arrive in pieces, in the order of its memory.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from dsv4c.errors import WeightsError
from dsv4c.weights.stream import DTYPES, INDEX

MAX_SHARD_BYTES = 5 * 10**9
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OURS = ("config.json", "inference", INDEX)


@dataclass(frozen=True)
class Planned:
    """One tensor to come."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """Writes planned tensors, in their order, into safetensors files of at most ``max_shard_bytes`` (or one tensor)
    each.
    """

    def __init__(self, folder: Path, plan: list[Planned], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        if max_shard_bytes < 1:
            what = f"max_shard_bytes is {max_shard_bytes}"
            raise WeightsError(what, where="max_shard_bytes", allowed="at least 1", do="give a size in bytes")
        self.folder = folder
        self.plan = plan
        self.shards = _shards(plan, max_shard_bytes)
        self._names = [_file_name(i, len(self.shards)) for i in range(len(self.shards))]
        self._first = {shard[0].key: i for i, shard in enumerate(self.shards)}
        self._position = 0  # in the plan
        self._left = plan[0].bytes if plan else 0
        self._file: IO[bytes] | None = None

    def write(self, key: str, piece: Tensor) -> int:
        """The next piece of the tensor ``key``, in the order of its memory; returns the bytes written."""
        planned = self.plan[self._position]
        data = piece.detach().to(device="cpu", dtype=planned.dtype).contiguous().reshape(-1).view(torch.uint8)
        if key != planned.key or data.numel() > self._left:
            raise RuntimeError(f"{key} ({data.numel()} bytes) came where {self._left} bytes of {planned.key} were planned")
        if self._left == planned.bytes and key in self._first:
            self._begin(self._first[key])
        assert self._file is not None
        self._file.write(data.numpy().data)
        self._left -= data.numel()
        if not self._left and self._position + 1 < len(self.plan):
            self._position += 1
            self._left = self.plan[self._position].bytes
        return data.numel()

    def close(self) -> None:
        """Finish the last file and write the index where there are several."""
        if self._left or self._position + 1 < len(self.plan):
            raise RuntimeError(f"{self.plan[self._position].key} is not complete")
        self._end()
        if len(self.shards) > 1:
            where = {t.key: name for shard, name in zip(self.shards, self._names, strict=True) for t in shard}
            index = {"metadata": {"total_size": sum(t.bytes for t in self.plan)}, "weight_map": where}
            (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def _begin(self, shard: int) -> None:
        self._end()
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for t in self.shards[shard]:
            header[t.key] = {"dtype": _NAMES[t.dtype], "shape": t.shape, "data_offsets": [offset, offset + t.bytes]}
            offset += t.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
        self._file = (self.folder / self._names[shard]).open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _end(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


@contextmanager
def new_folder(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder beside ``target`` that takes its place when the block ends without an error, and vanishes otherwise.

    A target that holds anything is refused; with ``overwrite`` it is replaced if it holds nothing but weights and
    config.
    """
    final = Path(target)
    _refuse_to_overwrite(final, overwrite)
    final.parent.mkdir(parents=True, exist_ok=True)
    work = final.parent / f".{final.name}.{uuid.uuid4().hex[:8]}.partial"
    work.mkdir()
    try:
        yield work
        old = work.with_suffix(".replaced")
        if final.exists():
            final.rename(old)
        work.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refuse_to_overwrite(final: Path, overwrite: bool) -> None:
    if not final.exists():
        return
    if not final.is_dir():
        raise WeightsError("this is a file, not a folder", where=str(final), allowed="a new folder", do="give another name")
    held = sorted(p.name for p in final.iterdir())
    others = [name for name in held if name not in _OURS and not name.endswith(".safetensors")]
    if held and not overwrite:
        raise WeightsError(
            f"the folder is not empty: {', '.join(held[:3])}{' ...' if len(held) > 3 else ''}",
            where=str(final),
            allowed="a new or an empty folder",
            do="give another folder, or overwrite=True (--overwrite) to replace the weights there",
        )
    if others:
        raise WeightsError(
            f"the folder holds more than weights: {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}",
            where=str(final),
            allowed="to be replaced: config.json, *.safetensors and their index",
            do="move these files away first; nothing was written",
        )


def _shards(plan: list[Planned], limit: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = []
    size = 0
    for planned in plan:
        if not shards or size + planned.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(planned)
        size += planned.bytes
    return shards


def _file_name(i: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
