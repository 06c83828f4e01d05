"""The figures of a report, as inline SVG that follows the page's colours.

Matplotlib draws text, axes and ticks in a colour of its own, which is then replaced by ``currentColor``: the same
drawing reads on a light and on a dark page.  Lines take mid-tones that keep their contrast on both.
"""

from __future__ import annotations

import hashlib
import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

Records = list[dict[str, Any]]
Point = tuple[int, float]

INK = "#010203"
COLOURS = ("#3d85c6", "#e07b39", "#4c9f70", "#c25b8a", "#8a6fd1", "#b0892f", "#3aa6a6", "#d0504f", "#7f8c8d", "#6b9e2f")
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dsv4c",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
}
SMOOTHING = 0.05
"""Width of the moving average as a share of the run."""
TITLES = {
    "lm": "lm (next token)",
    "mtp": "mtp (token after next)",
    "seq_balance": "seq_balance",
    "indexer_kl": "indexer_kl",
}


@dataclass(frozen=True)
class Drawing:
    """A figure of the page: its SVG and the sentence below it."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading of the page and its figures; ``empty`` says why there are none."""

    title: str
    drawings: list[Drawing]
    empty: str = ""


def sections(records: Records) -> list[Section]:
    """All figures that the records have data for, in the order of the page."""
    return [
        Section("Objectives", [_objective(records, name) for name in objective_names(records)]),
        Section("Optimisation", [_gradients(records), _single(records, "lr", "learning rate")]),
        Section("Speed", [_single(records, "tokens_per_s", "tokens per second")]),
        Section("Experts", _experts(records), "No record has an expert load."),
        Section("Indexer", _captured(records), "No record has a captured mass: no sparse attention has run."),
    ]


def objective_names(records: Records) -> list[str]:
    """Every objective that was on in any record, in the order of first appearance."""
    return list(dict.fromkeys(name for r in records for name in r["losses"]))


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Moving average over at most ``width`` values: centred, but for the end of the run, where it looks back only.

    At the start the window shrinks on both sides, so that a steep first descent is not flattened.
    """
    half = max(0, (width - 1) // 2)
    result = []
    for i in range(len(values)):
        reach = min(half, i)
        window = values[i - reach : i + reach + 1]
        result.append(sum(window) / len(window))
    return result


def imbalance(load: Sequence[Sequence[float]]) -> list[float]:
    """Busiest expert over the mean, per layer: 1 is balanced, E is everything on one expert; NaN for a layer without
    load.
    """
    return [max(layer) * len(layer) / total if (total := sum(layer)) > 0 else math.nan for layer in load]


def draw(paint: Callable[[Axes], None], caption: str, size: tuple[float, float] = (5.2, 2.7)) -> Drawing:
    """Lets ``paint`` fill one pair of axes, and turns them into SVG in the page's colour."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        paint(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    # Several drawings share one page, and every one of them would have an element called figure_1.
    prefix = "f" + hashlib.sha256(caption.encode()).hexdigest()[:8]
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    return Drawing(svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(caption)}" ', 1), caption)


def _points(records: Records, read: Callable[[dict[str, Any]], Any]) -> list[Point]:
    pairs = ((r["step"], read(r)) for r in records)
    return [(step, float(v)) for step, v in pairs if v is not None]


def _curve(axes: Axes, points: list[Point], colour: str, label: str | None = None) -> None:
    """Raw values thin and pale, their moving average strong; a single point as a dot."""
    steps, values = [p[0] for p in points], [p[1] for p in points]
    width = round(len(points) * SMOOTHING)
    if width >= 3:
        axes.plot(steps, values, color=colour, alpha=0.35, linewidth=0.8)
        values = smooth(values, width)
    axes.plot(steps, values, color=colour, label=label, marker="o" if len(points) == 1 else None)


def _finish(axes: Axes, records: Records, title: str, *, from_zero: bool = False) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(color=INK, alpha=0.12, linewidth=0.5)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    if from_zero:
        axes.set_ylim(bottom=0)
    changes = [b for a, b in pairwise(records) if a.get("stage") != b.get("stage")]
    for row, after in enumerate(changes):
        axes.axvline(after["step"], color=INK, alpha=0.5, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            str(after["stage"]), (after["step"], 1), xycoords=("data", "axes fraction"), xytext=(3, -2 - 10 * row),
            textcoords="offset points", va="top", fontsize=8,
        )  # fmt: skip


