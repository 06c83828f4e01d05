"""Reading tensors of a weight folder one at a time, decoded, without ever holding a second one.

Between the safetensors files and whoever needs a tensor (loading, checking, converting): :class:`Source` knows every
key's shape and stored dtype from the file headers alone, and :meth:`Source.read` gives one piece in floating point.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4c.errors import WeightsError
from dsv4c.weights.keymap import MARKS, MISSPELLED, Layout, Select
from dsv4c.weights.quant import decode_fp4, decode_fp8

INDEX = "model.safetensors.index.json"
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
FP4_CODES = frozenset({"I8", "U8"})
FP8_CODES = frozenset({"F8_E4M3"})
EXACT_SCALES = frozenset({"F8_E8M0", "U8"})  # powers of two: what they scale fits into bf16 without rounding
_OPEN_FILES = 4


@dataclass(frozen=True)
class Header:
    """What a file says of a tensor before the tensor is read."""

    dtype: str  # safetensors' name for it
    shape: tuple[int, ...]
    file: str
    stored: str  # the key in the file, where MISSPELLED corrects it


class Source:
    """The tensors of a folder of safetensors files, with or without an index, or of one such file.

    Raises :class:`dsv4c.errors.WeightsError` for a folder without weights, files that the index names and that are not
    there, damaged files, and one key in two files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = self.path.parent if self.path.is_file() else self.path
        self._open: OrderedDict[str, Any] = OrderedDict()
        self.headers: dict[str, Header] = {}
        index = _read_index(self.folder / INDEX) if self.path.is_dir() else None
        names = sorted(set(index.values())) if index is not None else self._files()
        for name in names:
            self._read_headers(name, index)
        absent = sorted(set(index or ()) - {h.stored for h in self.headers.values()})
        if absent:
            raise WeightsError(
                f"{len(absent)} tensors stand in the index and in no file, the first is {absent[0]}",
                where=str(self.folder / INDEX),
                allowed="every tensor in the file that the index names",
                do="fetch the files again",
            )

    def __contains__(self, key: str) -> bool:
        return key in self.headers

    def scale_key(self, key: str) -> str | None:
        """The key of a quantised tensor's scales: ``X.scale`` of the release or Hugging Face's ``..._scale_inv``."""
        names = (key.removesuffix(".weight") + ".scale", key + "_scale_inv")
        return next((name for name in names if name in self.headers), None)

    def layout(self) -> Layout:
        """The layout that the keys are in. Raises WeightsError where they are in none, or in two."""
        found = [name for name, mark in MARKS.items() if any(re.fullmatch(mark, key) for key in self.headers)]
        if len(found) != 1:
            first = ", ".join(list(self.headers)[:3])
            raise WeightsError(
                f"the keys are in {'the layouts ' + ' and '.join(found) if found else 'no known layout'}",
                where=f"{self.path} ({len(self.headers)} tensors: {first} ...)",
                allowed="the released, the Hugging Face or the dsv4c layout, one in a folder",
                do="`dsv4c weights inspect` lists what is there",
            )
        return found[0]

    def read(self, key: str, select: Select = ()) -> Tensor:
        """``tensor[select]`` of a stored tensor: fp32 where it is quantised, else in its stored dtype.

        Reads the selected piece alone; of a stack of quantised experts the selected expert.
        """
        header = self.headers[key]
        scale = self.scale_key(key)
        try:
            if scale is None or header.dtype not in FP4_CODES | FP8_CODES:
                return self.raw(key, select)
            outer, inner = (select[:1], select[1:]) if len(header.shape) == 3 else ((), select)
            decode = decode_fp8 if header.dtype in FP8_CODES else decode_fp4
            values = decode(self.raw(key, outer), self.raw(scale, outer))
            return values[inner] if inner else values
        except WeightsError as error:
            raise WeightsError(error.what, where=f"{self._where(key)}", allowed=error.allowed, do=error.do) from None

    def raw(self, key: str, select: Select = ()) -> Tensor:
        """A stored tensor, or a piece of it, as it is."""
        file, name = self._file(self.headers[key].file), self.headers[key].stored
        try:
            tensor: Tensor = file.get_slice(name)[select] if select else file.get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(
                f"a tensor cannot be read: {error}", where=self._where(key), do="fetch the file again"
            ) from None
        return tensor

    def _where(self, key: str) -> str:
        return f"{key} in {self.folder / self.headers[key].file}"

    def _files(self) -> list[str]:
        files = [self.path.name] if self.path.is_file() else sorted(p.name for p in self.path.glob("*.safetensors"))
        if not files:
            raise WeightsError(
                "there are no weights here",
                where=str(self.path),
                allowed=f"a folder with *.safetensors files and, when there are several, {INDEX}",
                do="give the folder that holds the model",
            )
        return files

    def _file(self, name: str) -> Any:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        path = self.folder / name
        try:
            file = safe_open(str(path), framework="pt")
        except FileNotFoundError:
            what = "the index names a file that is not there"
            raise WeightsError(what, where=str(path), allowed="every file of the index", do="fetch it") from None
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"this is not a whole safetensors file: {error}",
                where=str(path),
                do="fetch it again: it is damaged or cut short",
            ) from None
        self._open[name] = file
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)
        return file

    def _read_headers(self, name: str, index: Mapping[str, str] | None) -> None:
        file = self._file(name)
        for stored in file.keys():  # noqa: SIM118 - not a dict
            if index is not None and index.get(stored) != name:
                continue  # a reader that follows the index never sees it
            key = _corrected(stored)
            if key in self.headers:
                raise WeightsError(
                    f"{key} is in two files: {self.headers[key].file} and {name}",
                    where=str(self.folder),
                    allowed="every tensor once, or an index that says which file counts",
                    do="weights that were split for parallel serving must be joined first",
                )
            piece = file.get_slice(stored)
            self.headers[key] = Header(piece.get_dtype(), tuple(piece.get_shape()), name, stored)


def _corrected(key: str) -> str:
    for pattern, right in MISSPELLED:
        key = re.sub(pattern, right, key)
    return key


def _read_index(path: Path) -> dict[str, str] | None:
    if not path.exists():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise WeightsError(
            f"the index cannot be read: {error!r}",
            where=str(path),
            allowed='{"weight_map": {key: file}}',
            do="fetch it again",
        ) from None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise WeightsError("the index has no weight_map of names", where=str(path), allowed='{"weight_map": {key: file}}')
    return weight_map
