"""Which optimizer trains which parameter, and what happens to the gradients before it does.

Stands between the backward pass and the weights: `clip_gradients` first, then `SplitOptimizer.step`.

Which parameter goes where is a table in `dsv4c.train.assignment`; the learning rate comes from `dsv4c.train.schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from dsv4c.errors import CheckpointError, ConfigError
from dsv4c.train.assignment import matrix_rows, parameter_names, rule_for
from dsv4c.train.muon import Muon

LARGEST = 1e37
"""Of any setting: beyond it, products overflow in fp32."""


@dataclass(frozen=True)
class OptimConfig:
    """Settings of both optimizers; the defaults are those of the paper's smaller model.

    The learning-rate schedule itself is `dsv4c.train.schedule.LrSchedule`; ``indexer_lr_scale`` multiplies whatever
    it says for the indexer's parameters.
    """

    lr: float = 2.7e-4
    min_lr_ratio: float = 0.1
    warmup_steps: int = 2000
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-20
    weight_decay: float = 0.1
    decay_vectors: bool = True
    grad_clip: float | None = 1.0
    muon_momentum: float = 0.95
    muon_update_rms: float = 0.18
    indexer_lr_scale: float = 1.0

    def __post_init__(self) -> None:
        upper = {"min_lr_ratio": 1.0, "muon_momentum": 1.0}
        above_zero = ("eps", "grad_clip", "muon_update_rms", "lr")
        for name, value in vars(self).items():
            values = value if name == "betas" else (value,)
            if name == "decay_vectors" or value is None:
                continue
            top = 1.0 if name == "betas" else upper.get(name, LARGEST)
            for v in values:
                if isinstance(v, (bool, str)) or not 0 <= v <= top or v == math.inf or (name in above_zero and v == 0):
                    raise ConfigError(f"{name} is {value!r}", allowed=f"a number from 0 to {top}, finite")


GRADIENT_GROUPS: tuple[tuple[str, str], ...] = (
    ("mtp.*", "mtp"),
    ("*.indexer.*", "indexer"),
    ("*hc_*", "hyper_connections"),
    ("*norm.weight", "norms"),
    ("*.ffn.gate.*", "router"),
    ("*.ffn.*", "moe"),
    ("*.attn.*", "attention"),
    ("embed.weight", "embedding"),
    ("head.weight", "embedding"),
    ("*", "other"),
)
"""Name pattern -> group of the gradient norms that people watch.  First match wins."""


class SplitOptimizer(torch.optim.Optimizer):
    """AdamW and Muon behind the interface of one `torch.optim.Optimizer`.

    ``param_groups`` are the live groups of both, so that schedulers work on them.  Each has a ``name`` made of the
    algorithm, ``main`` or ``indexer``, the parameters' dtype and ``no_decay`` where it applies: fp32 parameters
    never share a group with lower-precision ones.  Groups exist for frozen parameters too, and stay empty until
    `refresh` finds them thawed, so that the number of groups never changes in a run.  States are keyed by parameter
    name in `state_dict`, and survive freezing.

    Raises:
        ConfigError: a model without parameters, or a weight of more than three dimensions for Muon.
    """

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.config = config
        self._built = False
        params = parameter_names(model)
        if not params:
            raise ConfigError("the model has no parameters to train", where=type(model).__name__)
        groups: dict[str, dict[str, Any]] = {}
        for name, param in params.items():
            group = self._group_settings(name, param)
            groups.setdefault(group["name"], group)
        adamw = [g for g in groups.values() if g["algorithm"] == "adamw"]
        muon = [g for g in groups.values() if g["algorithm"] == "muon"]
        self._parts: list[torch.optim.Optimizer] = []
        if adamw:
            self._parts.append(torch.optim.AdamW(adamw, betas=config.betas, eps=config.eps, foreach=True))
        if muon:
            self._parts.append(Muon(muon, momentum=config.muon_momentum, update_rms=config.muon_update_rms))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state
        self._built = True
        self.refresh(model)

    def _group_settings(self, name: str, param: Tensor) -> dict[str, Any]:
        rule, cfg = rule_for(name, param), self.config
        if rule.algorithm == "muon" and param.ndim > 3:
            raise ConfigError(f"Muon cannot train {name}", where=f"shape {tuple(param.shape)}", allowed="2 or 3 dimensions")
        indexer = ".indexer." in f".{name}"
        decay = rule.decay or cfg.decay_vectors
        scale = cfg.indexer_lr_scale if indexer else 1.0
        parts = [rule.algorithm, "indexer" if indexer else "main", str(param.dtype).removeprefix("torch.")]
        return {
            "name": ".".join(parts if decay else [*parts, "no_decay"]),
            "algorithm": rule.algorithm,
            "params": [],
            "lr": cfg.lr * scale,
            "initial_lr": cfg.lr * scale,
            "lr_scale": scale,
            "weight_decay": cfg.weight_decay if decay else 0.0,
        }

    def refresh(self, model: nn.Module) -> tuple[list[str], list[str]]:
        """Takes in parameters that were thawed and leaves out those that were frozen; their states are kept either way.

        Returns:
            Names that came in, names that went out.  The gradients of the latter are dropped, so that none waits for
            the thaw.
        """
        params = parameter_names(model)
        before = {p for group in self.param_groups for p in group["params"]}
        by_name = {group["name"]: group for group in self.param_groups}
        for group in self.param_groups:
            group["params"] = []
            if group["algorithm"] == "muon":
                group["row_blocks"] = []
        for name, param in params.items():
            wanted = self._group_settings(name, param)["name"]
            if wanted not in by_name:
                raise ConfigError(
                    f"{name} would need the optimizer group {wanted}", where="refresh", allowed=", ".join(by_name),
                    do="build the optimizer again after changing a parameter's dtype",
                )  # fmt: skip
            if param.requires_grad:
                group = by_name[wanted]
                group["params"].append(param)
                if group["algorithm"] == "muon":
                    group["row_blocks"].append(matrix_rows(name, params))
        self._params = params
        now = {p for group in self.param_groups for p in group["params"]}
        for param in before - now:
            param.grad = None
        names = {p: name for name, p in params.items()}
        return [n for p, n in names.items() if p in now - before], [n for p, n in names.items() if p in before - now]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the base class: groups follow from the model."""
        if self._built:
            raise ConfigError("groups follow from the model's parameters", do="thaw the parameters and call refresh(model)")
        super().add_param_group(param_group)

    def set_lr(self, factor: float, *, peak: float | None = None) -> None:
        """lr = peak * factor, times the group's own ``lr_scale``; ``peak`` defaults to the configuration's."""
        for group in self.param_groups:
            group["lr"] = (self.config.lr if peak is None else peak) * group["lr_scale"] * factor

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch types it float only
        """One update of every parameter that has a gradient; returns what ``closure`` returned, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """``groups``: settings and parameter names; ``state``: name -> state, including that of frozen parameters."""
        names = {p: name for name, p in self._params.items()}
        hidden = ("params", "row_blocks")
        groups = [
            {k: v for k, v in g.items() if k not in hidden} | {"params": [names[p] for p in g["params"]]}
            for g in self.param_groups
        ]
        return {"groups": groups, "state": {n: dict(self.state[p]) for n, p in self._params.items() if p in self.state}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores settings and states bit for bit, dtypes included; which parameters are frozen is the model's to say.

        Raises:
            CheckpointError: groups or parameters that this optimizer does not have.
        """
        saved = {group["name"]: group for group in state_dict["groups"]}
        own = {group["name"]: group for group in self.param_groups}
        for what, odd in (
            ("groups", saved.keys() ^ own.keys()),
            ("states", state_dict["state"].keys() - self._params.keys()),
        ):
            if odd:
                raise CheckpointError(f"the saved optimizer has other {what} than this model", where=", ".join(sorted(odd)))
        for name, group in own.items():
            group.update({k: v for k, v in saved[name].items() if k != "params"})
        self.state.clear()
        for name, state in state_dict["state"].items():
            device = self._params[name].device
            # AdamW keeps its step count on the CPU, where reading it costs no synchronisation.
            self.state[self._params[name]] = {
                k: v.detach().to(v.device if k == "step" else device).clone() if isinstance(v, Tensor) else v
                for k, v in state.items()
            }


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> SplitOptimizer:
    """The optimizer of a run; frozen parameters join it with `SplitOptimizer.refresh` once they are thawed."""
    return SplitOptimizer(model, cfg)


