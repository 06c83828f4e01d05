"""The objectives: what each loss is, what it is divided by, and what it may train.

Each objective is an output of its own, never a term of a sum formed inside: only then can be checked what its gradient
reaches.  Losses are sums over a batch divided by counts of the WHOLE batch, so that the split into micro-batches and ranks
never changes a gradient (specification, sections 7 and 9).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.traceback import annotate

from dsv4c.model.layout import Rows
from dsv4c.reach import Reach

IGNORED = -100


POLICIES: dict[str, Reach] = {
    "lm": Reach(never=("*.indexer.*", "mtp.*"), must=("embed.weight", "head.weight", "layers.*.attn.wkv.weight")),
    "mtp": Reach(
        never=("*.indexer.*", "norm.weight", "hc_head.*"), must=("mtp.*.e_proj.weight", "mtp.*.h_proj.weight")
    ),
    "seq_balance": Reach(
        never=("*.indexer.*", "head.weight", "norm.weight", "*hc_head.*"), must=("*ffn.gate.weight",)
    ),
    "indexer_kl": Reach(may=("*.indexer.*",), must=("*.indexer.*",)),
}  # fmt: skip


def objective(name: str) -> AbstractContextManager[None]:
    """Marks what is computed inside as the objective ``name``, for the passes that read the compiled graph.

    The last value computed is the objective itself.  Costs nothing when the graph is run.
    """
    return annotate({"objective": name})


class Counts(NamedTuple):
    """What the losses of a batch are divided by; 0-d fp32 tensors."""

    lm: Tensor  # tokens with a target
    mtp: Tensor  # tokens with a next token in their document and a target after it
    documents: Tensor  # documents with a real token; a row without document ids is one
    mtp_documents: Tensor  # documents with at least two
    queries: Tensor  # real tokens

    def __add__(self, other: object) -> Counts:
        """Counts of two micro-batches together."""
        if not isinstance(other, Counts):
            return NotImplemented
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


def over_batch(value: Tensor) -> Tensor:
    """The sum over all processes of a fact about the whole batch; the value itself on one process."""
    if n_processes() > 1:
        value = value.clone()
        dist.all_reduce(value)
    return value


def n_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def has_next(at: Rows) -> Tensor:
    """[B,S] bool: the token has a next real token in its document (within the row)."""
    index = torch.arange(at.start.shape[1], device=at.start.device)
    return at.real & (index < at.end)


def shifted(x: Tensor, fill: int) -> Tensor:
    """x one position to the left: ``y[t] = x[t+1]``, ``fill`` at the end (never wrapped around, B18)."""
    return torch.cat((x[:, 1:], torch.full_like(x[:, :1], fill)), 1)


def lm_targets(targets: Tensor, at: Rows) -> Tensor:
    return torch.where(at.real, targets, IGNORED)


def mtp_targets(targets: Tensor, at: Rows) -> Tensor:
    """Position t predicts the token after the next one: the target of position t+1, in the same document."""
    return torch.where(has_next(at), shifted(targets, IGNORED), IGNORED)


def count(targets: Tensor, at: Rows) -> Counts:
    """The counts of one micro-batch on one process."""
    index = torch.arange(at.start.shape[1], device=at.start.device)
    begins = at.real & (index == at.start)
    totals = (
        lm_targets(targets, at) != IGNORED,
        mtp_targets(targets, at) != IGNORED,
        begins,
        begins & has_next(at),
        at.real,
    )
    return Counts(*(t.sum().float() for t in totals))


def mean(total: Tensor, n: Tensor) -> Tensor:
    """total / n; 0 where nothing was counted."""
    return total / n.clamp(min=1).to(total.dtype)
