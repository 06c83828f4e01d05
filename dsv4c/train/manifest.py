"""The manifest that makes a folder of files provably whole, and files that appear all at once or not at all.

`manifest.json` names every other file of the folder with its size and SHA-256, and carries a hash of itself.  It is
written last, so that a folder without one was never finished.  It guards against damage, not against an attacker:
the tensor index of a checkpoint is a pickle, and should be read only where the run itself is trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from dsv4c.errors import CheckpointError

FORMAT = 1
NAME = "manifest.json"


def versions() -> dict[str, str]:
    """Versions of whatever can change a result: Python, the machine, and the packages that compute."""
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in ("dsv4c", "torch", "numpy", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def fsync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, which syncing the files alone does not."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON so that ``path`` holds either what it held before or all of ``value``, whenever the power
    fails.

    Raises:
        ValueError: a NaN or an infinity in ``value``.
    """
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def seal(folder: Path, head: dict[str, Any]) -> None:
    """Syncs and hashes every file of ``folder``; writes the manifest: ``head``, format, versions, files, own hash."""
    files = {}
    for path in sorted(p for p in folder.iterdir() if p.name != NAME):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[path.name] = {"size": path.stat().st_size, "sha256": digest}
    manifest = {"format": FORMAT, **head, "versions": versions(), "files": files}
    write_json(folder / NAME, manifest | {"sha256": _own_hash(manifest)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of ``folder``, checked against its own hash; the files it names are not read.

    Raises:
        CheckpointError: no folder, no manifest, a damaged one, or one of a format that this version does not know.
    """
    path = folder / NAME
    if not folder.is_dir():
        raise CheckpointError("there is no such checkpoint", where=str(folder))
    if not path.is_file():
        raise CheckpointError("the checkpoint is damaged: its manifest is missing", where=str(path))
    try:
        manifest = json.loads(path.read_bytes())
        recorded = manifest.pop("sha256")
        version, actual = manifest["format"], _own_hash(manifest)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError("the checkpoint is damaged: its manifest cannot be read", where=str(path)) from error
    if recorded != actual:
        raise CheckpointError(
            f"the checkpoint is damaged: sha256 of its manifest is {actual}",
            where=str(path),
            allowed=f"sha256 {recorded}",
        )
    if version != FORMAT:
        raise CheckpointError(f"the checkpoint has format {version}", where=str(path), allowed=f"format {FORMAT}")
    return dict(manifest)


def verify(folder: Path, *, content: bool = True) -> dict[str, Any]:
    """The manifest of ``folder`` after comparing every file with it: size, and with ``content`` the SHA-256 too.

    Raises:
        CheckpointError: as `read_manifest`; a file that is missing, of another size or of another hash.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError("the checkpoint is damaged: a file is missing", where=str(path))
        size = path.stat().st_size
        if size != expected["size"]:
            raise CheckpointError(
                f"the checkpoint is damaged: a file has {size} bytes",
                where=str(path),
                allowed=f"{expected['size']} bytes",
            )
        if content:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != expected["sha256"]:
                raise CheckpointError(
                    f"the checkpoint is damaged: sha256 of a file is {digest}",
                    where=str(path),
                    allowed=f"sha256 {expected['sha256']}",
                )
    return manifest


def _own_hash(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
