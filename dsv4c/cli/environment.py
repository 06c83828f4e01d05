"""``dsv4c env``: versions, devices, caches, and settings in the environment that hide or change something."""

from __future__ import annotations

import json
import os
import platform
import shutil
from importlib import metadata
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

PACKAGES = ("dsv4c", "torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "tensorboard")
HIDING: dict[str, str] = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "every run compiles from nothing",
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "compile errors fall back to eager without a word",
    "TRITON_INTERPRET": "Triton kernels run in Python, on CPU tensors",
    "DSV4_OPS": "'reference' replaces every operator by its formula",
    "OMP_NUM_THREADS": "number of CPU threads",
    "OMP_WAIT_POLICY": "PASSIVE (our default): waiting CPU threads sleep; ACTIVE: they spin",
}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """Everything that the command shows."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torch's default (a folder in the system's temporary folder)")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "python": platform.python_version(),
        "packages": {p: _version(p) for p in PACKAGES},
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "devices": devices or ["cpu"],
        "cpu_threads": torch.get_num_threads(),
        "compiler": shutil.which(os.environ.get("CXX", "g++")),
        "inductor_cache": cache,
        "settings": {name: os.environ[name] for name in HIDING if name in os.environ},
    }


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions, devices, caches, settings that hide something."""
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("python", facts["python"])
    for package, version in facts["packages"].items():
        table.add_row(package, version or "not installed")
    table.add_row("devices", ", ".join(facts["devices"]) + f", {facts['cpu_threads']} CPU threads")
    table.add_row("C++ compiler", facts["compiler"] or "none: torch.compile cannot generate CPU code")
    table.add_row("compile cache", facts["inductor_cache"])
    for name, value in facts["settings"].items():
        table.add_row(name, f"{value}  ({HIDING[name]})")
    Console(soft_wrap=True).print(table, highlight=False)
