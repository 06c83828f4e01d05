"""How the memory of a layer grows with the sequence: the peak of a CSA layer's forward and backward, and a straight line.

What attention and indexer would write if they wrote it ([B,H,S,P], [B,S,Hi,P], [B,H,S,S]) grows with the square of S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from dsv4c.bench.measure import peak_bytes
from dsv4c.config import ModelConfig
from dsv4c.model.transformer import DeepseekV4


def csa_layer(preset: str) -> DeepseekV4:
    """A model of one CSA layer with a learned router, of the widths of a preset."""
    config = ModelConfig.preset(preset)
    return DeepseekV4(
        config.replace(num_hidden_layers=1, compress_ratios=(4,), num_hash_layers=0, num_nextn_predict_layers=0)
    )


def memory_growth(preset: str, *, lengths: Sequence[int], progress: Progress | None = None) -> dict[str, Any]:
    """Peak bytes of forward and backward at each length; the least-squares line and its largest relative deviation.

    ``square``: the share of the peak at the greatest length that the quadratic term of a parabola through the same points
    accounts for; 0 for a straight line, about 1 for a square.
    """
    torch.manual_seed(0)
    model = csa_layer(preset)
    task = progress.add_task("measuring", total=len(lengths)) if progress else None
    peaks = []
    for n in lengths:
        ids = torch.randint(0, model.config.vocab_size, (1, n))

        def step(ids: torch.Tensor = ids) -> None:
            sum(model(ids, ids).losses.values(), torch.zeros(())).backward()
            model.zero_grad()

        peaks.append(peak_bytes(step))
        if progress is not None and task is not None:
            progress.advance(task)
    slope, start = np.polyfit(lengths, peaks, 1)
    line = slope * np.asarray(lengths) + start
    square = np.polyfit(lengths, peaks, 2)[0] * max(lengths) ** 2 / max(peaks)
    return {
        "bench": "memory", "preset": preset, "lengths": list(lengths), "peak_bytes": peaks, "bytes_per_token": float(slope),
        "bytes_at_zero": float(start), "deviation": float(np.max(np.abs(line / np.asarray(peaks) - 1))),
        "square": float(square),
    }  # fmt: skip
