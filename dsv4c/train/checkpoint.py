"""Training checkpoints: everything a run needs to continue bit for bit, written so that no moment of death loses the
last one.

A checkpoint is a folder ``step-00001234`` holding tensors (`torch.distributed.checkpoint`, hence also those of a
sharded model), ``rank-NNNNN.json`` for each process (optimizer settings, data position, random generators, extra)
and a manifest.  It is written as ``step-00001234.tmp-PID``, sealed, synced and renamed: a folder without ``.tmp`` in
its name is finished.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dsv4c.errors import CheckpointError
from dsv4c.train import manifest
from dsv4c.train.retention import is_good, latest_checkpoint, list_checkpoints, prune, publish, remove_stale
from dsv4c.train.state_tree import decode, encode, rng_state, set_rng_state

__all__ = ["latest_checkpoint", "list_checkpoints", "load_checkpoint", "save_checkpoint"]

_ABSENT = "(absent)"


def save_checkpoint(
    dir: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loader_state: dict[str, Any],
    extra: dict[str, Any],
    config: dict[str, Any],
    keep: int = 3,
) -> Path:
    """Writes ``dir/step-STEP`` and removes old checkpoints beyond the newest ``keep`` good ones.

    In a process group every rank calls this; rank 0 seals and renames.

    Args:
        step: optimizer steps done.
        loader_state, extra: what `dsv4c.train.state_tree` can keep exactly; each rank's own.
        config: JSON-like settings that a resumed run must share.
        keep: at least 1.  The one just written is never removed.

    Raises:
        CheckpointError: the checkpoint could not be written (a full disk): nothing of it is left, older ones are
            untouched.
    """
    if keep < 1 or step < 0:
        raise CheckpointError(f"cannot write a checkpoint of step {step} and keep {keep}", allowed="step >= 0, keep >= 1")
    root = Path(dir)
    target = root / f"step-{step:08d}"
    tensors = {f"model/{name}": t for name, t in _model_tensors(model).items()}
    trees = {
        "optim": optimizer.state_dict() if optimizer is not None else None,
        "loader_state": loader_state,
        "extra": extra,
        "rng": rng_state(),
    }
    own = {key: encode(tree, _tensor_path(key), tensors) for key, tree in trees.items()}
    head = {"step": step, "config": _json_like(config), "world_size": _world_size()}
    temporary = _from_rank_0(root / f"{target.name}.tmp-{os.getpid()}")
    try:
        if _rank() == 0:
            remove_stale(root)
            temporary.mkdir(parents=True)
        _barrier()
        with _one_process_is_meant():
            save(tensors, storage_writer=FileSystemWriter(temporary), no_dist=not _distributed())
        manifest.write_json(temporary / _rank_file(), own)
        _barrier()
        if _rank() == 0:
            manifest.seal(temporary, head)
            publish(temporary, target)
        _barrier()
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, (OSError, CheckpointException)):
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {_reason(error)}",
                where=str(target),
                do="free some space or choose another folder, then resume from the newest checkpoint",
            ) from error
        raise
    if _rank() == 0:
        prune(root, keep, newest=target)
    return target


def load_checkpoint(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Restores weights, buffers, optimizer and random generators bit for bit.

    Args:
        path: a ``step-*`` folder.
        config: the settings of the run that resumes; compared with those of the checkpoint when given.

    Returns:
        ``step``, ``loader_state``, ``extra``, ``config``.

    Raises:
        CheckpointError: before any tensor is touched: a damaged checkpoint (which file, which hash, which older
            checkpoint is whole), another configuration (which keys), another model (which tensors), another number
            of processes.
    """
    path = Path(path)
    head = _verified(path)
    if config is not None:
        _check_config(path, head["config"], config)
    if _world_size() != head["world_size"]:
        raise CheckpointError(
            f"the checkpoint was written by {head['world_size']} processes",
            where=str(path),
            allowed=f"{_world_size()}, as many as are running",
        )
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    own = _model_tensors(model)
    _check_model(path, stored, own)
    other = {
        key: _empty(info, own.get(key.split("/")[-2]))
        for key, info in stored.items()
        if isinstance(info, TensorStorageMetadata) and key.startswith(("optim/", f"{_rank_name()}/"))
    }
    if other:
        _read(other, reader)
    trees = {k: decode(v, other) for k, v in json.loads((path / _rank_file()).read_bytes()).items()}
    if optimizer is not None:
        if trees["optim"] is None:
            raise CheckpointError("the checkpoint has no optimizer state", where=str(path))
        optimizer.load_state_dict(trees["optim"])
    _read({f"model/{name}": t for name, t in own.items()}, reader)
    set_rng_state(trees["rng"])
    return {
        "step": head["step"],
        "loader_state": trees["loader_state"],
        "extra": trees["extra"],
        "config": head["config"],
    }


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name.replace("_orig_mod.", ""): t.detach() for name, t in state.items() if isinstance(t, Tensor)}


