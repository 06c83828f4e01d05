"""The C++ kernels: how they are built, kept and refused.

A compiler of one line of shell stands in for a real one where only what is done with it matters.
"""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4c.errors import BuildError
from dsv4c.ops import cpp, hyper_connection, reference

FP32 = (torch.float32, torch.float32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache, and no library loaded yet."""
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path / "kernels"))
    cpp.library.cache_clear()
    yield tmp_path / "kernels"
    cpp.library.cache_clear()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A library that was built for real."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4_CACHE", str(tmp_path_factory.mktemp("kernels")))
        cpp.library.cache_clear()
        cpp.library(*FP32)
        cpp.library.cache_clear()
        (file,) = cpp.folder().iterdir()
    return file


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A compiler that says its version, does ``body`` when it is to compile and counts how often that was."""
    script, calls = tmp_path / "c++-stand-in", tmp_path / "calls"
    lines = ("#!/bin/sh", '[ "$1" = --version ] && echo 1.0 && exit', f"echo once >> {calls}", "for out; do :; done", body)
    script.write_text("\n".join(lines))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return calls


def test_a_library_is_built_once_and_then_comes_from_the_cache(folder, tmp_path, monkeypatch, built):
    calls = stand_in(tmp_path, monkeypatch, f'cp {built} "$out"')
    for _ in range(2):
        cpp.library(*FP32)
        cpp.library.cache_clear()
    assert calls.read_text().splitlines() == ["once"]
    assert [f.suffix for f in folder.iterdir()] == [".so"]


def test_a_library_of_another_version_of_the_compiler_is_not_taken(folder, tmp_path, monkeypatch, built):
    for version in ("1.0", "1.1"):
        calls = stand_in(tmp_path, monkeypatch, f'cp {built} "$out"')
        script = tmp_path / "c++-stand-in"
        script.write_text(script.read_text().replace("1.0", version))
        cpp.library(*FP32)
        cpp.library.cache_clear()
    assert calls.read_text().splitlines() == ["once", "once"]


def test_a_damaged_library_is_built_again(folder, tmp_path, monkeypatch, built):
    calls = stand_in(tmp_path, monkeypatch, f'cp {built} "$out"')
    cpp.library(*FP32)
    cpp.library.cache_clear()
    (file,) = folder.iterdir()
    other = tmp_path / "other"  # a library that is loaded already would be found by its path alone
    other.mkdir()
    (other / file.name).write_bytes(b"not a library")
    monkeypatch.setenv("DSV4_CACHE", str(other))
    assert hasattr(cpp.library(*FP32), "dsv4_sinkhorn")
    assert len(calls.read_text().splitlines()) == 2


def test_a_compiler_that_fails_is_named_with_its_command_and_what_it_said(folder, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, 'echo "kernels.cpp:1: error: no such luck" >&2; exit 1')
    with pytest.raises(BuildError) as error:
        cpp.library(*FP32)
    for part in ("c++-stand-in -std=c++17", "-DCOMPUTE=float", "error: no such luck", "DSV4_OPS=reference"):
        assert part in str(error.value)
    assert list(folder.iterdir()) == []


def test_a_result_that_cannot_be_loaded_is_an_error(folder, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, 'echo nothing > "$out"')
    with pytest.raises(BuildError, match="cannot be loaded"):
        cpp.library(*FP32)


def test_a_compiler_that_is_not_there_is_an_error(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(BuildError, match=r"(?s)no C\+\+ compiler.*CXX=no-such-compiler -O1.*DSV4_OPS=reference"):
        cpp.library(*FP32)


def test_without_any_compiler_the_names_looked_for_are_listed(folder, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match=r"CXX is not set, and g\+\+, clang\+\+, c\+\+ are not on PATH"):
        cpp.library(*FP32)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path / "file" / "kernels"))
    cpp.library.cache_clear()
    with pytest.raises(BuildError, match=r"(?s)cannot be written.*set DSV4_CACHE"):
        cpp.library(*FP32)


def test_an_operator_passes_the_error_on(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        torch.ops.dsv4.sinkhorn(torch.zeros(1, 4, 4), 20, 1e-6)


def test_the_cache_follows_the_xdg_convention(monkeypatch):
    monkeypatch.delenv("DSV4_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cpp.folder() == Path("/somewhere/dsv4c/kernels")


def test_every_source_is_in_the_key_of_the_cache():
    here = Path(cpp.__file__).parent
    assert sorted(cpp.SOURCES) == sorted(f.name for f in here.iterdir() if f.suffix in (".cpp", ".h"))


def test_processes_that_build_at_once_do_not_meet(folder, tmp_path, monkeypatch, built):
    stand_in(tmp_path, monkeypatch, f'sleep 0.3; cp {built} "$out"')
    program = "import torch; from dsv4c.ops import cpp; cpp.library(torch.float32, torch.float32).dsv4_sinkhorn"
    root = Path(__file__).parents[2]
    both = [subprocess.Popen([sys.executable, "-c", program], cwd=root) for _ in range(2)]
    assert [p.wait() for p in both] == [0, 0]
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_threads_and_stores_around_the_cache_change_nothing_but_the_order_of_sums(dtype):
    """A batch large enough for both; the formula sees one token at a time."""
    g, wide = torch.Generator().manual_seed(0), torch.float64 if dtype == torch.float64 else torch.float32
    n_tokens, width = 1100, 512
    streams, y = (torch.randn(*s, generator=g).to(dtype) for s in ((n_tokens, 4, width), (n_tokens, width)))
    fn, base, scale = (torch.randn(*s, generator=g).to(wide) / 20 for s in ((24, 4 * width), (24,), (3,)))
    limit = {torch.bfloat16: 5e-3, torch.float32: 2e-6, torch.float64: 1e-12}[dtype]
    u, post, comb, z, rstd = hyper_connection.plain_pre(streams, fn, base, scale, 20, 1e-6, 1e-6)
    mixed = hyper_connection.plain_post(y, streams, post, comb)
    gradients = hyper_connection.plain_pre_backward(y, post, comb, streams, fn, base, scale, z, rstd, 20, 1e-6)
    _, pull = torch.func.vjp(lambda *x: reference.hc_pre(*x, 20, 1e-6, 1e-6)[:3], streams, fn, base, scale)
    expected = (*reference.hc_pre(streams, fn, base, scale, 20, 1e-6, 1e-6)[:3], reference.hc_post(y, streams, post, comb))
    for a, b in zip((u, post, comb, mixed, *gradients), (*expected, *pull((y, post, comb))), strict=True):
        assert (a.double() - b.double()).norm() <= limit * b.double().norm()
