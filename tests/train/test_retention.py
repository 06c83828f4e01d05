"""Which checkpoints a folder holds: whole ones or none, whatever happens while one is written."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from dsv4c.errors import CheckpointError
from dsv4c.train import manifest
from dsv4c.train.checkpoint import latest_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint

ROOT = Path(__file__).parents[2]


def save(root: Path, step: int, *, value: float = 0.0, keep: int = 3) -> Path:
    model = nn.Linear(40, 20)
    nn.init.constant_(model.weight, value)
    return save_checkpoint(
        root, step=step, model=model, optimizer=None, loader_state={}, extra={}, config={}, keep=keep
    )  # fmt: skip


def load(path: Path) -> tuple[int, float]:
    """Step and weight of a checkpoint."""
    model = nn.Linear(40, 20)
    return load_checkpoint(path, model=model, optimizer=None)["step"], model.weight[0, 0].item()


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_the_newest_checkpoints_are_kept_and_the_latest_is_found(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000004"


def test_temporary_folders_and_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00000009.tmp-1").mkdir()
    (tmp_path / "step-last").mkdir()
    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000001"]
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_a_damaged_newer_checkpoint_never_pushes_out_the_newest_good_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 9)
    (tmp_path / "step-00000009" / manifest.NAME).unlink()
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-00000002", "step-00000009"]


def test_a_damaged_checkpoint_does_not_count_among_the_kept(tmp_path: Path) -> None:
    for step in (1, 3, 4):
        save(tmp_path, step)
    os.truncate(tmp_path / "step-00000004" / "__0_0.distcp", 10)
    save(tmp_path, 5, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, value=1.0)
    path = save(tmp_path, 1, value=7.0)
    assert load(path) == (1, 7.0)
    assert names(tmp_path) == [path.name]


def test_a_checkpoint_being_replaced_is_still_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    path.rename(tmp_path / "step-00000001.replaced")
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert load(found)[0] == 1


@pytest.mark.parametrize("call", range(9))
def test_a_full_disk_leaves_nothing_half_written_and_all_of_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    old = save(tmp_path, 1)
    real, calls = os.fsync, iter(range(1000))

    def full(handle: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written: .*No space left on device"):
        save(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert names(tmp_path) == [old.name]
    assert load(old)[0] == 1


def test_a_failure_after_the_rename_leaves_both_checkpoints_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    real = manifest.fsync_folder

    def failing(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        real(folder)

    monkeypatch.setattr(manifest, "fsync_folder", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 2, keep=1)
    assert [load(p)[0] for p in list_checkpoints(tmp_path)] == [1, 2]


def test_a_file_that_may_not_grow_leaves_nothing_of_the_new(tmp_path: Path) -> None:
    old = save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == [old.name]


KILLER = '''
"""Dies by SIGKILL at every file operation of save_checkpoint in turn; after each death a checkpoint must load."""
import os, shutil, signal, sys
from pathlib import Path
import torch
from torch import nn
torch.set_num_threads(1)
from dsv4c.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
root, step = Path(sys.argv[1]), int(sys.argv[2])

def write(step, value):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    save_checkpoint(root, step=step, model=model, optimizer=None, loader_state={}, extra={}, config={}, keep=2)

write(1, 1.0); write(2, 2.0)
shutil.copytree(root, str(root) + ".start")
deaths, n = 0, 0
while True:
    n += 1
    shutil.rmtree(root); shutil.copytree(str(root) + ".start", root)
    child = os.fork()
    if child == 0:
        left = [n]
        def tick(event=None, args=None):
            if event is None or event in EVENTS and str(root) in str(args[0]):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        real = os.fsync
        os.fsync = lambda handle: (tick(), real(handle))
        sys.addaudithook(tick)
        write(step, 3.0)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    model = nn.Linear(3, 2)
    found = latest_checkpoint(root)
    at = load_checkpoint(found, model=model, optimizer=None)["step"]
    value = model.weight[0, 0].item()
    assert (at, value) in {(2, 2.0), (step, 3.0)}, (n, found, value)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0 and value == 3.0
        break
    deaths += 1
    write(9, 9.0)
    rest = sorted(p.name for p in root.iterdir())
    assert not [name for name in rest if ".tmp-" in name], (n, rest)
print(deaths)
'''


@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "the same step again"])
def test_killed_at_any_file_operation_the_previous_checkpoint_loads(tmp_path: Path, step: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path / "run"), str(step)],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
