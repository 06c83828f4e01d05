"""``dsv4::swiglu_clamp``: the experts' activation with the routing weight folded in (specification, section 6)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4c.ops.precision import accumulator

_BLOCK = 1 << 18  # elements of a block of rows that stays in cache


def _rows(gate_up: Tensor) -> list[slice]:
    step = max(1, _BLOCK // max(gate_up.shape[-1], 1))
    return [slice(i, i + step) for i in range(0, len(gate_up), step)]


def _halves(gate_up: Tensor, limit: float, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """g and u as they enter the product; views of the input where nothing has to be done to them."""
    g, u = gate_up.to(acc).chunk(2, -1)
    return (g.clamp(max=limit), u.clamp(-limit, limit)) if limit > 0 else (g, u)


def _plain(gate_up: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    acc, half = accumulator(gate_up), gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), half), dtype=gate_up.dtype, device=gate_up.device)
    for rows in _rows(gate_up):
        g, u = _halves(gate_up[rows], limit, acc)
        hidden = F.silu(g, inplace=limit > 0)
        if weight is not None:
            hidden.mul_(weight[rows, None])
        if out.dtype == acc:
            torch.mul(hidden, u, out=out[rows])
        else:
            out[rows] = hidden.mul_(u)
    return out


def _masked(grad: Tensor, x: Tensor, low: float, high: float, out: Tensor) -> None:
    """grad where low <= x <= high and else 0, into out."""
    if grad.dtype != x.dtype or out.dtype != x.dtype:
        out.copy_(grad.masked_fill_((x > high) | (x < low), 0.0))
        return
    # hardtanh stands still at its ends, a clamp does not: the next numbers beyond them are its ends.
    ends = torch.nextafter(torch.tensor([low, high], dtype=x.dtype), torch.tensor([-math.inf, math.inf], dtype=x.dtype))
    torch.ops.aten.hardtanh_backward.grad_input(grad, x, *ends.tolist(), grad_input=out)


def _plain_backward(grad: Tensor, gate_up: Tensor, weight: Tensor | None, limit: float) -> tuple[Tensor, Tensor]:
    acc, half = accumulator(gate_up), gate_up.shape[1] // 2
    dx = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    dweight = torch.empty(len(gate_up) if weight is not None else 0, dtype=acc, device=gate_up.device)
    for rows in _rows(gate_up):
        x = gate_up[rows]
        g, u = _halves(x, limit, acc)
        dy = grad[rows].to(acc)
        du = F.silu(g).mul_(dy)
        dg = u * dy
        if weight is not None:
            dweight[rows] = torch.linalg.vecdot(du, u)
            du.mul_(weight[rows, None])
            dg.mul_(weight[rows, None])
        dg = torch.ops.aten.silu_backward(dg, g)
        if limit > 0:
            _masked(dg, x[:, :half], -math.inf, limit, dx[rows, :half])
            _masked(du, x[:, half:], -limit, limit, dx[rows, half:])
        else:
            dx[rows, :half], dx[rows, half:] = dg, du
    return dx, dweight


@torch.library.custom_op("dsv4::swiglu_clamp", mutates_args=())
def swiglu_clamp(gate_up: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """``w silu(min(g, limit)) clamp(u, -limit, limit)`` in fp32, rounded once to gate_up's dtype; limit 0: no clamp.

    Shapes: gate_up [N,2I], g in the first half and u in the second; weight [N] fp32, or None for 1.  Returns [N,I].
    """
    return _plain(gate_up, weight, limit)


@swiglu_clamp.register_fake
def _(gate_up, weight, limit):  # type: ignore[no-untyped-def]  # schema above
    return torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)


@torch.library.custom_op("dsv4::swiglu_clamp_backward", mutates_args=())
def swiglu_clamp_backward(grad: Tensor, gate_up: Tensor, weight: Tensor | None, limit: float) -> tuple[Tensor, Tensor]:
    """``dg = w dy u silu'(g)`` where g <= limit, ``du = w dy silu(g)`` where |u| <= limit, ``dw = sum_I dy silu(g) u``.

    The second result is [N] in fp32 (fp64), or empty where there is no weight.
    """
    return _plain_backward(grad, gate_up, weight, limit)


@swiglu_clamp_backward.register_fake
def _(grad, gate_up, weight, limit):  # type: ignore[no-untyped-def]  # schema above
    return (
        torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device),
        torch.empty(0 if weight is None else gate_up.shape[0], dtype=accumulator(gate_up), device=gate_up.device),
    )


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    gate_up, weight, ctx.limit = inputs
    ctx.save_for_backward(gate_up, weight)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
    gate_up, weight = ctx.saved_tensors
    dgate_up, dweight = swiglu_clamp_backward(grad, gate_up, weight, ctx.limit)
    return dgate_up, None if weight is None else dweight.to(weight.dtype), None


swiglu_clamp.register_autograd(_backward, setup_context=_save)