@torch.no_grad()
def clip_gradients(
    model: nn.Module, max_norm: float | None, *, reduce: Callable[[Tensor], Tensor] = lambda squares: squares
) -> dict[str, float]:
    """Gradient norms by group, and clipping, in one pass.

    ||g||_2 of each tensor in fp32, the sum of their squares in fp64.  Gradients are scaled by max_norm / ||g|| when
    the norm is larger; a norm that is not finite clips nothing, it is for the caller to stop at.  The indexer is clipped
    by its own norm: a common one would let its loss scale the updates of everything else, and the other way round.

    Args:
        model: its parameters' ``.grad``; parameters without one are left out.
        max_norm: None does not clip.
        reduce: [groups] fp64 sums of squares of what this process holds -> those of the whole model.  The identity
            on one process; a sum over the shards (`all_reduce`) for a model whose gradients are sharded.

    Returns:
        ``global``, and one entry per group of `GRADIENT_GROUPS` that has a gradient: a frozen group is absent, not 0.
    """
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"the gradient is to be clipped to norm {max_norm}", allowed="a positive number, or None")
    groups: dict[str, list[Tensor]] = {}
    for name, param in parameter_names(model).items():
        if param.grad is not None:
            group = next(group for pattern, group in GRADIENT_GROUPS if fnmatchcase(name, pattern))
            groups.setdefault(group, []).append(param.grad)
    if not groups:
        return {"global": 0.0}
    norms = {name: [torch.linalg.vector_norm(g, dtype=_accumulator(g)) for g in grads] for name, grads in groups.items()}
    squares = reduce(torch.stack([torch.stack(n).double().square().sum() for n in norms.values()]))
    total = float(squares.sum().sqrt())
    if max_norm is not None and math.isfinite(total):
        indexer = torch.tensor([name == "indexer" for name in groups], device=squares.device)
        for part in (indexer, ~indexer):
            norm = float(squares[part].sum().sqrt())
            if norm > max_norm:
                for grads, chosen in zip(groups.values(), part.tolist(), strict=True):
                    for grad in grads if chosen else ():
                        grad.mul_(max_norm / norm)
    return {"global": total, **dict(zip(groups, squares.sqrt().tolist(), strict=True))}


def _accumulator(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)
