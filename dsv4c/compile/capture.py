"""The joint forward and backward graph of a module, with every parameter, objective and gradient by name.

Works on the meta device at any width, and with symbolic batch and sequence sizes; every node knows its module and the line
of code that made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsv4c.model.norms import RMSNorm
from dsv4c.model.objectives import POLICIES
from dsv4c.model.precision import KeepsFp32
from dsv4c.model.transformer import DeepseekV4
from dsv4c.passes.graph import module_of, reach
from dsv4c.passes.verify.subject import Objective, Parameter, Subject
from dsv4c.reach import Reach
from dsv4c.torch_compat import Joint, export_joint, prepare_compiler

ROUTERS = ("*.ffn.gate.weight",)  # where a model of ours keeps its routers


class _Outputs(nn.Module):
    """A model whose forward returns its losses and metrics and nothing else."""

    def __init__(self, model: DeepseekV4) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, targets: Tensor) -> dict[str, dict[str, Tensor]]:
        out = self.model(input_ids, targets)
        return {"losses": out.losses, "metrics": out.metrics}


def reduced_precision() -> dict[str, bool]:
    """Settings of this process under which an fp32 matrix product is none, and whether they are on."""
    return {
        'torch.set_float32_matmul_precision("highest") is not in effect': torch.get_float32_matmul_precision() != "highest",
        "torch.backends.cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "torch.backends.cuda.matmul.allow_fp16_accumulation": torch.backends.cuda.matmul.allow_fp16_accumulation,
    }


def _subject(
    name: str, joint: Joint, policies: Mapping[str, Reach], routers: tuple[str, ...], *, inside: str = "", losses: str = "",
    fp32: tuple[str, ...] = (), coefficients: Mapping[str, float] | None = None, watched: tuple[str, ...] = (),
) -> Subject:  # fmt: skip
    """A captured graph as the rules see it: parameters and modules inside ``inside``, objectives under ``losses``."""
    for node in joint.module.graph.nodes:
        node.meta["module"] = module_of(node).removeprefix(inside)
    outputs = {key.removeprefix(losses): key for key in joint.outputs}
    return Subject(
        name, joint.module, "joint",
        {o: Objective(joint.outputs[k], joint.tangents.get(k), policies[o]) for o, k in outputs.items() if o in policies},
        {n.removeprefix(inside): Parameter(*pair) for n, pair in joint.parameters.items()},
        {n.removeprefix(inside): node for n, node in joint.buffers.items()},
        {o: joint.outputs[k] for o, k in outputs.items() if o not in policies},
        tuple(policies), routers, reduced_precision(), fp32, coefficients or {}, watched,
    )  # fmt: skip


def capture_module(
    module: nn.Module, args: tuple[Any, ...], policies: Mapping[str, Reach], *, routers: tuple[str, ...] = (),
    dynamic: Mapping[int, tuple[int, ...]] | None = None,
) -> Subject:  # fmt: skip
    """Any module whose forward returns a dict of tensors, on any device, ``meta`` included; policies: its losses."""
    return _subject(type(module).__name__, export_joint(module, args, dynamic), policies, routers)


def capture_model(model: DeepseekV4, *, seq_len: int, batch_size: int = 1, symbolic: bool = False) -> Subject:
    """A model's losses and metrics, parameters under the model's own names; ``symbolic``: sizes of batch and sequence.

    Captured under the settings with which :func:`dsv4c.compile.backend.compile_model` compiles.
    """
    prepare_compiler()
    ids, targets = (torch.zeros(batch_size, seq_len, dtype=torch.long, device=model.embed.weight.device) for _ in range(2))
    joint = export_joint(_Outputs(model), (ids, targets), {0: (0, 1), 1: (0, 1)} if symbolic else None)
    policies = {name: policy_of(model, name) for name in model.objectives}
    return _subject(
        "DeepseekV4", joint, policies, ROUTERS, inside="model.", losses="losses.", fp32=fp32_parameters(model),
        coefficients=coefficients(model), watched=watched(model),
    )  # fmt: skip


def fp32_parameters(model: nn.Module) -> tuple[str, ...]:
    """Parameters and buffers that stay in fp32; norm weights may be stored in bf16, where they are used widened."""
    keepers = [(path, m) for path, m in model.named_modules() if isinstance(m, KeepsFp32) and not isinstance(m, RMSNorm)]
    return tuple(f"{path}.{name}" for path, m in keepers for name in m.fp32_parameters)


def watched(model: DeepseekV4) -> tuple[str, ...]:
    """In the indexer's warm-up only the distillation trains; the other losses are looked at."""
    return tuple(o for o in model.objectives if model.stage == "indexer_warmup" and o != "indexer_kl")


def coefficients(model: DeepseekV4) -> dict[str, float]:
    """What the mean of each objective is multiplied by."""
    c = model.config
    each = {
        "lm": 1.0, "mtp": model.mtp_loss_coef / max(c.num_nextn_predict_layers, 1),
        "seq_balance": c.seq_balance_loss_coef, "indexer_kl": c.indexer_kl_coef,
    }  # fmt: skip
    return {name: each[name] for name in model.objectives}


def policy_of(model: DeepseekV4, objective: str) -> Reach:
    """The objective's policy, less what this model does not have: hash routers have no balance loss, no MTP layer needs
    parameters where there is none."""
    policy = POLICIES[objective]
    hashed = tuple(f"{name}.weight" for name, m in model.named_modules() if getattr(m, "hashed", False))
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    exempt = (*policy.exempt, *frozen, *(hashed if objective == "seq_balance" else ()))
    return Reach(policy.may, policy.must, policy.never, exempt)


def trained_by(subject: Subject, objective: str) -> set[str]:
    """The parameters whose gradients the objective's tangent reaches: structure, not values."""
    tangent = subject.objectives[objective].tangent
    reached = reach([tangent]) if tangent is not None else set()
    return {name for name, p in subject.parameters.items() if p.gradient in reached}
