"""``dsv4c train``: a model, a text, a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dsv4c.config import ModelConfig
from dsv4c.errors import ConfigError
from dsv4c.presets import RECIPES


def parse_settings(items: list[str]) -> dict[str, Any]:
    """``key=value`` pairs; values are JSON (numbers, true, false, null, lists), anything else is text."""
    settings: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"{item!r} is not a setting", where="--set", allowed="key=value", do="for example --set mtp_loss_coef=0.1"
            )
        try:
            settings[key.strip()] = json.loads(value)
        except json.JSONDecodeError:
            settings[key.strip()] = value
    return settings


def model_config(preset: str | None, config: Path | None, settings: list[str]) -> ModelConfig:
    """The model of ``--preset`` or ``--config``, with ``--set`` applied."""
    if preset is not None and config is not None:
        raise ConfigError(
            "both --preset and --config are given", where="command line", allowed="one of the two", do="leave one out"
        )
    model = ModelConfig.from_json(config) if config is not None else ModelConfig.preset(preset or "tiny")
    changes = parse_settings(settings)
    return model.replace(**changes) if changes else model


def train(
    preset: Annotated[str | None, typer.Option(help="tiny, small, flash, flash-primus or pro. [default: tiny]")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json: Hugging Face, released or our own layout.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text file, folder or .jsonl; may be repeated. [default: Python's standard library]"),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="bytes, or the path of a tokenizer.json.")] = "bytes",
    text_field: Annotated[str, typer.Option(help="Field of a .jsonl line that holds the text.")] = "text",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows in a micro-batch.")] = None,
    grad_accum: Annotated[int, typer.Option(help="Micro-batches in an optimizer step.")] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, or bf16 (autocast; parameters stay fp32).")] = "fp32",
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/latest"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Model setting key=value; may be repeated.")] = None,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile.")] = True,
    only: Annotated[list[str] | None, typer.Option(help="Of the graph passes run this one alone; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this graph pass out; may be repeated.")] = None,
    until: Annotated[str, typer.Option(help="Run the graph passes up to and including this one.")] = "",
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    decay: Annotated[str, typer.Option(help="cosine, linear or constant.")] = "cosine",
    decay_start: Annotated[int | None, typer.Option(help="First step of the decay. [default: after warm-up]")] = None,
    min_lr_ratio: Annotated[float, typer.Option(help="Last learning rate as a share of the peak.")] = 0.1,
    weight_decay: Annotated[float, typer.Option(help="Decoupled weight decay of matrices.")] = 0.1,
    decay_vectors: Annotated[
        bool, typer.Option("--decay-vectors/--no-decay-vectors", help="Also decay norms, sinks, bases and scales.")
    ] = True,
    grad_clip: Annotated[float, typer.Option(help="Largest global gradient norm; 0 does not clip.")] = 1.0,
    indexer_lr_scale: Annotated[float, typer.Option(help="Learning rate of the indexer as a multiple.")] = 1.0,
    mtp_coef_after_decay: Annotated[
        float | None, typer.Option(help="MTP coefficient once the learning rate decays. [default: unchanged]")
    ] = None,
    stages: Annotated[str, typer.Option(help="Stages in order: dense:STEPS,indexer_warmup:STEPS@LR,sparse.")] = "sparse",
    recompute: Annotated[
        str, typer.Option(help="Activation checkpointing: off, all, or layer indices such as 0,1,5.")
    ] = "off",
    seed: Annotated[int, typer.Option(help="Seed of initialisation and shuffling.")] = 0,
    log_every: Annotated[int, typer.Option(help="Steps between log lines.", min=1)] = 10,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)] = 100,
    keep: Annotated[int, typer.Option(help="Checkpoints kept.", min=1)] = 3,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of the token cache.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda where there is one]")] = None,
) -> None:
    """Train a model: compiled, logged, checkpointed; ends with a report."""
    from dsv4c.cli.report import write_report
    from dsv4c.train.loop import Run, RunConfig
    from dsv4c.train.optim import OptimConfig

    console = Console()
    model = model_config(preset, config, set_ or [])
    recipe = RECIPES["flash" if config is not None else preset or "tiny"]
    given = {"steps": steps, "seq_len": seq_len, "batch_size": batch_size, "lr": lr, "warmup_steps": warmup_steps}
    chosen = recipe | {k: v for k, v in given.items() if v is not None}
    if warmup_steps is None:  # a recipe's warm-up gives way to a short run; one that was asked for does not
        chosen["warmup_steps"] = min(chosen["warmup_steps"], chosen["steps"])
    optim = OptimConfig(
        lr=chosen.pop("lr"), warmup_steps=chosen.pop("warmup_steps"), min_lr_ratio=min_lr_ratio,
        weight_decay=weight_decay, grad_clip=grad_clip or None, indexer_lr_scale=indexer_lr_scale,
        decay_vectors=decay_vectors,
    )  # fmt: skip
    run = Run(
        RunConfig(
            model=model, data=tuple(data or ()), tokenizer=tokenizer, text_field=text_field, grad_accum=grad_accum,
            dtype=dtype, seed=seed, optim=optim, decay=decay, decay_start=decay_start,
            mtp_coef_after_decay=mtp_coef_after_decay, stages=stages, out=str(out),
            cache_dir=str(cache_dir) if cache_dir else None, resume=resume, compile=compile, recompute=recompute,
            only=tuple(only or ()), skip=tuple(skip or ()), until=until,
            log_every=log_every, save_every=save_every, keep=keep,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"), **chosen,
        ),
        console,
    )  # fmt: skip
    console.print(_heading(run.config.model, run), highlight=False)
    run.train()
    if run.stopped_by is not None:
        raise typer.Exit(128 + run.stopped_by)
    console.print(f"report: {write_report(out)}", highlight=False, soft_wrap=True)


def _heading(model: ModelConfig, run: Any) -> Table:
    """What is about to be trained, in a few lines."""
    c = run.config
    kinds: dict[str, int] = {}
    for kind in model.layer_kinds[: model.num_hidden_layers]:
        kinds[kind.name] = kinds.get(kind.name, 0) + 1
    n = sum(p.numel() for p in run.model.parameters())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("parameters", f"{n:,}")
    table.add_row("layers", ", ".join(f"{count} {name}" for name, count in kinds.items()))
    table.add_row("objectives", ", ".join(run.model.objectives))
    table.add_row("batch", f"{c.grad_accum} x {c.batch_size} rows of {c.seq_len} tokens, {c.dtype} on {c.device}")
    table.add_row("corpus", f"{run.loader.dataset.epoch_tokens:,} tokens, tokenizer {c.tokenizer}")
    table.add_row("run folder", c.out)
    return table
