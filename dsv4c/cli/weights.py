"""``dsv4c weights convert|check|inspect``: weight folders on the command line.

Only reads arguments and prints; what happens is in :mod:`dsv4c.weights`. Exit status: 0 done, 1 the weights do not
fit, 2 a folder, file or option that cannot be used.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from dsv4c.config_layouts import read
from dsv4c.errors import Dsv4Error, WeightsError
from dsv4c.weights.check import CheckReport
from dsv4c.weights.check import check as check_folder
from dsv4c.weights.convert import convert as convert_folder
from dsv4c.weights.stream import DTYPES, Source
from dsv4c.weights.write import StoreAs

app = typer.Typer(help="Weight folders: Hugging Face, released and dsv4c layouts.", no_args_is_help=True)


class To(StrEnum):
    """Layouts that can be written."""

    hf = "hf"
    released = "released"
    dsv4c = "dsv4c"


class Store(StrEnum):
    """What tensors can be stored as."""

    keep = "keep"
    bf16 = "bf16"
    fp32 = "fp32"
    released = "released"


_STORE_AS: dict[Store, StoreAs] = {
    Store.keep: "keep",
    Store.bf16: torch.bfloat16,
    Store.fp32: torch.float32,
    Store.released: "released",
}

Folder = Annotated[Path, typer.Argument(help="Folder of *.safetensors files, or one such file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def _telling() -> Iterator[None]:
    """Print an error of ours as its message alone and leave with its exit status."""
    try:
        yield
    except Dsv4Error as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(error.exit_status) from None
    except OSError as error:  # a full disk, a folder without permission: the system's own message says it
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@app.command()
def inspect(
    folder: Folder,
    as_json: AsJson = False,
    pattern: Annotated[str, typer.Option("--filter", help="Only keys that match this glob pattern.")] = "*",
    rows: Annotated[int, typer.Option(help="Rows to print; 0 prints all.", min=0)] = 40,
) -> None:
    """List what a folder holds: key, shape, stored dtype and file of every tensor, and the layout that the keys are
    in.
    """
    with _telling():
        source = Source(folder)
        found = {key: h for key, h in source.headers.items() if fnmatch.fnmatchcase(key, pattern)}
        elements = {key: _count(h.shape) for key, h in found.items()}
        total = {
            "folder": str(folder),
            "layout": _layout_or_reason(source),
            "tensors": len(found),
            "elements": sum(elements.values()),
            "bytes": sum(n * DTYPES[found[key].dtype].itemsize for key, n in elements.items() if found[key].dtype in DTYPES),
        }
    if as_json:
        listed = {h.stored: {"shape": list(h.shape), "dtype": h.dtype, "file": h.file} for h in found.values()}
        _print_json(total | {"keys": listed})
        return
    table = Table("key", "shape", "dtype", "file")
    for key in list(found)[: rows or None]:
        h = found[key]
        table.add_row(h.stored, " x ".join(map(str, h.shape)), h.dtype, h.file)
    console = Console()
    console.print(table)
    if rows and len(found) > rows:
        console.print(f"... and {len(found) - rows:,} more (--rows 0 prints all, --filter chooses)")
    counts = ", ".join(f"{total[name]:,} {name}" for name in ("tensors", "elements", "bytes"))
    console.print(f"layout {total['layout']}: {counts}", soft_wrap=True)


@app.command()
def check(
    folder: Folder,
    config: Annotated[
        Path | None, typer.Option(help="Settings to compare with (default: the folder's config.json).")
    ] = None,
    allow_missing: Annotated[list[str] | None, typer.Option(help="Glob pattern of keys that may be absent.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every key, shape and dtype with what the model needs, before reading any tensor; exit status 1 if one
    is wrong.
    """
    with _telling():
        source = Source(folder)
        report = check_folder(source, read(config or source.folder), allow_missing=allow_missing or ())
    if as_json:
        _print_json(report.to_json())
    else:
        _print_report(report)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def convert(
    src: Annotated[Path, typer.Argument(help="Folder to read, its config.json beside the weights.")],
    dst: Annotated[Path, typer.Argument(help="Folder to write; it must not exist or be empty.")],
    to: Annotated[To, typer.Option(help="Layout to write.")],
    dtype: Annotated[
        Store,
        typer.Option(help="keep: lossless; bf16, fp32: what the release keeps in fp32 stays so; released: fp8 and FP4."),
    ] = Store.keep,
    config: Annotated[Path | None, typer.Option(help="Settings (default: the folder's config.json).")] = None,
    without_mtp: Annotated[bool, typer.Option("--without-mtp", help="Leave out the MTP layer.")] = False,
    shard_gb: Annotated[float, typer.Option(help="Largest file, in GB.", min=1e-6)] = 5.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the weights in DST.")] = False,
) -> None:
    """Write the weights of SRC to DST in another layout, one tensor at a time; DST appears when it is complete."""
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _telling(), Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting", total=None)
        convert_folder(
            src,
            dst,
            to=to.value,
            dtype=_STORE_AS[dtype],
            config=read(config) if config else None,
            without_mtp=without_mtp,
            max_shard_bytes=int(shard_gb * 1e9),
            overwrite=overwrite,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    written = Source(dst)
    files = {h.file for h in written.headers.values()}
    typer.echo(f"wrote {len(written.headers):,} tensors in {len(files)} files to {dst} ({to.value} layout)")
    left = [p.name for p in sorted(Path(src).glob("*")) if p.is_file() and p.suffix not in (".safetensors",)]
    left = [name for name in left if name not in ("config.json", "model.safetensors.index.json")]
    if left:
        typer.echo(f"not copied: {', '.join(left)}")


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _layout_or_reason(source: Source) -> str:
    try:
        return source.layout()
    except WeightsError as error:
        return f"unknown ({error.what})"


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def _print_report(report: CheckReport) -> None:
    console = Console()
    console.print(f"{report.folder}: {report.layout} layout, {report.tensors:,} tensors", soft_wrap=True, highlight=False)
    if report.not_loaded:
        console.print(f"{len(report.not_loaded)} absent, as allowed")
    if report.ok:
        console.print("every key, shape and dtype fits", style="green")
        return
    table = Table("wrong", "how many", "first of them")
    for kind, lines in report.problems.items():
        if lines:
            table.add_row(kind, str(len(lines)), "\n".join(lines[:5]))
    console.print(table)
