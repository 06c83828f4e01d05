"""The command ``dsv4c``: mounts the command groups and turns errors into messages and exit statuses.

Exit status: 0 done; 1 the answer is no (a violation, a regression, a non-finite loss); 2 usage or input error.
"""

from __future__ import annotations

import os
import sys
import warnings

import typer
from rich.console import Console
from rich.markup import escape

from dsv4c.errors import Dsv4Error

# Threads of torch's CPU kernels sleep while they wait instead of spinning. On a machine whose cores are shared, spinning
# threads keep the very thread they wait for from running: a small kernel was measured at 10 ms instead of 0.5 ms.
# Must be set before torch is imported; the caller's own setting stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(
    name="dsv4c",
    help="Train DeepSeek-V4 models with torch.compile, and see what happens inside.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _mount() -> None:
    from dsv4c.cli import bench, weights
    from dsv4c.cli.environment import env
    from dsv4c.cli.report import report
    from dsv4c.cli.train import train
    from dsv4c.cli.verify import verify

    for command in (train, verify, report, env):
        app.command()(command)
    for name, group in (("weights", weights.app), ("bench", bench.app)):
        app.add_typer(group, name=name)


def main() -> None:
    """Entry point of the console script."""
    _mount()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        app()
    except OSError as error:
        where = f"\n  where:   {error.filename}" if error.filename else ""
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error.strerror or error) + where)}")
        sys.exit(2)
    except Exception as raised:
        ours = raised if isinstance(raised, Dsv4Error) else getattr(raised, "inner_exception", None)
        if not isinstance(ours, Dsv4Error):  # what a pass raises, torch.compile wraps
            raise
        kind = "error" if ours.exit_status == 2 else type(ours).__name__
        Console(stderr=True, soft_wrap=True).print(f"[bold red]{kind}:[/] {escape(str(ours))}", highlight=False)
        sys.exit(ours.exit_status)
