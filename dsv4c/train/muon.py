"""Muon: the optimizer of every weight that acts on vectors as a matrix.

It stands behind `dsv4c.train.optim`, which decides which parameter comes here and which goes to AdamW.

For each logically independent matrix W [m,n] with gradient G (paper, section 2.4; specification, section 7):

    M  <- mu M + G                                    momentum, kept in fp32
    O   = NewtonSchulz(G + mu M)                      Nesterov; O is the polar factor U V^T of its argument
    W  <- (1 - lr wd) W - lr * 0.18 sqrt(max(m,n)) O  decoupled decay

**The factor.** U V^T has min(m,n) singular values equal to 1, hence ||O||_F^2 = min(m,n) and
RMS(O) = sqrt(min(m,n) / (m n)) = 1 / sqrt(max(m,n)).  Multiplying by 0.18 sqrt(max(m,n)) gives an update whose RMS
is 0.18 for every shape, which is about AdamW's, so that both share one learning rate.

**Why not `torch.optim.Muon`.** It takes a single set of coefficients, where the model's recipe runs eight steps with
one set and two with another, and it takes 2-D parameters only, where the routed experts are stacked as [E,out,in].
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4c.errors import ConfigError

Coefficients = tuple[float, float, float]

FAST: Coefficients = (3.4445, -4.7750, 2.0315)
"""Steep at 0: eight steps lift a singular value of 5e-5 of the norm into [0.68, 1.13], but it never settles."""
SETTLE: Coefficients = (2.0, -1.5, 0.5)
"""p(1) = 1 and p'(1) = 0: what is near 1 converges quadratically to 1."""
HYBRID: tuple[Coefficients, ...] = (FAST,) * 8 + (SETTLE,) * 2

BATCH_ELEMENTS = 1 << 26
"""Elements in one batched Newton-Schulz call: bounds the extra memory to a few hundred MB whatever the model's size."""


def newton_schulz(x: Tensor, steps: Sequence[Coefficients] = HYBRID, dtype: torch.dtype | None = None) -> Tensor:
    """Polar factors U V^T of a batch of matrices.

    Each step is X <- a X + (b A + c A A) X with A = X X^T, which maps every singular value s to a s + b s^3 + c s^5
    and leaves the singular vectors alone.  X starts as x / ||x||_F, so that s <= 1.  The iteration runs on the wide
    orientation, where A is the smaller of the two Gram matrices.

    Args:
        x: [N,r,c], any floating dtype.  A zero matrix stays zero.  The result does not depend on the scale of x: the
            largest element is divided out first, because the square of a gradient of 1e-25 would vanish in fp32.
        steps: coefficients (a,b,c), one triple per step.
        dtype: dtype of the matrix products; by default bf16 on an accelerator and fp32 on a CPU.

    Returns:
        [N,r,c] in ``dtype``, singular values about 1 wherever x's were above 5e-5 of its norm.
    """
    if x.ndim != 3:
        raise ConfigError("Newton-Schulz takes a batch of matrices", where=f"shape {tuple(x.shape)}", allowed="[N,r,c]")
    if dtype is None:
        dtype = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    exact = torch.promote_types(x.dtype, torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).to(exact)
    tiny = torch.finfo(exact).tiny
    y = y / y.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    y = (y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp_min(tiny)).to(dtype)
    for a, b, c in steps:
        gram = torch.bmm(y, y.mT)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, poly, y, beta=a)
    return y.mT if tall else y


class _Piece(NamedTuple):
    """Views [k,r,c] of one parameter, its gradient and its momentum: k matrices that are orthogonalised each on its
    own.
    """

    param: Tensor
    grad: Tensor
    momentum: Tensor


