"""Imports point one way, private torch modules stay in one file, and parts stay light to load (architecture, layout).

The rules are data: what a layer may import, and the few imports inside functions that go another way. Every rule is shown
to catch a source that breaks it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import dsv4c

PACKAGE = Path(dsv4c.__file__).parent
BASE = {"errors", "reach", "torch_compat"}
CONFIG = BASE | {"config"}
CORE = CONFIG | {"ops", "model", "compile", "weights", "train", "lowering"}

# Layer: the layers it may import, besides itself. ``config`` is every module named config* and the presets it reads.
MAY_IMPORT: dict[str, set[str]] = {
    "dsv4c": set(),  # the public names are loaded when they are first used
    "errors": set(),
    "reach": set(),
    "torch_compat": set(),
    "config": BASE,
    "ops": BASE,
    "passes": BASE,
    "model": CONFIG | {"ops"},
    "compile": CONFIG | {"model", "passes"},
    "weights": CONFIG | {"model"},
    "train": CORE,
    "lowering": CORE,
    "bench": CORE | {"passes"},
    "cli": CORE | {"passes", "bench"},
    "__main__": {"cli"},
}
# Imports inside functions: each goes against the table, or closes a circle, and is here with its reason.
INSIDE: dict[tuple[str, str], str] = {
    ("dsv4c.config", "ModelConfig.preset"): "dsv4c.presets",  # read when asked for
    ("dsv4c.config", "ModelConfig.from_json"): "dsv4c.config_layouts",  # which makes ModelConfigs
    ("dsv4c.model.transformer", "DeepseekV4.from_pretrained"): "dsv4c.weights",  # a convenience of the user's
    ("dsv4c.model.transformer", "DeepseekV4.save_pretrained"): "dsv4c.weights",
    ("dsv4c.weights.model_io", "from_pretrained"): "dsv4c.model.transformer",  # makes the model that it fills
}
LAZY_LAYERS = {"cli"}  # a command loads what it needs when it runs, so that --help is quick


class Import(NamedTuple):
    line: int
    target: str  # full dotted name, of a member too
    inside: str  # qualified name of the function it stands in, "" at module level


def layer(module: str) -> str:
    name = module.split(".")[1] if "." in module else "dsv4c"
    return "config" if name.startswith("config") or name == "presets" else name


def imports(source: str, module: str = "", is_package: bool = False) -> Iterator[Import]:
    """Every import statement; relative ones resolved against ``module``."""

    def walk(node: ast.AST, names: tuple[str, ...], in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = ".".join(names) if in_function else ""
            if isinstance(child, ast.Import):
                yield from (Import(child.lineno, a.name, inside) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = module.split(".")[: len(module.split(".")) - child.level + is_package]
                    base = ".".join([*parents, *([base] if base else [])])
                yield from (Import(child.lineno, f"{base}.{a.name}", inside) for a in child.names)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from walk(child, (*names, child.name), in_function or not isinstance(child, ast.ClassDef))
            else:
                yield from walk(child, names, in_function)

    return walk(ast.parse(source), (), False)


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of ours that the table does not allow."""
    own, wrong = layer(module), []
    for line, target, inside in imports(source, module, is_package):
        if target.split(".")[0] != "dsv4c":
            continue
        # ``from dsv4c import NAME`` loads a layer, or a public name and with it all that the name stands on.
        name = ".".join(target.split(".")[:2])
        to = layer(name) if name.split(".")[-1] in {*MAY_IMPORT, "presets"} or "config" in name else f"public name {name}"
        listed = INSIDE.get((module, inside), "")
        if inside and own not in LAZY_LAYERS:
            allowed = bool(listed) and f"{target}.".startswith(f"{listed}.")
        else:
            allowed = to == own or to in MAY_IMPORT[own]
        if not allowed:
            wrong.append(f"{module}:{line} imports {target}{f' in {inside}' if inside else ''}")
    return wrong


def private_torch(source: str) -> list[int]:
    """Lines that touch a private part of torch: ``torch._x``, ``torch.a._x``, ``from torch.a import _x``."""

    def private(dotted: str) -> bool:
        first, *rest = dotted.split(".")
        return first == "torch" and any(p.startswith("_") and not p.startswith("__") for p in rest)

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return node.id if isinstance(node, ast.Name) else ""

    lines = {i.line for i in imports(source) if private(i.target)}
    return sorted(
        lines | {n.lineno for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute) and private(dotted(n))}
    )


