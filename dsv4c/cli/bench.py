"""``dsv4c bench``: the training step and the operators against their peers, and what compilation costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

app = typer.Typer(help="Measure: ratios, both sides in one run.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Save = Annotated[Path | None, typer.Option(help="Append the result to this JSONL file.")]


Rows = Sequence[tuple[str, ...]]


def _finish(result: dict[str, Any], as_json: bool, save: Path | None, rows: Rows, head: tuple[str, ...]) -> None:
    from dsv4c.bench.measure import append

    if save is not None:
        append(save, result)
    if as_json:
        print(json.dumps(result))
        return
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@app.command()
def step(
    preset: Annotated[str, typer.Option(help="Model size.")] = "small",
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.")] = 1024,
    batch_size: Annotated[int, typer.Option(help="Rows.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed repetitions; the median counts.")] = 5,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """A training step against transformers' eager model of the same shapes."""
    from dsv4c.bench.step import compare_step

    with Progress(console=Console(stderr=True), transient=True) as progress:
        r = compare_step(preset, seq_len=seq_len, batch_size=batch_size, repeats=repeats, threads=threads, progress=progress)
    rows = [(n, f"{r['seconds'][n]:.3f}", f"{r['peak_bytes'][n] / 1e6:,.0f}") for n in ("dsv4c", "transformers")]
    rows.append(("ratio", f"{r['speedup']:.2f}x faster", f"{r['memory_ratio']:.2f}x the memory"))
    title = f"{preset}, {r['parameters']:,} parameters, S={seq_len}"
    _finish(r, as_json, save, rows, (title, "s per step", "peak MB"))


@app.command(name="ops")
def ops_(
    repeats: Annotated[int, typer.Option(help="Timed repetitions; the median counts.")] = 9,
    compiled: Annotated[bool, typer.Option("--compiled/--eager", help="Also against what Inductor compiles.")] = True,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """The CPU kernels of the operators against plain torch and transformers: one thread, 512 tokens of one layer."""
    from dsv4c.bench.operators import compare_operators

    with Progress(console=Console(stderr=True), transient=True) as progress:
        result = compare_operators(repeats=repeats, compiled=compiled, progress=progress)
    head = ("operator", "peer", "ms", "peer, ms", "ratio", "bar", "peak, MB", "peer, MB", "share", "bar", "of its floor")
    _finish(result, as_json, save, [_operator_row(r) for r in result["rows"]], head)


def _operator_row(r: dict[str, Any]) -> tuple[str, ...]:
    def against(bar: float | None, reached: bool | None, text: str) -> str:
        return "" if bar is None else f"[green]{text}[/]" if reached else f"[red]{text}, missed[/]"

    ours, theirs = r["seconds"]["dsv4c"], r["seconds"][r["peer"]]
    cells = [r["operator"], r["peer"], f"{ours * 1e3:.2f}", f"{theirs * 1e3:.2f}", f"{r['ratio']:.1f}x"]
    cells.append(against(r["bar"], r["reached"], f"{r['bar']}x"))
    if "peak_bytes" in r:
        peaks = r["peak_bytes"]
        cells += [f"{peaks['dsv4c'] / 1e6:.2f}", f"{peaks[r['peer']] / 1e6:.1f}", f"1/{1 / r['memory_share']:.0f}"]
        cells.append(against(r["memory_bar"], r["memory_reached"], f"1/{1 / r['memory_bar']:.0f}"))
    else:
        cells += [""] * 4
    floor = r["floor"]
    return (*cells, f"{floor['ratio']:.2f}x {floor['name']}" if floor else "")


@app.command()
def memory(
    preset: Annotated[str, typer.Option(help="Widths of the layer.")] = "small",
    seq_len: Annotated[list[int] | None, typer.Option(help="Tokens in a row; repeat. [default: 1K, 2K, 4K, 8K]")] = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Peak memory of a CSA layer, forward and backward, against the length of the row, and a straight line through it."""
    from dsv4c.bench.memory import memory_growth

    lengths = seq_len or [1024, 2048, 4096, 8192]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        r = memory_growth(preset, lengths=lengths, progress=progress)
    rows = [(f"{n:,}", f"{peak / 1e6:,.1f}") for n, peak in zip(lengths, r["peak_bytes"], strict=True)]
    rows.append(("line", f"{r['bytes_at_zero'] / 1e6:,.2f} MB + {r['bytes_per_token'] / 1e3:,.1f} kB a token"))
    rows.append(("furthest from the line", f"{r['deviation']:.2%}"))
    rows.append(("share of a square term", f"{r['square']:.2%}"))
    _finish(r, as_json, save, rows, (f"{preset}: tokens", "peak MB"))


@app.command(name="compile")
def compile_(
    preset: Annotated[str, typer.Option(help="Model size.")] = "tiny",
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps after the first.")] = 20,
    depth: Annotated[bool, typer.Option("--depth/--no-depth", help="Also compile Flash's 43 layers.")] = True,
    passes: Annotated[bool, typer.Option("--passes/--no-passes", help="Also compile with and without passes.")] = True,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Graph breaks and recompiles over a run; compile time of 43 layers against each kind once."""
    from dsv4c.bench.compile_time import depth_ratio, passes_ratio, stays_compiled

    with Progress(console=Console(stderr=True), transient=True) as progress:
        result = stays_compiled(preset, seq_len=seq_len, steps=steps, progress=progress)
        if depth:
            result |= {"depth": depth_ratio(preset, seq_len=seq_len, progress=progress)}
        if passes:
            result |= {"passes": passes_ratio(preset, seq_len=seq_len, progress=progress)}
    rows = [
        ("graphs compiled", str(result["graphs"])),
        (f"graph breaks over {steps} steps", str(result["graph_breaks"])),
        (f"recompiles over {steps} steps", str(result["recompiles"])),
    ]
    for d in (result[key] for key in ("depth", "passes") if key in result):
        for n, s in d["seconds"].items():
            cell = f"{s:.1f} s, {d['processor_seconds'][n]:.1f} s of processor time, {d['graphs'][n]} graphs"
            rows.append((f"compile, {n}", cell))
        below, above = d["seconds"]
        rows.append((f"{above} / {below}", f"{d['ratio']:.2f}"))
    _finish(result, as_json, save, rows, (f"{preset}, S={seq_len}", ""))
    if result["graph_breaks"] or result["recompiles"]:
        raise typer.Exit(1)