def _pieces(param: Tensor, grad: Tensor, momentum: Tensor, rows: tuple[int, ...] | None) -> Iterable[_Piece]:
    """Cuts a parameter [r,c] or [E,r,c] into independent matrices, and long stacks into pieces of bounded size."""
    views = [t.unsqueeze(0) if t.ndim == 2 else t for t in (param, grad, momentum)]
    for block in zip(*(torch.split(v, list(rows), dim=-2) if rows else (v,) for v in views), strict=True):
        per_piece = max(1, BATCH_ELEMENTS // max(1, block[0][0].numel()))
        for piece in zip(*(torch.split(b, per_piece) for b in block), strict=True):
            yield _Piece(*piece)


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz, for 2-D parameters and stacks [E,out,in] of them (module docstring).

    Independent matrices of equal shape, or equal after transposition, go through one batched Newton-Schulz call,
    whichever parameter they belong to.  A parameter whose gradient is None is left as it is, and so is its momentum.

    A group may hold ``row_blocks``, a list beside ``params``: None for a parameter that is one matrix, or the row
    counts of the independent matrices stacked in it ((I, I) for a gate and an up projection in one tensor).

    Sharded parameters (DTensor) have to be gathered first: orthogonalising a shard is not the shard of the
    orthogonalised.

    Raises:
        ConfigError: a setting out of range, or a parameter that is not 2-D or 3-D.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2.7e-4,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        update_rms: float = 0.18,
        steps: Sequence[Coefficients] = HYBRID,
    ) -> None:
        ranges = (
            ("lr", lr, 0.0, math.inf),
            ("momentum", momentum, 0.0, 1.0),
            ("weight_decay", weight_decay, 0.0, math.inf),
        )
        for name, value, low, high in (*ranges, ("update_rms", update_rms, 0.0, math.inf)):
            if not low <= value < high:
                raise ConfigError(f"Muon's {name} is {value}", allowed=f"{low} <= {name} < {high}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "update_rms": update_rms,
            "steps": tuple(steps),
            "row_blocks": None,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim not in (2, 3):
                    raise ConfigError(
                        "Muon orthogonalises matrices",
                        where=f"a parameter of shape {tuple(param.shape)}",
                        allowed="[out,in] or [E,out,in]",
                        do="give this parameter to AdamW",
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch types it float only
        """One update of every parameter that has a gradient; returns what ``closure`` returned, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch in self._batches(group):
                self._update(batch, group)
        return loss

    def _batches(self, group: dict[str, Any]) -> Iterable[list[_Piece]]:
        """Advances the momenta and collects pieces of equal shape, at most ``BATCH_ELEMENTS`` elements together."""
        queues: dict[Any, list[_Piece]] = defaultdict(list)
        blocks = group["row_blocks"] or [None] * len(group["params"])
        for param, rows in zip(group["params"], blocks, strict=True):
            if param.grad is None:
                continue
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32))
            momentum = state["momentum_buffer"]
            momentum.mul_(group["momentum"]).add_(param.grad)
            for piece in _pieces(param, param.grad, momentum, rows):
                queues[tuple(sorted(piece.param.shape[1:])), param.device, momentum.dtype].append(piece)
        for queue in queues.values():
            batch: list[_Piece] = []
            elements = 0
            for piece in queue:
                if batch and elements + piece.param.numel() > BATCH_ELEMENTS:
                    yield batch
                    batch, elements = [], 0
                batch.append(piece)
                elements += piece.param.numel()
            yield batch

    @staticmethod
    def _update(batch: list[_Piece], group: dict[str, Any]) -> None:
        tall = [p.param.shape[-2] > p.param.shape[-1] for p in batch]
        nesterov = [torch.add(p.grad, p.momentum, alpha=group["momentum"]) for p in batch]
        stacked = torch.cat([n.mT if t else n for n, t in zip(nesterov, tall, strict=True)])
        directions = torch.split(newton_schulz(stacked, group["steps"]), [p.param.shape[0] for p in batch])
        scale = group["update_rms"] * math.sqrt(stacked.shape[-1])
        for piece, direction, transposed in zip(batch, directions, tall, strict=True):
            piece.param.mul_(1 - group["lr"] * group["weight_decay"])
            piece.param.add_(direction.mT if transposed else direction, alpha=-group["lr"] * scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores bit for bit.

        The base class casts every state to its parameter's dtype; the momenta of a bf16 parameter are fp32 and are
        put back.
        """
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, own, strict=True):
            if index in state_dict["state"]:
                momentum = state_dict["state"][index]["momentum_buffer"]
                self.state[param]["momentum_buffer"] = momentum.detach().to(param.device).clone()