def modules() -> dict[str, Path]:
    """Every module of the package by its name, through the links."""
    found = {}
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for file in files:
            if file.endswith(".py"):
                path = Path(folder, file)
                parts = ["dsv4c", *path.relative_to(PACKAGE).with_suffix("").parts]
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def loaded_by(statement: str) -> set[str]:
    """Modules that a fresh Python has loaded after the statement."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    program = f"{statement}; import sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_every_layer_of_the_package_has_a_rule():
    assert {layer(name) for name in MODULES} <= set(MAY_IMPORT)
    assert {"ops", "model", "config", "errors", "torch_compat"} <= {layer(name) for name in MODULES}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module):
    path = MODULES[module]
    assert wrong_imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py") == []


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"dsv4c.torch_compat"}))
def test_only_torch_compat_touches_private_torch(module):
    assert private_torch(MODULES[module].read_text(encoding="utf-8")) == []


def test_torch_compat_is_where_private_torch_is():
    assert private_torch(MODULES["dsv4c.torch_compat"].read_text(encoding="utf-8"))


@pytest.mark.parametrize(("module", "function"), sorted(INSIDE))
def test_every_listed_exception_is_in_use(module, function):
    found = imports(MODULES[module].read_text(encoding="utf-8"), module)
    assert any(i.inside == function and i.target.startswith(INSIDE[module, function]) for i in found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dsv4c", "from dsv4c.config import ModelConfig"),
        ("dsv4c.errors", "from dsv4c.config import ModelConfig"),
        ("dsv4c.torch_compat", "import dsv4c.errors"),
        ("dsv4c.config_hf", "from dsv4c import ops"),
        ("dsv4c.presets", "from dsv4c.model.moe import Gate"),
        ("dsv4c.ops.rope", "from dsv4c.model.rope import tables"),
        ("dsv4c.ops.rope", "from dsv4c import passes"),
        ("dsv4c.ops.rope", "from dsv4c import DeepseekV4"),
        ("dsv4c.ops.triton.rope", "from ...model import rope"),
        ("dsv4c.ops.rope", "if True:\n    try:\n        import dsv4c.model\n    except ImportError:\n        pass"),
        ("dsv4c.passes.verify.reach", "from dsv4c.ops.visibility import window_mask"),
        ("dsv4c.passes.base", "from dsv4c.model.objectives import POLICIES"),
        ("dsv4c.passes.base", "def f():\n    from dsv4c.model import objectives"),
        ("dsv4c.model.moe", "from dsv4c.passes import manager"),
        ("dsv4c.model.moe", "from dsv4c.weights import check"),
        ("dsv4c.model.moe", "class Gate:\n    def forward(self):\n        from dsv4c.train import step"),
        ("dsv4c.model.transformer", "class DeepseekV4:\n    def forward(self):\n        from dsv4c.weights import check"),
        (
            "dsv4c.model.transformer",
            "class DeepseekV4:\n    def from_pretrained(self):\n        from dsv4c.train import step",
        ),
        ("dsv4c.compile.backend", "from dsv4c.train.step import TrainStep"),
        ("dsv4c.weights.check", "from dsv4c.train.step import TrainStep"),
        ("dsv4c.train.loop", "from dsv4c.cli.main import main"),
        ("dsv4c.lowering.rocm", "from dsv4c.bench.step import compare_step"),
        ("dsv4c.bench.step", "from dsv4c.cli.main import main"),
        ("dsv4c.train.loop", "def run():\n    from dsv4c.model import moe"),
    ],
)
def test_an_import_against_the_rules_is_caught(module, source):
    assert len(wrong_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dsv4c.ops.rope", "import torch\nfrom dsv4c.ops.visibility import window_mask"),
        ("dsv4c.model.rope", "from dsv4c import ops\nfrom dsv4c.config import ModelConfig"),
        ("dsv4c.passes.manager", "from .base import Pass\nfrom dsv4c.errors import VerifyError"),
        ("dsv4c.config", "class ModelConfig:\n    def preset(cls):\n        from dsv4c.presets import PRESETS"),
        ("dsv4c.cli.train", "def train():\n    from dsv4c.train.loop import Run"),
    ],
)
def test_an_import_along_the_rules_is_not(module, source):
    assert wrong_imports(source, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._inductor import config",
        "from torch import _C",
        "from torch.utils import _pytree",
        "import torch\ntorch._dynamo.reset()",
        "import torch\nx = torch.fx._symbolic_trace.wrap",
        "def f():\n    import torch._functorch.config",
    ],
)
def test_a_private_part_of_torch_is_caught(source):
    assert len(private_torch(source)) == 1


@pytest.mark.parametrize(
    "source", ["import torch\ntorch.__version__", "import torch\nmodel._modules", "from torch.nn import Module", "x._torch"]
)
def test_what_is_public_or_not_torchs_is_not(source):
    assert private_torch(source) == []


@pytest.mark.parametrize("name", ["ops", "passes", "bench"])
def test_the_links_are_there_and_relative(name):
    link = PACKAGE / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"
    assert link.resolve() == PACKAGE.parent / name and link.is_dir()


def test_dsv4c_alone_loads_none_of_its_parts():
    loaded = loaded_by("import dsv4c")
    assert {m for m in loaded if m.startswith("dsv4c")} == {"dsv4c"}
    assert not loaded & {"torch", "numpy", "transformers"}


def test_a_config_is_loaded_without_torch():
    assert "torch" not in loaded_by("from dsv4c import ModelConfig; ModelConfig.preset('flash')")


def test_passes_alone_stay_light():
    loaded = loaded_by("import dsv4c.passes")
    assert not {m for m in loaded if m.startswith("dsv4c.") and layer(m) not in MAY_IMPORT["passes"] | {"passes"}}
    assert not loaded & {"torch._inductor.compile_fx", "torch._dynamo.convert_frame", "transformers", "triton"}


def test_operators_alone_do_not_load_the_model():
    loaded = {layer(m) for m in loaded_by("import dsv4c.ops") if m.startswith("dsv4c.")}
    assert loaded <= {"ops", *BASE}
