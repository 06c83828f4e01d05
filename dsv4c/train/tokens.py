"""Tokens of a training corpus: the memory-mapped cache that each corpus is tokenised into once.

In the way of the data between ``documents.py`` and ``data.py``: takes pieces of documents, has a tokenizer encode them,
and gives a ``TokenCorpus``, one long array in which every document is closed by the end-of-document id.

A cache file is named by a hash of content alone: the bytes of every source, the tokenizer, the version of the format.
Layout, little-endian: 8 bytes of magic, a JSON header padded to ``HEADER_BYTES``, tokens (uint16 or uint32), padding to
8 bytes, offsets (int64). It is written under another name and renamed when complete: a killed writer leaves no cache.
On opening, header, size and checksum are verified, and a file that fails is written anew with a notice.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dsv4c.errors import DataError
from dsv4c.train.documents import PIECE_BYTES, Piece, read_pieces
from dsv4c.train.sources import Source, find_sources, fingerprint
from dsv4c.train.tokenizer import TokenArray, Tokenizer

MAGIC = b"dsv4tok\n"
FORMAT_VERSION = 1  # also stands for PIECE_BYTES and the rules of sources.py, which decide the tokens too
HEADER_BYTES = 1024
PROGRESS_AFTER_SECONDS = 2.0
STALE_AFTER_SECONDS = 3600.0


@dataclass(frozen=True)
class TokenCorpus:
    """A tokenised corpus. Document d is ``tokens[offsets[d] : offsets[d + 1]]``: its tokens, one at least, and the eod.

    tokens: [T] uint16 or uint32, memory-mapped. offsets: [N + 1] int64. fingerprint: hash of the sources alone.
    """

    tokens: TokenArray
    offsets: npt.NDArray[np.int64]
    tokenizer: Tokenizer
    fingerprint: str
    path: Path | None = None


def open_corpus(
    paths: str | Path | Sequence[str | Path] | None,
    *,
    tokenizer: Tokenizer,
    cache_dir: str | Path | None = None,
    text_field: str = "text",
) -> TokenCorpus:
    """The tokens of the corpus, from the cache when its content has been tokenised before.

    ``cache_dir`` defaults to ``$XDG_CACHE_HOME/dsv4c/tokens``. Several processes may open one corpus at the same time.
    Raises DataError for wrong sources, a corpus without a token, and a cache folder that cannot be written.
    """
    folder = Path(cache_dir).expanduser() if cache_dir is not None else _default_cache_dir()
    with _Progress("reading sources", None) as progress:
        sources = find_sources(paths, progress.advance)
    corpus = fingerprint(sources, text_field)
    key = hashlib.blake2b(f"{FORMAT_VERSION} {corpus} {tokenizer.fingerprint}".encode(), digest_size=16).hexdigest()
    file = folder / f"{key}.tokens"
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    expected = {"version": FORMAT_VERSION, "key": key, "dtype": dtype, "eod": tokenizer.eod}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = _open_cache(file, expected) if file.exists() else None
        if found is None:
            _write_cache(file, expected, tokenizer, sources, text_field)
            found = _open_cache(file, expected)
    except OSError as error:
        raise DataError(
            f"token cache cannot be written or read: {error.strerror or error}",
            where=str(error.filename or file),
            allowed="a folder that this user may write to, with room for two to four bytes per token",
            do="make room, or name another cache folder",
        ) from error
    if found is None:
        raise DataError(
            "token cache is damaged directly after it was written",
            where=str(file),
            allowed="a disk that gives back what was written to it",
            do="name a cache folder on another disk",
        )
    return TokenCorpus(*found, tokenizer=tokenizer, fingerprint=corpus, path=file)


def _default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dsv4c" / "tokens"


def _open_cache(file: Path, expected: dict[str, object]) -> tuple[TokenArray, npt.NDArray[np.int64]] | None:
    """Tokens and offsets of a cache file, or None after a notice when it is not what its writer left."""
    size = file.stat().st_size
    raw = np.memmap(file, dtype=np.uint8, mode="r") if size else np.zeros(0, np.uint8)
    reason = "it is shorter than its header"
    if size >= HEADER_BYTES:
        try:
            magic, header = bytes(raw[: len(MAGIC)]), json.loads(bytes(raw[len(MAGIC) : HEADER_BYTES]))
            count, documents, checksum = int(header["tokens"]), int(header["documents"]), int(header["checksum"])
        except (ValueError, KeyError, TypeError, OverflowError):
            reason = "its header cannot be read"
        else:
            itemsize = np.dtype(str(expected["dtype"])).itemsize
            end = HEADER_BYTES + count * itemsize
            start = end + -end % 8
            if magic != MAGIC or any(header.get(name) != value for name, value in expected.items()):
                reason = "its header is of another format or corpus"
            elif count < 0 or documents < 0 or size != start + 8 * (documents + 1):
                reason = f"it has {size} bytes, its header says otherwise"
            elif _checksum(raw) != checksum:
                reason = "its content does not match its checksum"
            else:
                tokens, offsets = raw[HEADER_BYTES:end].view(str(expected["dtype"])), raw[start:].view("<i8")
                if offsets[-1] == len(tokens):
                    return tokens, offsets
                reason = "its documents do not add up to its tokens"
    notice = f"token cache {file} is damaged ({reason}); tokenising again"
    Console(stderr=True, soft_wrap=True).print(notice, markup=False)
    return None


def _checksum(raw: npt.NDArray[np.uint8]) -> int:
    checksum = 0
    for start in range(HEADER_BYTES, len(raw), PIECE_BYTES):
        checksum = zlib.crc32(raw[start : start + PIECE_BYTES].data, checksum)
    return checksum


def _write_cache(
    file: Path, expected: dict[str, object], tokenizer: Tokenizer, sources: Sequence[Source], text_field: str
) -> None:
    _remove_stale(file)
    partial = file.with_name(f"{file.name}.{os.getpid()}.{time.time_ns()}.partial")
    try:
        with partial.open("wb") as handle:
            handle.write(bytes(HEADER_BYTES))
            header = expected | _write_tokens(handle, str(expected["dtype"]), tokenizer, sources, text_field)
            handle.seek(0)
            handle.write((MAGIC + json.dumps(header).encode()).ljust(HEADER_BYTES))
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _write_tokens(
    handle: BinaryIO, dtype: str, tokenizer: Tokenizer, sources: Sequence[Source], text_field: str
) -> dict[str, int]:
    """Writes tokens, padding and offsets, and returns what the header says of them. Holds one batch and the offsets."""
    offsets = array("q", [0])
    count = checksum = 0
    eod = np.array([tokenizer.eod], dtype=dtype).tobytes()

    def write(data: bytes) -> None:
        nonlocal checksum
        checksum = zlib.crc32(data, checksum)
        handle.write(data)

    with _Progress("tokenising", sum(source.size for source in sources)) as progress:
        for pieces in _batches(piece for source in sources for piece in read_pieces(source, text_field)):
            for piece, ids in zip(pieces, tokenizer.encode_pieces(pieces), strict=True):
                write(ids.astype(dtype, copy=False).tobytes())
                count += len(ids)
                if piece.last and count > offsets[-1]:  # a document without a token would be an end without a beginning
                    write(eod)
                    count += 1
                    offsets.append(count)
                progress.advance(piece.consumed)
    if not count:
        raise DataError(
            f"corpus holds no token: {len(sources)} files, all of them empty",
            where=", ".join(str(source.path) for source in sources[:3]) + (", ..." if len(sources) > 3 else ""),
            allowed="at least one document with at least one token",
            do="name files that hold text",
        )
    write(bytes(-handle.tell() % 8))
    write(np.asarray(offsets, dtype="<i8").tobytes())
    return {"tokens": count, "documents": len(offsets) - 1, "checksum": checksum}


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups of about ``PIECE_BYTES``, because ``tokenizers`` uses all cores on a batch and one on a text."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.data)
        if size >= PIECE_BYTES or len(batch) >= 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _remove_stale(file: Path) -> None:
    """Removes what killed writers of this cache left; a living one touches its file more often than once an hour."""
    for partial in file.parent.glob(f"{file.name}.*.partial"):
        try:
            if time.time() - partial.stat().st_mtime > STALE_AFTER_SECONDS:
                partial.unlink()
        except FileNotFoundError:
            pass  # another process was faster


class _Progress:
    """A progress bar on stderr that only appears when the work takes longer than ``PROGRESS_AFTER_SECONDS``."""

    def __init__(self, label: str, total: int | None) -> None:
        self._label, self._total, self._done = label, total, 0
        self._started = time.monotonic()
        self._shown: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> _Progress:
        return self

    def advance(self, size: int) -> None:
        self._done += size
        if self._shown is None and time.monotonic() - self._started >= PROGRESS_AFTER_SECONDS:
            rate = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
            bar = Progress(TextColumn("{task.description}"), BarColumn(), *rate, console=Console(stderr=True))
            self._shown = bar, bar.add_task(self._label, total=self._total)
            bar.start()
        if self._shown is not None:
            self._shown[0].update(self._shown[1], completed=self._done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown[0].stop()
