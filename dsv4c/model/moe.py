"""Mixture of experts: hash and learned routers, clamped SwiGLU, a shared expert, and the balance loss (section 6)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4c import ops
from dsv4c.config import LayerKind, ModelConfig
from dsv4c.model.layout import LayerLayout
from dsv4c.model.objectives import objective
from dsv4c.model.precision import KeepsFp32, linear_wide, wide


class Routing(NamedTuple):
    ids: Tensor  # [N,k] int64: the experts of each token
    weights: Tensor  # [N,k] fp32: they sum to route_scale
    scores: Tensor  # [N,E] fp32: unbiased affinities
    load: Tensor  # [E] int64: real tokens sent to each expert


class Gate(KeepsFp32):
    """``s = sqrt(softplus(x W^T))`` in fp32; the k best of s + bias, or the k experts of the token's id.

    The bias chooses and never weighs: weights are the chosen unbiased scores, normalised to route_scale.  x [N,D],
    ids [N].  W itself may be bf16 (it is widened for the product); the bias buffer stays fp32.
    """

    fp32_parameters = ("bias",)
    bias: Tensor
    tid2eid: Tensor

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__()
        self.k, self.route_scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.n_experts, self.vocab = config.n_routed_experts, config.vocab_size
        self.hashed, self.forced = kind.router == "hash", config.force_balanced_routing
        self.keep_fp32 = config.keep_fp32_parameters
        self.weight = nn.Parameter(torch.empty(self.n_experts, config.hidden_size))
        if self.hashed:
            self.register_buffer("tid2eid", torch.empty(self.vocab, self.k, dtype=torch.int64))
        else:
            self.register_buffer("bias", torch.empty(self.n_experts))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)
        if not self.hashed:
            nn.init.zeros_(self.bias)
            return
        # k neighbouring experts, one step of k further for each id: distinct in a row and equally often over the table.
        # An all-zero table would send k copies of every token to expert 0.
        token = torch.arange(self.vocab, device=self.tid2eid.device)[:, None]
        self.tid2eid.copy_((token * self.k + torch.arange(self.k, device=token.device)) % self.n_experts)

    def forward(self, x: Tensor, token_ids: Tensor, real: Tensor | None = None) -> Routing:
        """``real`` [N] bool: the tokens that count as load; all by default."""
        given = None
        if self.forced:
            token = torch.arange(len(x), device=x.device)[:, None]
            given = (token * self.k + torch.arange(self.k, device=x.device)) % self.n_experts
        elif self.hashed:
            given = self.tid2eid[token_ids]
        bias = None if self.hashed else self.bias
        logits = linear_wide(x, self.weight)
        weights, ids, scores, load = ops.route(logits, bias, given, real, self.k, self.route_scale)
        return Routing(ids, weights, scores, load)


class _Permute(torch.autograd.Function):
    """``x[index]`` whose backward is ``grad[inverse]`` summed over copies: no scatter, so the order of adding is fixed."""

    @staticmethod
    def forward(x, index, inverse, copies):  # type: ignore[no-untyped-def]  # as setup_context
        return x[index // copies]

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]  # autograd context; apart for torch.func
        _, _, inverse, ctx.copies = inputs
        ctx.save_for_backward(inverse)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
        (inverse,) = ctx.saved_tensors
        grad = grad[inverse]
        return (grad if ctx.copies == 1 else grad.unflatten(0, (-1, ctx.copies)).sum(1)), None, None, None


class Experts(nn.Module):
    """E clamped-SwiGLU experts over rows sorted by expert; w13 [E,2I,D] (gate rows, then up rows), w2 [E,D,I]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        e, d, i = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.w13 = nn.Parameter(torch.empty(e, 2 * i, d))
        self.w2 = nn.Parameter(torch.empty(e, d, i))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.w13, std=std)
        nn.init.normal_(self.w2, std=std)

    def forward(self, x: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
        """``sum_k weight_k Expert_k(x)`` in fp32; x [N,D], the products in ``dtype``."""
        n, k = routing.ids.shape
        flat = routing.ids.flatten()
        order = flat.argsort(stable=True)
        inverse = order.argsort()
        ends = torch.searchsorted(flat[order], torch.arange(len(self.w13), device=x.device), right=True).int()
        rows = _Permute.apply(x, order, inverse, k)
        weights = _Permute.apply(routing.weights.flatten(), order, inverse, 1)
        gate_up = ops.grouped_mm(rows.to(dtype), self.w13.to(dtype), ends)
        hidden = ops.swiglu_clamp(gate_up, weights, self.limit)
        out = ops.grouped_mm(hidden, self.w2.to(dtype), ends)
        return wide(_Permute.apply(out, inverse, order, 1)).unflatten(0, (n, k)).sum(1)


class SharedExpert(nn.Module):
    """One expert for every token, weight 1; ``w13`` holds the gate rows, then the up rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, i = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit if config.swiglu_limit_shared else 0.0
        self.w13 = nn.Linear(d, 2 * i, bias=False)
        self.w2 = nn.Linear(i, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.swiglu_clamp(self.w13(x), None, self.limit))


class MoEFacts(NamedTuple):
    """What a MoE layer reports beside its output."""

    balance: Tensor | None  # sum over documents of ``sum_e f_e P_e``; None in hash layers or while the objective is off
    load: Tensor  # [E] fp32: real tokens sent to each expert


def expert_counts(ids: Tensor, real: Tensor, n_experts: int) -> Tensor:
    """1 where a real token goes to an expert: ids [B,S,k], real [B,S] -> [B,S,E] int32."""
    sent = torch.zeros(*ids.shape[:2], n_experts, dtype=torch.int32, device=ids.device)
    return sent.scatter(-1, ids, 1) * real[..., None]


def sequence_balance(scores: Tensor, sent: Tensor, at: LayerLayout, k: int) -> Tensor:
    """Sum over documents d of ``sum_e f_de P_de`` (specification, section 6.1): 1 for each document routed uniformly.

    ``s' = s / sum_e s``; ``f_de = E/(k T_d) #{t in d: e in ids_t}`` (no gradient); ``P_de = 1/T_d sum_{t in d} s'_te``.
    scores, sent [B,S,E]; T_d counts the document's real tokens.  Counts come from integer prefix sums, so they are exact
    and no scatter is needed.
    """
    share = scores / scores.sum(-1, keepdim=True)
    prefix = F.pad(sent.cumsum(1), (0, 0, 1, 0))
    row = torch.arange(len(sent), device=sent.device)[:, None]
    in_document = prefix[row, at.end + 1] - prefix[row, at.start]
    tokens = F.pad(at.real.cumsum(1), (1, 0))
    length = (tokens[row, at.end + 1] - tokens[row, at.start]).clamp(min=1).to(share.dtype)
    per_token = (share * in_document).sum(-1) * (sent.shape[-1] / k) / length.square()
    return (per_token * at.real).sum()


class MoE(nn.Module):
    """``sum_{e in ids} weight_e Expert_e(x) + Shared(x)``; x [B,S,D], token ids [B,S]."""

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__()
        self.balances = config.balances_routing and kind.router == "learned"
        self.gate = Gate(config, kind)
        self.experts = Experts(config)
        self.shared_experts = SharedExpert(config)

    def forward(self, x: Tensor, token_ids: Tensor, at: LayerLayout) -> tuple[Tensor, MoEFacts]:
        flat = x.flatten(0, 1)
        routing = self.gate(flat, token_ids.flatten(), at.real.flatten())
        shared = self.shared_experts(flat)
        y = (self.experts(flat, routing, shared.dtype) + wide(shared)).to(x.dtype).view_as(x)
        shape = (*x.shape[:2], -1)
        balance = None
        if self.balances:
            sent = expert_counts(routing.ids.view(shape), at.real, self.gate.n_experts)
            with objective("seq_balance"):
                balance = sequence_balance(routing.scores.view(shape), sent, at, self.gate.k)
        return y, MoEFacts(balance, routing.load.float())
