"""What compilation costs and whether it stays done: graphs, breaks, recompiles, seconds by depth.

A model of many layers must compile in the time of its kinds: the ratio compares the first step of a deep model with that
of one that has each kind once, both without any cache, in one process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from rich.progress import Progress

from dsv4c.config import ModelConfig
from dsv4c.model.transformer import DeepseekV4
from dsv4c.torch_compat import compile_counts, inductor_settings, reset_compiler
from dsv4c.train.optim import OptimConfig, build_optimizer
from dsv4c.train.step import TrainStep


def each_kind_once(config: ModelConfig) -> ModelConfig:
    """The same widths with every layer kind of ``config`` exactly once, hash layers first."""
    kinds = list(dict.fromkeys(config.layer_kinds[: config.num_hidden_layers]))
    kinds.sort(key=lambda kind: kind.router != "hash")
    return config.replace(
        num_hidden_layers=len(kinds), num_hash_layers=sum(k.router == "hash" for k in kinds),
        compress_ratios=(*(k.ratio for k in kinds), *config.compress_ratios[config.num_hidden_layers :]),
    )  # fmt: skip


def flash_depth(config: ModelConfig) -> ModelConfig:
    """The widths of ``config`` with the 43 layers of Flash: 2 SWA, 21 CSA, 20 HCA, the first three with hash routers."""
    flash = ModelConfig.preset("flash")
    ratios = tuple(config.hca_ratio if m == flash.hca_ratio else m for m in flash.compress_ratios)
    return config.replace(
        num_hidden_layers=flash.num_hidden_layers, compress_ratios=ratios, num_hash_layers=flash.num_hash_layers
    )


def _step(config: ModelConfig, **options: Any) -> TrainStep:
    torch.manual_seed(0)
    model = DeepseekV4(config)
    return TrainStep(model, build_optimizer(model, OptimConfig(lr=1e-3)), **options)


def _batches(config: ModelConfig, seq_len: int, n: int) -> Iterable[dict[str, torch.Tensor]]:
    for _ in range(n):
        ids = torch.randint(0, config.vocab_size, (1, seq_len + 1))
        yield {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}


def stays_compiled(preset: str, *, seq_len: int, steps: int, progress: Progress | None = None) -> dict[str, Any]:
    """Graphs after the first step, and graphs and breaks after ``steps`` more."""
    reset_compiler()
    config = ModelConfig.preset(preset)
    step = _step(config)
    task = progress.add_task(f"{preset}: {steps} steps", total=steps + 1) if progress else None
    first = 0
    for i, batch in enumerate(_batches(config, seq_len, steps + 1)):
        step.step(batch)
        if i == 0:
            first = compile_counts().graphs
        if progress is not None and task is not None:
            progress.advance(task)
    after = compile_counts()
    return {
        "bench": "stays_compiled", "preset": preset, "steps": steps, "graphs": first,
        "graph_breaks": after.graph_breaks, "recompiles": after.graphs - first,
    }  # fmt: skip


def depth_ratio(preset: str, *, seq_len: int, progress: Progress | None = None) -> dict[str, Any]:
    """What the first step costs beyond a later one, for Flash's 43 layers and for each kind once.

    In wall time and in processor time of this process and its compilers; the ratio is of the latter, because a machine whose
    cores are shared gives the former no meaning.  One compile thread, so that every compiler is a child of this process.
    """
    flash = flash_depth(ModelConfig.preset(preset))
    sides = {"each kind once": lambda: _step(each_kind_once(flash)), "43 layers": lambda: _step(flash)}
    found = _compared(sides, preset, seq_len, progress)
    return {"bench": "depth_ratio", **found, "ratio": _ratio(found, "43 layers", "each kind once")}


def passes_ratio(preset: str, *, seq_len: int, progress: Progress | None = None) -> dict[str, Any]:
    """The same for a preset with every pass and without any, and the share of the passes themselves."""
    config = ModelConfig.preset(preset)
    made: list[TrainStep] = []

    def with_passes() -> TrainStep:
        made.append(_step(config))
        return made[-1]

    sides = {"without passes": lambda: _step(config, passes="off"), "with passes": with_passes}
    found = _compared(sides, preset, seq_len, progress)
    own = sum(r.seconds for region in made[-1].model.compiler.regions for r in region.records)
    ratio = _ratio(found, "with passes", "without passes")
    return {"bench": "passes_ratio", **found, "seconds_in_passes": own, "ratio": ratio}


def _ratio(found: dict[str, Any], a: str, b: str) -> float:
    return float(found["processor_seconds"][a] / found["processor_seconds"][b])


def _compared(
    sides: Mapping[str, Callable[[], TrainStep]], preset: str, seq_len: int, progress: Progress | None
) -> dict[str, Any]:
    """What each side's first step costs beyond a later one: wall time, processor time, graphs."""
    task = progress.add_task("compiling", total=len(sides)) if progress else None
    wall: dict[str, float] = {}
    processor: dict[str, float] = {}
    graphs: dict[str, int] = {}
    with inductor_settings(force_disable_caches=True, compile_threads=1):
        _warm_up_toolchain(ModelConfig.preset(preset), seq_len)
        for name, make in sides.items():
            reset_compiler()
            step = make()
            laps = []
            for batch in _batches(step.model.config, seq_len, 3):
                began, used = time.perf_counter(), _processor_seconds()
                step.step(batch)
                laps.append((time.perf_counter() - began, _processor_seconds() - used))
            wall[name], processor[name] = (first - min(later) for first, *later in zip(*laps, strict=True))
            graphs[name] = compile_counts().graphs
            if progress is not None and task is not None:
                progress.advance(task)
    return {"preset": preset, "seq_len": seq_len, "seconds": wall, "processor_seconds": processor, "graphs": graphs}


def _processor_seconds() -> float:
    """User and system time of this process and of its finished children."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def _warm_up_toolchain(config: ModelConfig, seq_len: int) -> None:
    """Compile something small first: a process's first compilation pays for headers and instruction-set checks."""
    reset_compiler()
    torch.compile(lambda x: (x.sin() + 1).sum(), fullgraph=True)(torch.ones(seq_len, config.hidden_size))