def _objective(records: Records, name: str) -> Drawing:
    points = _points(records, lambda r: r["losses"].get(name))

    def paint(axes: Axes) -> None:
        _curve(axes, points, COLOURS[objective_names(records).index(name) % len(COLOURS)])
        _finish(axes, records, TITLES.get(name, name))

    last = f"{points[-1][1]:.4g} at step {points[-1][0]}" if points else "never finite"
    return draw(paint, f"{name}: {last}. Pale: logged values; strong: moving average.")


def _gradients(records: Records) -> Drawing:
    names = list(dict.fromkeys(n for r in records for n in r["grad_norm"]))

    def paint(axes: Axes) -> None:
        for i, name in enumerate(names):
            points = _points(records, lambda r, name=name: r["grad_norm"].get(name))  # type: ignore[misc]  # bound now
            _curve(axes, [p for p in points if p[1] > 0], COLOURS[i % len(COLOURS)], name)
        axes.set_yscale("log")
        _finish(axes, records, "gradient norm by group")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)

    return draw(paint, "L2 norm of the gradient before clipping, by parameter group (logarithmic).", (6.4, 3.0))


def _single(records: Records, key: str, title: str) -> Drawing:
    points = _points(records, lambda r: r.get(key))

    def paint(axes: Axes) -> None:
        _curve(axes, points, COLOURS[0])
        _finish(axes, records, title, from_zero=True)
        if key == "tokens_per_s":
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))

    return draw(paint, f"{title}: {points[-1][1]:,.4g} at step {points[-1][0]}." if points else title)


def _captured(records: Records) -> list[Drawing]:
    points = _points(records, lambda r: r["metrics"].get("captured_mass"))

    def paint(axes: Axes) -> None:
        _curve(axes, points, COLOURS[2])
        _finish(axes, records, "captured mass")
        axes.set_ylim(0, 1.02)

    caption = "Share of the true attention that falls on the entries the indexer selects; 1 is all of it."
    return [draw(paint, caption)] if points else []


def _experts(records: Records) -> list[Drawing]:
    loads = [(r["step"], r["expert_load"]) for r in records if r.get("expert_load")]
    return [_heat_map(*loads[-1]), _imbalance(records, loads)] if loads else []


def _heat_map(step: int, load: list[list[float]]) -> Drawing:
    shares = [[v * len(layer) / (sum(layer) or 1) for v in layer] for layer in load]

    def paint(axes: Axes) -> None:
        image = axes.imshow(
            shares, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=max(2.0, _top(shares))
        )
        axes.set(title=f"expert load at step {step}", xlabel="expert", ylabel="layer with a router")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        bar = axes.figure.colorbar(image, ax=axes, label="load / mean of the layer")
        bar.outline.set_visible(False)  # type: ignore[operator]  # typed as the patch's colour

    caption = "Tokens per expert over the mean of its layer: 1 is balanced, 0 an expert that nothing reaches."
    return draw(paint, caption, (5.8, min(6.0, 1.6 + 0.12 * len(load))))


def _top(rows: list[list[float]]) -> float:
    return max(max(row) for row in rows)


def _imbalance(records: Records, loads: list[tuple[int, list[list[float]]]]) -> Drawing:
    per_step = [(step, [v for v in imbalance(load) if math.isfinite(v)]) for step, load in loads]

    def paint(axes: Axes) -> None:
        _curve(axes, [(s, max(v)) for s, v in per_step if v], COLOURS[1], "worst layer")
        _curve(axes, [(s, sum(v) / len(v)) for s, v in per_step if v], COLOURS[0], "mean of the layers")
        _finish(axes, records, "busiest expert / mean")
        axes.set_ylim(bottom=1)
        axes.legend(loc="upper right", fontsize=8)

    return draw(paint, "Load of the busiest expert over the mean of its layer: 1 is balanced.")
