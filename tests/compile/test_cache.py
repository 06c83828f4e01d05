"""A warm cache is never stale: what a compiled graph depends on beside itself is in its identity.

Each case is a process of its own on a copy of the sources, with a cache folder that the first process filled.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4c.passes import identity

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
import torch
from dsv4c import ops
from dsv4c.compile.backend import Backend
from dsv4c.passes.manager import Passes
from dsv4c.torch_compat import prepare_compiler

prepare_compiler()
backend = Backend(Passes(**json.loads(sys.argv[1])))

def doubled(x):
    return 2 * ops.hadamard(x)

x = torch.eye(4, requires_grad=True)
torch.compile(doubled, backend=backend, fullgraph=True)(x)[0, 0].backward()
(region,) = backend.regions
print(json.dumps({"cached": region.cached, "rules": region.rules, "gradient": x.grad[0].tolist()}))
"""


class Sources:
    """A copy of what a graph depends on, and the processes that compile with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("dsv4c", "ops", "passes"):
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        self.environment = os.environ | {
            "PYTHONPATH": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONDONTWRITEBYTECODE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip

    def compile(self, **passes: Any) -> dict[str, Any]:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(passes)], env=self.environment, cwd=self.folder,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return dict(json.loads(run.stdout.splitlines()[-1]))

    def change(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """With a cache that two processes agreed on: the second found what the first had compiled and proved."""
    made = Sources(tmp_path_factory.mktemp("sources"))
    first, second = made.compile(), made.compile()
    assert not first["cached"]
    assert second["cached"]
    assert second["rules"] == first["rules"] != []
    assert second["gradient"] == first["gradient"] == [1.0, 1.0, 1.0, 1.0]
    return made


def test_a_changed_backward_formula_is_a_miss_and_takes_effect(sources: Sources) -> None:
    sources.change("ops/hadamard.py", "    return hadamard(grad)\n", "    return 3 * hadamard(grad)\n")
    try:
        found = sources.compile()
    finally:
        sources.change("ops/hadamard.py", "    return 3 * hadamard(grad)\n", "    return hadamard(grad)\n")
    assert not found["cached"]
    assert found["gradient"] == [3.0, 3.0, 3.0, 3.0]


def test_a_changed_pass_option_is_a_miss(sources: Sources) -> None:
    assert not sources.compile(skip=["derotation"])["cached"]


def test_a_changed_rule_is_a_miss(sources: Sources) -> None:
    sources.change("passes/verify/rotation.py", '"""``rotation``', '"""\n``rotation``')
    assert not sources.compile()["cached"]


def test_the_identity_covers_every_source_file_of_operators_and_passes(tmp_path: Path) -> None:
    for file in ("ops/a.py", "ops/cpp/b.cpp", "passes/verify/c.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x")
    seen = {identity.sources.__wrapped__(tmp_path)}
    for file in ("ops/a.py", "ops/cpp/b.cpp", "passes/verify/c.py"):
        (tmp_path / file).write_text("y")
        seen.add(identity.sources.__wrapped__(tmp_path))
    (tmp_path / "ops/new.py").write_text("")
    seen.add(identity.sources.__wrapped__(tmp_path))
    assert len(seen) == 5
