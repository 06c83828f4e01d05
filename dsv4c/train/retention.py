"""Which checkpoints a folder holds, and how one appears in it or leaves it without a moment in which none is usable.

Names: ``step-00001234`` is finished; ``step-00001234.replaced`` was finished and is giving way to a new one of the
same step; ``*.tmp-PID`` is being written or removed by that process, and is never taken for a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from dsv4c.errors import Dsv4Error
from dsv4c.train import manifest

FINISHED = re.compile(r"step-(\d{8,})(\.replaced)?")
TEMPORARY = re.compile(r"step-\d{8,}(?:\.replaced)?\.tmp-(\d+)")


def list_checkpoints(dir: str | Path) -> list[Path]:
    """Finished checkpoints of a folder, oldest first, damaged ones included; empty if there is no such folder."""
    found: dict[int, Path] = {}
    for path in sorted(Path(dir).glob("step-*"), key=lambda p: len(p.name), reverse=True):
        if (match := FINISHED.fullmatch(path.name)) and path.is_dir():
            found[int(match[1])] = path  # the plain name comes last and wins over one that was being replaced
    return [found[step] for step in sorted(found)]


def latest_checkpoint(dir: str | Path) -> Path | None:
    """The finished checkpoint of the highest step, or None.  A damaged one is not passed over: loading it says so."""
    found = list_checkpoints(dir)
    return found[-1] if found else None


def is_good(path: Path, *, content: bool) -> bool:
    """Whether the checkpoint agrees with its manifest; without ``content`` only the sizes of files are compared."""
    try:
        manifest.verify(path, content=content)
    except (Dsv4Error, OSError):
        return False
    return True


def publish(temporary: Path, target: Path) -> None:
    """Renames into place.  One of the same step stays findable as ``.replaced`` until the new one has its name."""
    replaced = target.with_name(f"{target.name}.replaced")
    if target.exists():
        if replaced.exists():
            _remove(replaced)
        os.rename(target, replaced)
    os.rename(temporary, target)
    manifest.fsync_folder(target.parent)
    if replaced.exists():
        _remove(replaced)


def prune(root: Path, keep: int, newest: Path) -> None:
    """Removes what is older than the ``keep`` newest good checkpoints; damaged newer ones stay to be looked at."""
    found = list_checkpoints(root)
    good = [p for p in found if p == newest or is_good(p, content=False)]
    kept = {newest, *good[-keep:]}
    oldest = min(found.index(p) for p in kept)
    for path in found[:oldest]:
        _remove(path)


def _remove(path: Path) -> None:
    """Renames first, so that a removal cut short leaves no folder that looks finished."""
    doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_stale(root: Path) -> None:
    """Removes what killed writers of this machine left behind."""
    for path in root.glob("step-*.tmp-*"):
        if (match := TEMPORARY.fullmatch(path.name)) and (int(match[1]) == os.getpid() or not _alive(int(match[1]))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
