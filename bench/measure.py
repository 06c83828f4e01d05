"""How a benchmark measures: interleaved timing of several sides, and the peak of what a call allocates."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

Call = Callable[[], object]


def seconds(
    sides: Mapping[str, Call], *, repeats: int, warmup: int = 2, progress: Progress | None = None
) -> dict[str, float]:
    """Median wall time of each side, interleaved A B A B, so that a slow minute hits both."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    task = progress.add_task("timing", total=(warmup + repeats) * len(sides)) if progress else None
    for i in range(warmup + repeats):
        for name, call in sides.items():
            began = time.perf_counter()
            call()
            if i >= warmup:
                times[name].append(time.perf_counter() - began)
            if progress is not None and task is not None:
                progress.advance(task)
    return {name: statistics.median(t) for name, t in times.items()}


def peak_bytes(call: Call) -> int:
    """Largest number of bytes allocated by tensors during the call, over what was allocated before it.

    Read from the allocator's own events, so that eager and compiled code are measured alike.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    if not memory:
        return 0
    totals = [int(e["args"]["Total Allocated"]) for e in memory]
    return max(totals) - (totals[0] - int(memory[0]["args"]["Bytes"]))


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One line of JSON more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
