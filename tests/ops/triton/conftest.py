"""Tests marked ``interpret`` run under TRITON_INTERPRET=1, on CPU tensors.

Triton reads the variable when it is imported, and a kernel that is interpreted cannot be compiled.  So the first marked test
of a file starts one child process that runs all marked tests of that file; each then reports what the child says of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import triton.language as tl

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_outcomes = pytest.StashKey[dict[Path, dict[str, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpret: runs in a child process under TRITON_INTERPRET=1")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if INTERPRETING:
        if pyfuncitem.get_closest_marker("interpret") is None:
            pytest.skip("needs compiled kernels")
        return None
    if pyfuncitem.get_closest_marker("interpret") is None:
        return None
    known = pyfuncitem.session.stash.setdefault(_outcomes, {})
    if pyfuncitem.path not in known:
        marked = [
            i.nodeid for i in pyfuncitem.session.items if i.path == pyfuncitem.path and i.get_closest_marker("interpret")
        ]
        known[pyfuncitem.path] = _run(pyfuncitem.config.rootpath, marked)
    failure = known[pyfuncitem.path].get(pyfuncitem.name, "the child process did not run this test")
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


@pytest.fixture(scope="session", autouse=True)
def _bf16_products() -> Iterator[None]:
    """The interpreter keeps bf16 as uint16, and triton 3.7 multiplies those integers in tl.dot: widen them first."""
    if not INTERPRETING:
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    dot = InterpreterBuilder.create_dot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest))
        yield


def _run(root: Path, tests: list[str]) -> dict[str, str]:
    """What went wrong in each test, by its name; "" where nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", f"--junitxml={results}"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
        child = subprocess.run([*command, *tests], cwd=root, env=environment, capture_output=True, text=True, check=False)
        if not results.exists():
            return dict.fromkeys((t.rpartition("::")[2] for t in tests), child.stdout + child.stderr)
        return {
            case.attrib["name"]: "\n".join(part.text or "" for part in case if part.tag in ("failure", "error"))
            for case in ElementTree.parse(results).iter("testcase")
        }
