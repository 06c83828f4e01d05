"""One optimiser step: micro-batches through the compiled model, clipping, update, routing bias.

Stands between the loop, which decides what happens when, and the model.  What every objective is divided by is counted over
all micro-batches (and processes) before the first forward, so that the split into micro-batches never changes a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from dsv4c.compile.backend import compile_model
from dsv4c.errors import ConfigError, DataError
from dsv4c.model import objectives
from dsv4c.model.layout import rows
from dsv4c.model.objectives import Counts
from dsv4c.model.transformer import DeepseekV4
from dsv4c.train.diagnosis import nonfinite
from dsv4c.train.optim import SplitOptimizer, clip_gradients

DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
BATCH_KEYS = ("input_ids", "targets", "document_ids", "padding_mask", "position_ids")

Batch = Mapping[str, Tensor]


class TrainStep:
    """``step(batches)`` runs ``grad_accum`` micro-batches and one update.

    Args:
        model: compiled here unless it is already, or unless ``compile`` is False.
        optimizer: any ``torch.optim.Optimizer`` over the model's parameters (:func:`dsv4c.train.optim.build_optimizer`).
        grad_accum: micro-batches per update.
        dtype: ``"fp32"``, or ``"bf16"`` for autocast with fp32 parameters.
        grad_clip: largest global L2 norm of the gradient; None does not clip.
        compile_options: go to :func:`dsv4c.compile.backend.compile_model`.

    Attributes:
        steps: updates done (set it when a run is resumed: error messages name the step).
        expert_load: [layers,E] real tokens sent to each expert in the last step.

    Raises:
        NonFiniteError: a loss or gradient that is NaN or infinite, before anything is updated.
        DataError: another number of batches than ``grad_accum``, or keys that the model does not take.
    """

    def __init__(
        self,
        model: DeepseekV4,
        optimizer: torch.optim.Optimizer,
        *,
        grad_accum: int = 1,
        dtype: str = "fp32",
        grad_clip: float | None = 1.0,
        compile: bool = True,
        **compile_options: Any,
    ) -> None:
        if grad_accum < 1:
            raise ConfigError(f"grad_accum is {grad_accum}", where="TrainStep", allowed="1 or more", do="correct it")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}", where="TrainStep", allowed=", ".join(DTYPES), do="choose one of these")
        self.model = compile_model(model, **compile_options) if compile and not model.is_compiled else model
        self.optimizer, self.grad_accum, self.grad_clip = optimizer, grad_accum, grad_clip
        self.autocast_dtype = DTYPES[dtype]
        if objectives.n_processes() > 1:
            raise ConfigError(
                f"{objectives.n_processes()} processes", where="TrainStep", allowed="one process",
                do="train on one process: gradients are not summed over processes",
            )  # fmt: skip
        self.steps = 0
        self._checked_stage: str | None = None
        self.expert_load: Tensor | None = None

    def step(self, batches: Sequence[Batch] | Batch) -> dict[str, float]:
        """One update on ``grad_accum`` batches: dicts of ``input_ids``, ``targets`` [B,S] and what else the model takes.

        Returns ``loss`` (the sum), every objective that is on by its name (coefficient included), ``raw/NAME`` without it,
        ``captured_mass`` where an indexer selects, ``grad_norm`` and ``grad_norm/GROUP``.
        """
        moved = self._on_device(batches)
        self._check_optimizer()
        counts = self._count(moved)
        self.optimizer.zero_grad(set_to_none=True)
        losses: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        for batch in moved:
            with self._autocast(batch["input_ids"].device):
                out = self.model(**batch, counts=counts)
            total_loss = reduce(add, out.losses.values())
            if not total_loss.requires_grad:
                raise DataError(
                    "nothing in this batch can be trained on", where=f"TrainStep.step, stage {self.model.stage}",
                    allowed="in the indexer's warm-up, rows of at least 4 tokens", do="use longer rows",
                )  # fmt: skip
            total_loss.backward()
            for total, new in ((losses, out.losses), (metrics, out.metrics)):
                for name, value in new.items():
                    total[name] = total[name] + value.detach() if name in total else value.detach()
        if "captured_mass" in metrics:
            # A share of attention is averaged; everything else is a part of a whole and adds up.
            metrics["captured_mass"] = metrics["captured_mass"] / (len(moved) * objectives.n_processes())
        load = objectives.over_batch(metrics.pop("expert_load"))
        result = self._report(losses, metrics)
        norms = clip_gradients(self.model, self.grad_clip)
        if not math.isfinite(result["loss"]) or not math.isfinite(norms["global"]):
            raise nonfinite(self.model, moved, counts, self._autocast, result, step=self.steps + 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.update_router_bias(load)
        self.steps += 1
        self.expert_load = load
        return result | {"grad_norm": norms.pop("global"), **{f"grad_norm/{k}": v for k, v in norms.items()}}

    def _check_optimizer(self) -> None:
        """Once per stage: what the stage trains is what the optimizer has."""
        if self._checked_stage == self.model.stage:
            return
        if isinstance(self.optimizer, SplitOptimizer):
            self.optimizer.refresh(self.model)
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        lost = [n for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in held]
        if lost:
            raise ConfigError(
                f"{len(lost)} parameters are to be trained and are not in the optimizer", where=", ".join(lost[:3]),
                allowed="every parameter that requires a gradient", do="build the optimizer from this model's parameters",
            )  # fmt: skip
        self._checked_stage = self.model.stage

    def _on_device(self, batches: Sequence[Batch] | Batch) -> list[dict[str, Tensor]]:
        given = [batches] if isinstance(batches, Mapping) else list(batches)
        if len(given) != self.grad_accum:
            raise DataError(
                f"{len(given)} micro-batches for grad_accum={self.grad_accum}", where="TrainStep.step",
                allowed=f"a list of {self.grad_accum} batches", do="pass as many batches as grad_accum says",
            )  # fmt: skip
        for i, batch in enumerate(given):
            missing, unknown = {"input_ids", "targets"} - set(batch), set(batch) - set(BATCH_KEYS)
            if missing or unknown:
                raise DataError(
                    f"a batch {'lacks' if missing else 'has the unknown key'} {', '.join(sorted(missing or unknown))}",
                    where=f"TrainStep.step, batch {i}", allowed=", ".join(BATCH_KEYS), do="correct the batch",
                )  # fmt: skip
        device = self.model.embed.weight.device
        return [{k: v.to(device, non_blocking=True) for k, v in batch.items()} for batch in given]

    def _count(self, batches: Sequence[Batch]) -> Counts:
        """What the objectives are divided by, over all micro-batches and processes."""
        each = []
        for b in batches:
            at = rows(b["input_ids"], b.get("document_ids"), b.get("padding_mask"), b.get("position_ids"))
            each.append(objectives.count(b["targets"], at))
        return Counts(*(objectives.over_batch(c) for c in reduce(add, each)))

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)

    def _report(self, losses: dict[str, Tensor], metrics: dict[str, Tensor]) -> dict[str, float]:
        """Everything as floats, moved to the host in one piece."""
        raw = {name if name == "captured_mass" else f"raw/{name}": value for name, value in metrics.items()}
        named = {**losses, **raw}
        values = objectives.over_batch(torch.stack([v.double() for v in named.values()]) if named else torch.empty(0))
        result = dict(zip(named, values.tolist(), strict=True))
        return {"loss": math.fsum(result[name] for name in losses), **result}
