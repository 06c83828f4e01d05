"""`dsv4c report RUN`: a run folder as one HTML page that needs nothing else, neither files beside it nor a network.

Reads `run.json`, `log.jsonl` and the list of checkpoints; draws with `dsv4c.cli.report_figures`; the page itself is
`report.html.j2`.  A run that is still going, or was killed in the middle of a line, is reported as far as it got.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer
from rich.console import Console

from dsv4c.cli import report_figures as figures
from dsv4c.errors import DataError
from dsv4c.train.checkpoint import list_checkpoints
from dsv4c.train.log import LOG, PASSES, RUN, read_log

PAGE = "report.html"
TEMPLATE = "report.html.j2"


def write_report(run_dir: str | Path) -> Path:
    """Writes ``run_dir/report.html`` and returns its path.

    Raises:
        DataError: no such folder, no run in it, nothing logged yet, or a file that cannot be read; the message names
            it.
    """
    folder = Path(run_dir)
    run, records = _read_run(folder), _read_records(folder)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template(TEMPLATE).render(
        name=folder.resolve().name,
        run=run,
        command=" ".join(run.get("command", [])),
        config=list(flatten(run.get("config", {}))),
        first=records[0],
        last=records[-1],
        objectives=summary(records),
        lines=len(records),
        nonfinite=[(r["step"], r["nonfinite"]) for r in records if r.get("nonfinite")],
        checkpoints=[(p.name, _size(p)) for p in list_checkpoints(folder / "checkpoints")],
        sections=figures.sections(records),
        regions=_read_regions(folder),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    path = folder / PAGE
    path.write_text(page, encoding="utf-8")
    return path


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """First, last and lowest value of each objective over the lines in which it was on; None where not finite."""
    rows = []
    for name in figures.objective_names(records):
        values = [r["losses"][name] for r in records if name in r["losses"]]
        finite = [v for v in values if v is not None]
        rows.append({"name": name, "first": values[0], "last": values[-1], "lowest": min(finite) if finite else None})
    return rows


def flatten(config: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Dotted keys and printable values of a nested configuration."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value)


def _read_run(folder: Path) -> dict[str, Any]:
    path = folder / RUN
    if not folder.is_dir():
        raise DataError("there is no such run", where=str(folder), do="give the folder that `dsv4c train --out` wrote")
    if not path.is_file():
        raise DataError(
            f"this folder holds no run: {RUN} is missing",
            where=str(folder),
            do="give the folder that `dsv4c train` wrote",
        )
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"the run's description cannot be read: {error}", where=str(path), allowed="JSON") from error
    if not isinstance(run, dict):
        raise DataError("the run's description is no JSON object", where=str(path))
    return run


def _read_records(folder: Path) -> list[dict[str, Any]]:
    path = folder / LOG
    records = read_log(path) if path.is_file() else []
    if not records:
        raise DataError(
            "the run has logged nothing yet", where=str(path), do="wait for its first log line, then report again"
        )
    return records


def _read_regions(folder: Path) -> list[dict[str, Any]]:
    """What the passes did to each compiled region; nothing where the run was not compiled."""
    path = folder / PASSES
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]  # a run that was killed may end within a line


def _size(folder: Path) -> str:
    return f"{sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) / 1e6:,.1f} MB"


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, as given to train --out.")],
) -> None:
    """Write a run's curves, expert load, configuration and versions as one HTML page."""
    Console(soft_wrap=True).print(f"report: {write_report(run)}", highlight=False)