def _read(tensors: dict[str, Tensor], reader: FileSystemReader) -> None:
    with _one_process_is_meant():
        load(tensors, storage_reader=reader, no_dist=not _distributed())


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Silences torch's notice that no process group exists: a run on one process means it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _tensor_path(key: str) -> str:
    return key if key == "optim" else f"{_rank_name()}/{key}"  # optimizer states are the model's, the rest is the rank's


def _empty(info: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    """Room for a stored tensor: laid out like its parameter (device, shards) where it has the parameter's shape."""
    if like is not None and like.shape == info.size:
        return torch.empty_like(like, dtype=info.properties.dtype)
    return torch.empty(info.size, dtype=info.properties.dtype)


def _verified(path: Path) -> dict[str, Any]:
    try:
        return manifest.verify(path)
    except CheckpointError as error:
        usable = next((p for p in reversed(list_checkpoints(path.parent)) if p != path and is_good(p, content=True)), None)
        do = f"resume from {usable}, which is whole" if usable else "no other checkpoint in this folder is whole: start anew"
        raise CheckpointError(error.what, where=error.where, allowed=error.allowed, do=do) from error


def _json_like(config: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps(config, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the configuration cannot be written as JSON: {error}") from error


def _flat(config: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_config(path: Path, saved: dict[str, Any], given: dict[str, Any]) -> None:
    old, new = dict(_flat(saved)), dict(_flat(_json_like(given)))
    differing = [k for k in sorted(old.keys() | new.keys()) if old.get(k, _ABSENT) != new.get(k, _ABSENT)]
    if differing:
        pairs = (f"{k} is {old.get(k, _ABSENT)!r} there and {new.get(k, _ABSENT)!r} here" for k in differing)
        raise CheckpointError(
            "the checkpoint belongs to another configuration: " + "; ".join(pairs),
            where=str(path),
            do="resume with the settings of the checkpoint, or start a new run in another folder",
        )


def _check_model(path: Path, stored: dict[str, Any], own: dict[str, Tensor]) -> None:
    saved = {k.removeprefix("model/"): v for k, v in stored.items() if k.startswith("model/")}
    problems = [f"{name} is not in the checkpoint" for name in sorted(own.keys() - saved.keys())]
    problems += [f"{name} is not in the model" for name in sorted(saved.keys() - own.keys())]
    for name in sorted(own.keys() & saved.keys()):
        there = f"{list(saved[name].size)} {saved[name].properties.dtype}"
        here = f"{list(own[name].shape)} {own[name].dtype}"
        if there != here:
            problems.append(f"{name} is {there} there and {here} here")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError("the checkpoint belongs to another model: " + "; ".join(problems[:8]) + more, where=str(path))


def _reason(error: BaseException) -> str:
    failures = list(getattr(error, "failures", {}).values())
    cause = failures[0][0] if failures else error
    return str(cause) or type(cause).__name__


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _world_size() -> int:
    return dist.get_world_size() if _distributed() else 1


def _rank() -> int:
    return dist.get_rank() if _distributed() else 0


def _rank_name() -> str:
    return f"rank-{_rank():05d}"


def _rank_file() -> str:
    return f"{_rank_name()}.json"


def _from_rank_0(value: Path) -> Path:
    holder: list[Path] = [value]
    if _distributed():
        dist.broadcast_object_list(holder)
    return holder[0]


def _barrier() -> None:
    if _distributed():
        dist.barrier()
