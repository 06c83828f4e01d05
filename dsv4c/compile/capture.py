"""The joint forward and backward graph of a module, with every parameter, objective and gradient by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dsv4c.model.transformer import DeepseekV4
from dsv4c.passes.graph import reach
from dsv4c.torch_compat import export_joint


@dataclass(frozen=True)
class JointGraph:
    """A captured graph.

    ``tangents``: objective -> the placeholder of its incoming gradient; ``gradients``: parameter -> the node of its
    gradient, None where no objective reaches it.
    """

    module: GraphModule
    tangents: Mapping[str, Node]
    gradients: Mapping[str, Node | None]

    def trained_by(self, objective: str) -> set[str]:
        """The parameters whose gradients the objective's tangent reaches: structure, not values."""
        reached = reach([self.tangents[objective]])
        return {name for name, node in self.gradients.items() if node in reached}


def capture(module: nn.Module, args: tuple[Any, ...]) -> JointGraph:
    """The joint graph of a module whose forward returns a dict of scalar losses; any device, ``meta`` included.

    Objectives that do not depend on a parameter have no tangent and are left out.
    """
    return JointGraph(*export_joint(module, args))


class Losses(nn.Module):
    """A model whose forward returns its losses and nothing else."""

    def __init__(self, model: DeepseekV4) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return dict(self.model(input_ids, targets).losses)


def capture_losses(model: DeepseekV4, *, seq_len: int, batch_size: int = 1) -> JointGraph:
    """The joint graph of a model's objectives, parameters under the model's own names."""
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device=model.embed.weight.device)
    joint = capture(Losses(model), (ids, ids))
    return JointGraph(joint.module, joint.tangents, {k.removeprefix("model."): v for k, v in joint.gradients.items()})
