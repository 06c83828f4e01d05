"""What a compiled graph depends on besides itself: our operators, our passes, and how they were set.

Inductor keeps compiled graphs under a key that holds no source of ours: a changed backward formula or a changed rule would
find the old code (it hashes neither).  So the identity of the passes covers every source file of ``ops`` and ``passes``.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUFFIXES = (".py", ".cpp", ".h")


@cache
def sources(root: Path = HERE.parent) -> str:
    """A hash of the files of ``ops`` and ``passes`` beside each other under ``root``, names and contents."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in ("ops", "passes"):
        base = root / folder
        for file in sorted(f for f in base.rglob("*") if f.suffix in SUFFIXES and f.is_file()):
            digest.update(f"{folder}/{file.relative_to(base).as_posix()}\0".encode())
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()


def identity(*facts: object) -> str:
    """Under which a graph is cached that these passes, with these options and names, proved and rewrote."""
    return hashlib.blake2b(repr((sources(), facts)).encode(), digest_size=16).hexdigest()
