"""Source files of a training corpus: which files belong to it, and the hash of their content.

First stop in the way of the data::

    paths ─ sources.py ─ files ─ documents.py ─ pieces ─ tokenizer.py, tokens.py ─ TokenCorpus ─ data.py ─ batches

Folders are read recursively in sorted order; hidden files and folders below them, links to folders, and files of any
other suffix than ``SUFFIXES`` are skipped. A path given twice is read twice. ``.json`` is not a text suffix on
purpose: in a folder of training text it is nearly always metadata, and a file of one object per line that is called
``.json`` has to be renamed before it is read as such.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from dsv4c.errors import DataError

PROSE = {".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml"}
CODE = {
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".hip",
    ".js",
    ".ts",
    ".java",
    ".go",
    ".rs",
    ".sh",
    ".sql",
}
TABLES = {".csv", ".tsv", ".toml", ".yaml", ".yml", ".ini", ".cfg"}
LINES_SUFFIX = ".jsonl"
SUFFIXES = frozenset(PROSE | CODE | TABLES | {LINES_SUFFIX})

# Folders below the standard library that are not the library: installed packages, and tests, some of them not UTF-8.
STDLIB_SKIP = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Source:
    """One file of the corpus as it was when hashed: BLAKE2b ``digest`` (hex) of its bytes, and their number."""

    path: Path
    digest: str
    size: int

    @property
    def is_lines(self) -> bool:
        return self.path.suffix.lower() == LINES_SUFFIX


def find_sources(
    paths: str | Path | Sequence[str | Path] | None, advance: Callable[[int], None] = lambda _: None
) -> list[Source]:
    """The files of the corpus in reading order, hashed; the standard library's sources when ``paths`` is None or empty.

    ``advance`` is told of every number of bytes that has been hashed. Raises DataError for a path that does not exist,
    cannot be read or has an unsupported suffix, and for a folder that holds nothing to read.
    """
    if isinstance(paths, (str, Path)):
        paths = [paths]
    files = [file for path in paths for file in _files_of(path)] if paths else _stdlib_files()
    sources = []
    for file in files:
        digest = hashlib.blake2b(digest_size=32)
        size = 0
        with reading(file) as handle:
            while block := handle.read(BLOCK_BYTES):
                digest.update(block)
                size += len(block)
                advance(len(block))
        sources.append(Source(file, digest.hexdigest(), size))
    return sources


def fingerprint(sources: Sequence[Source], text_field: str) -> str:
    """Hash (hex) of what the documents are: the content of every file in order, how it is read, never where it lies."""
    digest = hashlib.blake2b(digest_size=32)
    for source in sources:
        read_as = f"lines:{text_field}" if source.is_lines else "text"
        digest.update(f"{source.digest} {read_as}\n".encode())
    return digest.hexdigest()


def _files_of(path: str | Path) -> list[Path]:
    if not str(path):
        raise DataError("a data path is empty", allowed="a file or a folder", do="remove it, or name what it should be")
    path = Path(path).expanduser()
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise DataError(
            "data path does not exist", where=str(path), allowed="an existing file or folder", do="correct the path"
        ) from None
    except (OSError, RuntimeError) as error:
        _unreadable(path, error)
    if stat.S_ISDIR(mode):
        return _files_below(path)
    if not stat.S_ISREG(mode):
        raise DataError(
            "data path is neither a file nor a folder",
            where=str(path),
            allowed="a regular file or a folder",
            do="save it to a file",
        )
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(
            f'file has the suffix "{path.suffix}", which is not read' if path.suffix else "file has no suffix",
            where=str(path),
            allowed=" ".join(sorted(SUFFIXES)),
            do="rename it: .txt for text, .jsonl for one JSON object per line",
        )
    return [path]


def _files_below(folder: Path) -> list[Path]:
    kept, skipped = [], set()
    for file in _walk(folder):
        suffix = file.suffix.lower()
        # A pipe or a device would block; a broken link is kept, and reported when it is opened.
        if suffix in SUFFIXES and (file.is_file() or not file.exists()):
            kept.append(file)
        else:
            skipped.add(suffix or file.name)
    if not kept:
        found = "found only " + " ".join(sorted(skipped)[:8]) if skipped else "it is empty"
        raise DataError(
            f"folder holds no file that can be read as text ({found})",
            where=str(folder),
            allowed="files with these suffixes, not hidden: " + " ".join(sorted(SUFFIXES)),
            do="name another folder, or give the files one of these suffixes",
        )
    return kept


def _stdlib_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _walk(folder, skip=STDLIB_SKIP) if file.suffix == ".py" and file.is_file()]
    if not files:
        raise DataError(
            "this Python has no standard library sources to train on",
            where=str(folder),
            allowed="a Python whose library lies on disk as .py files",
            do="name a text file or a folder as data",
        )
    return files


def _walk(folder: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Every file below the folder that is not hidden, sorted by its path relative to it."""

    def stop(error: OSError) -> NoReturn:
        _unreadable(Path(error.filename or folder), error)

    found = []
    for parent, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as handle:
            yield handle
    except OSError as error:
        _unreadable(path, error)


def _unreadable(path: Path, error: OSError | RuntimeError) -> NoReturn:
    reason = getattr(error, "strerror", None) or str(error)
    raise DataError(
        f"cannot be read: {reason}",
        where=str(path),
        allowed="a file that this user may read",
        do="correct its permissions or its link",
    ) from error
