"""Documents of a training corpus, read from its source files as pieces of bytes.

In the way of the data between ``sources.py``, which finds and hashes the files, and ``tokens.py``, which has the pieces
tokenised.
A text file is one document, and so is one line of a ``.jsonl`` file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dsv4c.errors import DataError
from dsv4c.train.sources import Source, reading

# A longer document is read and tokenised in several pieces, so that a corpus in one file needs no memory of its size.
PIECE_BYTES = 4 << 20


class Piece(NamedTuple):
    """Part of a document, ``data`` starting at ``line`` (from 1) of ``path``; ``last`` closes the document.

    ``consumed`` counts the bytes of the file that were read for it, which for a JSON line is more than its text.
    """

    data: bytes
    path: Path
    line: int
    last: bool
    consumed: int


def read_pieces(source: Source, text_field: str) -> Iterator[Piece]:
    """The documents of one file, in order, as pieces of at most ``PIECE_BYTES`` (a JSON line is always one piece).

    Raises DataError with file and line for a JSON line that cannot be used, and when the file has changed since hashed.
    """
    digest = hashlib.blake2b(digest_size=32)
    with reading(source.path) as handle:
        yield from (
            _json_lines(handle, source, text_field, digest) if source.is_lines else _text(handle, source, digest)
        )
    if digest.hexdigest() != source.digest:
        raise DataError(
            "file changed while it was being tokenised",
            where=str(source.path),
            allowed="files that stay as they are from start to end of the tokenising",
            do="wait until the file has been written completely, then start again",
        )


def _text(handle: BinaryIO, source: Source, digest: hashlib.blake2b) -> Iterator[Piece]:
    line, carry = 1, b""
    while True:
        fresh = handle.read(PIECE_BYTES - len(carry))
        digest.update(fresh)
        buffer = carry + fresh
        if len(buffer) < PIECE_BYTES:
            yield Piece(buffer, source.path, line, True, len(buffer))
            return
        at = _cut(buffer)
        yield Piece(buffer[:at], source.path, line, False, at)
        line += buffer.count(b"\n", 0, at)
        carry = buffer[at:]


def _cut(buffer: bytes) -> int:
    """Where a piece may end: after a newline, else before a space, else between two characters."""
    newline = buffer.rfind(b"\n")
    if newline >= 0:
        return newline + 1
    space = buffer.rfind(b" ")
    if space > 0:
        return space
    at = len(buffer) - 1
    while at > max(1, len(buffer) - 4) and buffer[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _json_lines(handle: BinaryIO, source: Source, text_field: str, digest: hashlib.blake2b) -> Iterator[Piece]:
    for number, raw in enumerate(handle, 1):
        digest.update(raw)
        if not raw.strip():
            continue
        text = _text_of(raw, f"{source.path}:{number}", text_field, first=number == 1)
        yield Piece(text, source.path, number, True, len(raw))


def _text_of(raw: bytes, where: str, text_field: str, first: bool) -> bytes:
    """The UTF-8 text of one JSON line; ``first`` allows the byte order mark that some editors put before a file."""
    shape = f'one JSON object per line with its text in "{text_field}"'
    try:
        record = json.loads(raw.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"line is not UTF-8: {error.reason} at byte {error.start}",
            where=where,
            allowed=shape,
            do="re-encode the file as UTF-8",
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"line is not JSON: {error.msg} at column {error.colno}",
            where=where,
            allowed=shape,
            do="correct or remove the line; plain text belongs in a .txt file",
        ) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets thousands deep
        raise DataError(
            f"line cannot be read as JSON: {error}", where=where, allowed=shape, do="remove the line"
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"line is a JSON {_json_name(record)}, not an object",
            where=where,
            allowed=shape,
            do=f'write {{"{text_field}": "..."}} on each line',
        )
    if text_field not in record:
        names = ", ".join(f'"{name}"' for name in record) or "none"
        raise DataError(
            f'line has no field "{text_field}"',
            where=where,
            allowed=f"the fields that this line has: {names}",
            do="set the text field to the one that holds the text, or remove the line",
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(
            f'field "{text_field}" is a JSON {_json_name(text)}, not a string',
            where=where,
            allowed=shape,
            do="set the text field to one that holds a string, or remove the line",
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f'field "{text_field}" holds half of a surrogate pair at character {error.start}',
            where=where,
            allowed="text that UTF-8 can express",
            do="write both halves of the pair, or remove the character",
        ) from None


def _json_name(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
