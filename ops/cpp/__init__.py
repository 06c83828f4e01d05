"""Kernels in C++ for the CPU, built by the system's compiler when one is first called.

The normalisations of the hyper-connections are hundreds of operations on 16 numbers a token.  At 512 tokens vectorised torch
was 2.6 to 5.2 times as fast as the plain formula.  What Inductor makes of them was 4 times as fast, after 11 s of processor
time for the formula and 12 s for its gradient, again for every number of tokens.  As C++ they are 20 times as fast, built in
seconds, once for a machine, by the compiler that ``torch.compile`` needs as well.  The sources include no header of torch:
they take pointers.

A library is built for a pair of types (see ``kernels.cpp``) and kept in ``$DSV4_CACHE``, or else
``$XDG_CACHE_HOME/dsv4c/kernels``, under a hash of sources, flags, compiler and processor.  It is written under another name
and renamed when complete, so that processes which build at the same time do not meet.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from dsv4c.errors import BuildError

# What is computed in, what streams are stored in: their names in C++.
TYPES = {
    (torch.float32, torch.float32): ("float", "float"),
    (torch.float64, torch.float64): ("double", "double"),
    (torch.float32, torch.bfloat16): ("float", "bf16"),
}
SOURCES = ("kernels.cpp", "attention.h", "hyper_connection.h", "hyper_connection_fused.h", "rope.h", "sinkhorn.h", "lanes.h")
FLAGS = (
    "-std=c++17", "-O3", "-shared", "-fPIC", "-fno-math-errno",
    "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native",
    *(() if sys.platform == "darwin" else ("-fopenmp",)),  # Apple's compiler has no OpenMP
)  # fmt: skip
COMPILERS = ("g++", "clang++", "c++")
WITHOUT = "or set DSV4_OPS=reference, which runs without it"


def call(name: str, compute: torch.dtype, streams: torch.dtype, *args: Tensor | int | float | None) -> None:
    """The kernel of ``kernels.cpp`` with these arguments and torch's number of threads.

    Tensors are contiguous and of the types the kernel says.  Raises BuildError where it cannot be built.
    """
    kernel = getattr(library(compute, streams), f"dsv4_{name}")
    kernel(*(_argument(a) for a in args), ctypes.c_int64(torch.get_num_threads()))


def _argument(value: Tensor | int | float | None) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_double:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        assert value.is_contiguous() and value.device.type == "cpu"
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value)


@cache
def library(compute: torch.dtype, streams: torch.dtype) -> ctypes.CDLL:
    """The library of these types: from the cache, or built."""
    compiler, version = _compiler()
    types = TYPES[compute, streams]
    command = [*compiler, *FLAGS, f"-DCOMPUTE={types[0]}", f"-DSTREAM={types[1]}", str(Path(__file__).with_name(SOURCES[0]))]
    identity = "\n".join((*command, version, _processor(), *_sources())).encode()
    file = folder() / f"{types[0]}-{types[1]}-{hashlib.blake2b(identity, digest_size=12).hexdigest()}.so"
    if file.exists():
        try:
            return ctypes.CDLL(str(file))
        except OSError:  # damaged: built again
            file.unlink(missing_ok=True)
    _build(command, file)
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise BuildError("a kernel was built and cannot be loaded", where=str(error), do=_other_compiler()) from error


def folder() -> Path:
    """Where built libraries are kept."""
    if own := os.environ.get("DSV4_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dsv4c" / "kernels"


def _sources() -> list[str]:
    return [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in SOURCES]


def _processor() -> str:
    """What ``native`` means here: a cache may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    # The first processor's; x86 lists flags, ARM features.
    return "\n".join(next((n for n in lines if n.startswith(key)), "") for key in ("model name", "flags", "Features"))


def _compiler() -> tuple[list[str], str]:
    """The command of the compiler, and what it says of its version."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    found = [chosen] if chosen else [[name] for name in COMPILERS]
    command = next((c for c in found if shutil.which(c[0])), None)
    if command is None:
        where = f"CXX={shlex.join(chosen)}" if chosen else f"CXX is not set, and {', '.join(COMPILERS)} are not on PATH"
        do = f"install g++ or set CXX, {WITHOUT}"
        raise BuildError("there is no C++ compiler for the CPU kernels", where=where, do=do)
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return command, version.stdout + version.stderr


def _other_compiler() -> str:
    return f"set CXX to a compiler that takes C++17, {WITHOUT}"


def _build(command: list[str], file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".so")
    except OSError as error:
        raise BuildError(
            f"the folder of built kernels cannot be written: {error.strerror}", where=str(file.parent),
            do=f"set DSV4_CACHE to a folder that can be written, {WITHOUT}",
        ) from error  # fmt: skip
    os.close(handle)
    try:
        run = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True, check=False)
        if run.returncode:
            raise BuildError(
                "the C++ compiler could not build the CPU kernels",
                where=f"{shlex.join(command)}\n{run.stderr.strip()[-4000:]}", do=_other_compiler(),
            )  # fmt: skip
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, file)
    finally:
        Path(unfinished).unlink(missing_ok=True)
