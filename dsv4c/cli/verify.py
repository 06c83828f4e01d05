"""``dsv4c verify``: the verdict of every rule on a model, at any width, before anything is compiled."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4c.cli.train import model_config

if TYPE_CHECKING:
    from dsv4c.passes.verify import Report

BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024


def verify(
    preset: Annotated[str | None, typer.Option(help="tiny, small, flash, flash-primus or pro. [default: tiny]")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json: Hugging Face, released or our own layout.")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.", min=1)] = 4096,
    batch_size: Annotated[int, typer.Option(help="Rows.", min=1)] = 1,
    rule: Annotated[list[str] | None, typer.Option(help="Only this rule; may be repeated.")] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(help="Only layers of this kind (swa-hash, csa-learned, ..., mtp); may be repeated."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Capture every layer instead of the first of each kind.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Model setting key=value; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove a model right by the graph it becomes; exit status 1 if a rule is violated."""
    from dsv4c.compile.verify import verify_model
    from dsv4c.passes.verify import chosen

    settings = model_config(preset, config, set_ or [])
    chosen(rule or None)  # a wrong name is an error before any work
    started = time.perf_counter()
    told = Console(stderr=True)
    with told.status("building the model on the meta device") as status:
        report = verify_model(
            settings, seq_len=seq_len, batch_size=batch_size, rules=rule or None, whole=whole, kinds=layer or None,
            progress=status.update,
        )  # fmt: skip
    cost = {
        "seconds": round(time.perf_counter() - started, 1), "processor_seconds": round(time.process_time(), 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_OF_MAXRSS,
    }  # fmt: skip
    if as_json:
        sys.stdout.write(json.dumps(json.loads(report.to_json()) | {"seq_len": seq_len, **cost}) + "\n")
    else:
        _print(report, f"{config or preset or 'tiny'}, S={seq_len}", cost)
    raise typer.Exit(0 if report.ok else 1)


def _print(report: Report, title: str, cost: dict[str, Any]) -> None:
    from dsv4c.passes.verify import RULES

    console = Console(soft_wrap=False)
    table = Table("rule", "proves", "places", "verdict", title=title, title_justify="left")
    table.columns[2].justify = "right"
    for name in report.rules:
        wrong = sum(v.rule == name for v in report.violations)
        places = report.checked.get(name, 0)
        verdict = (
            f"[red]{wrong} violation{'s' * (wrong > 1)}[/]" if wrong else "[green]proved[/]" if places else "nothing to see"
        )
        table.add_row(name, RULES[name].proves, f"{places:,}", verdict)
    console.print(table)
    for line in report.notes:
        console.print(escape(line), style="dim", soft_wrap=True, highlight=False)
    for found in report.violations:
        console.print()
        console.print(escape(str(found)), soft_wrap=True, highlight=False)
    if report.violations:
        console.print()
    console.print(
        f"{cost['seconds']:.1f} s ({cost['processor_seconds']:.1f} s of processor time), peak memory "
        f"{cost['peak_bytes'] / 1e9:.2f} GB", highlight=False,
    )  # fmt: skip
