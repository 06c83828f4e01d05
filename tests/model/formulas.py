"""The specification's formulas once more: one document, one token and one entry at a time, in plain torch.

Nothing of the model but its parameters is used here.  The loops differentiate, so autograd of these formulas is the oracle
for the gradients of every objective.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4c import DeepseekV4, ModelConfig


def rms(x: Tensor, eps: float, weight: Tensor | float = 1.0) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def frequencies(c: ModelConfig, ratio: int) -> Tensor:
    """Section 2: one table per layer, YaRN in compressed layers only."""
    r, base = c.qk_rope_head_dim, c.compress_rope_theta if ratio else c.rope_theta
    inv = [base ** (-2 * j / r) for j in range(r // 2)]
    if ratio and c.rope_original_length:
        low, high = (
            r * math.log(c.rope_original_length / (2 * math.pi * b)) / (2 * math.log(base))
            for b in (c.rope_beta_fast, c.rope_beta_slow)
        )
        lo, hi = max(math.floor(low), 0), min(math.ceil(high), r - 1)
        ramp = [min(max((j - lo) / (hi - lo if hi != lo else 0.001), 0), 1) for j in range(r // 2)]
        inv = [f * ((1 - s) + s / c.rope_factor) for f, s in zip(inv, ramp, strict=True)]
    return torch.tensor(inv, dtype=torch.float64).float()


def rotate(x: Tensor, positions: list[int], inv: Tensor, sign: int = 1) -> Tensor:
    """x [T,...,c]: pair (a, b) of neighbours among the last r channels -> (a cos - b sin, a sin + b cos)."""
    out = list(x.unbind(-1))
    first = len(out) - 2 * len(inv)
    angle = torch.tensor(positions).float()[:, None] * inv
    for j in range(len(inv)):
        shape = [-1] + [1] * (x.dim() - 2)
        cos, sin = angle[:, j].cos().to(x).view(shape), sign * angle[:, j].sin().to(x).view(shape)
        a, b = out[first + 2 * j], out[first + 2 * j + 1]
        out[first + 2 * j], out[first + 2 * j + 1] = a * cos - b * sin, a * sin + b * cos
    return torch.stack(out, -1)


def compress(x: Tensor, compressor: Any, m: int, eps: float) -> Tensor:
    """x [S,D] -> normed, unrotated entries [P,c] (section 4)."""
    c = compressor.norm.weight.shape[0]
    a, e = x @ compressor.wkv.weight.T, x @ compressor.wgate.weight.T
    entries = []
    for p in range(len(x) // m):
        slots = [(t, t - p * m, -c) for t in range(p * m, p * m + m)]  # token, slot, first channel
        if m == 4 and p > 0:
            slots += [(t, t - (p - 1) * m, 0) for t in range((p - 1) * m, p * m)]

        def half(v: Tensor, first: int) -> Tensor:
            return v[first:] if first < 0 else v[first : first + c]

        logits = torch.stack([half(e[t] + compressor.ape[j], first) for t, j, first in slots])
        values = torch.stack([half(a[t], first) for t, j, first in slots])
        entries.append((logits.softmax(0) * values).sum(0))
    pooled = torch.stack(entries) if entries else x.new_zeros(0, c)
    return rms(pooled, eps, compressor.norm.weight)


def sylvester(n: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / math.sqrt(n)


def indexer_scores(x: Tensor, qr: Tensor, indexer: Any, c: ModelConfig, inv: Tensor) -> Tensor:
    """I [S,P], before the causal limit (section 5)."""
    n, width = c.index_n_heads, c.index_head_dim
    h = sylvester(width).to(x)
    q = rotate((qr @ indexer.wq_b.weight.T).view(-1, n, width), list(range(len(x))), inv) @ h
    k = compress(x, indexer.compressor, 4, c.rms_norm_eps)
    k = rotate(k, [4 * p for p in range(len(k))], inv) @ h
    w = (x @ indexer.weights_proj.weight.T) / math.sqrt(width * n)
    rows = [sum(w[t, i] * torch.relu(k @ q[t, i]) for i in range(n)) for t in range(len(x))]
    return torch.stack(rows)


def attention(x: Tensor, attn: Any, c: ModelConfig, m: int, dense: bool = False) -> tuple[Tensor, Tensor]:
    """x [S,D] -> y [S,D] and the sum over queries of the distillation loss (sections 3 and 5.1)."""
    n, heads, width, inv = len(x), c.num_attention_heads, c.head_dim, frequencies(c, m)
    here, scale, eps = list(range(n)), c.head_dim**-0.5, c.rms_norm_eps
    qr = rms(x @ attn.wq_a.weight.T, eps, attn.q_norm.weight)
    q = rotate(rms((qr @ attn.wq_b.weight.T).view(n, heads, width), eps), here, inv)
    kv = rotate(rms(x @ attn.wkv.weight.T, eps, attn.kv_norm.weight), here, inv)
    entries = x.new_zeros(0, width)
    if m:
        entries = compress(x, attn.compressor, m, eps)
        entries = rotate(entries, [m * p for p in range(len(entries))], inv)
    scores = indexer_scores(x.detach(), qr.detach(), attn.indexer, c, inv) if m == 4 and len(entries) else None
    out, kl = [], x.new_zeros(())
    for t in range(n):
        visible = list(range(min((t + 1) // m, len(entries)))) if m else []
        if scores is not None and not dense and c.index_topk is not None:
            visible = sorted(visible, key=lambda p, t=t: -float(scores[t, p].detach()))[: c.index_topk]
        window = list(range(max(0, t - c.sliding_window + 1), t + 1))
        keys = torch.cat((kv[window], entries[visible]))
        z = scale * q[t] @ keys.T
        lse = torch.logsumexp(torch.cat((z, attn.attn_sink[:, None].to(z)), 1), 1)
        weights = torch.exp(z - lse[:, None])
        out.append(weights @ keys)
        if scores is not None and visible:
            mass = weights[:, len(window) :].detach()
            if c.indexer_kl_target == "selected":
                mass = z[:, len(window) :].detach().softmax(-1)
            teacher, student = mass.sum(0) / mass.sum(), scores[t, visible].softmax(0)
            kl = kl + (teacher * (torch.log(teacher + 1e-10) - torch.log(student + 1e-10))).sum()
    o = rotate(torch.stack(out), here, inv, -1).reshape(n, c.o_groups, -1)
    per_group = attn.wo_a.weight.view(c.o_groups, c.o_lora_rank, -1)
    y = torch.cat([o[:, a] @ per_group[a].T for a in range(c.o_groups)], 1)
    return y @ attn.wo_b.weight.T, kl


def hc_logits(streams: Tensor, hc: Any, eps: float) -> Tensor:
    v = torch.cat([streams[:, j] for j in range(streams.shape[1])], -1)
    return rms(v, eps) @ hc.fn.T


def hc_pre(streams: Tensor, hc: Any, c: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """u [S,D], post [S,n], comb [S,n,n] (section 1.1)."""
    n, eps = c.hc_mult, c.hc_eps
    z = hc_logits(streams, hc, c.rms_norm_eps)
    pre = torch.sigmoid(z[:, :n] * hc.scale[0] + hc.base[:n]) + eps
    post = 2 * torch.sigmoid(z[:, n : 2 * n] * hc.scale[1] + hc.base[n : 2 * n])
    comb = (z[:, 2 * n :] * hc.scale[2] + hc.base[2 * n :]).view(-1, n, n).softmax(2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(c.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return sum(pre[:, j, None] * streams[:, j] for j in range(n)), post, comb


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``X'_k = post_k y + sum_j comb_jk X_j`` (section 1.2)."""
    n = streams.shape[1]
    new = [post[:, k, None] * y + sum(comb[:, j, k, None] * streams[:, j] for j in range(n)) for k in range(n)]
    return torch.stack(new, 1)


def hc_head(streams: Tensor, hc: Any, c: ModelConfig) -> Tensor:
    w = torch.sigmoid(hc_logits(streams, hc, c.rms_norm_eps) * hc.scale + hc.base) + c.hc_eps
    return sum(w[:, j, None] * streams[:, j] for j in range(c.hc_mult))


def expert(x: Tensor, w13: Tensor, w2: Tensor, limit: float, weight: Tensor | float = 1.0) -> Tensor:
    g, u = (x @ w13.T).chunk(2, -1)
    if limit:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (weight * F.silu(g) * u) @ w2.T


def moe(x: Tensor, ids: Tensor, ffn: Any, c: ModelConfig) -> tuple[Tensor, Tensor]:
    """y [S,D] and ``sum_e f_e P_e`` (section 6)."""
    gate, shared = ffn.gate, ffn.shared_experts
    scores = torch.sqrt(F.softplus(x @ gate.weight.T))
    counts, out = torch.zeros(c.n_routed_experts).to(x), []
    for t in range(len(x)):
        if gate.hashed:
            chosen = gate.tid2eid[ids[t]]
        else:
            chosen = (scores[t] + gate.bias).sort(descending=True).indices[: c.num_experts_per_tok]
        counts[chosen] += 1
        weights = scores[t, chosen] / scores[t, chosen].sum() * c.routed_scaling_factor
        y = expert(x[t], shared.w13.weight, shared.w2.weight, c.swiglu_limit if c.swiglu_limit_shared else 0.0)
        for e, weight in zip(chosen.tolist(), weights, strict=True):
            y = y + expert(x[t], ffn.experts.w13[e], ffn.experts.w2[e], c.swiglu_limit, weight)
        out.append(y)
    share = (scores / scores.sum(-1, keepdim=True)).mean(0)
    f = counts * c.n_routed_experts / (c.num_experts_per_tok * len(x))
    return torch.stack(out), (f * share).sum()


def block(
    streams: Tensor, ids: Tensor, layer: Any, c: ModelConfig, m: int, dense: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [S,n,D] -> streams, distillation sum, balance term (section 1)."""
    u, post, comb = hc_pre(streams, layer.hc_attn, c)
    y, kl = attention(rms(u, c.rms_norm_eps, layer.attn_norm.weight), layer.attn, c, m, dense)
    streams = hc_post(y, streams, post, comb)
    u, post, comb = hc_pre(streams, layer.hc_ffn, c)
    y, balance = moe(rms(u, c.rms_norm_eps, layer.ffn_norm.weight), ids, layer.ffn, c)
    return hc_post(y, streams, post, comb), kl, balance


def logits(streams: Tensor, head: Any, hc: Any, norm: Any, c: ModelConfig) -> Tensor:
    return rms(hc_head(streams, hc, c), c.rms_norm_eps, norm.weight) @ head.weight.T


def forward(model: DeepseekV4, ids: Tensor, targets: Tensor, dense: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [S,V] and every objective of one document, ids and targets [S], with coefficients (section 7)."""
    c, n = model.config, len(ids)
    streams = torch.stack([model.embed.weight[ids]] * c.hc_mult, 1)
    kl, balance = streams.new_zeros(()), streams.new_zeros(())
    for layer, m in zip(model.layers, c.compress_ratios, strict=False):
        streams, layer_kl, layer_balance = block(streams, ids, layer, c, m, dense)
        kl = kl + layer_kl
        balance = balance + (0 if layer.ffn.gate.hashed else layer_balance)
    main = logits(streams, model.head, model.hc_head, model.norm, c)
    losses = {"lm": F.cross_entropy(main, targets), "indexer_kl": c.indexer_kl_coef * kl / n}
    losses["mtp"] = streams.new_zeros(())
    if n > 1:
        mtp = model.mtp[0]
        e = rms(model.embed.weight[ids[1:]], c.rms_norm_eps, mtp.enorm.weight) @ mtp.e_proj.weight.T
        h = rms(streams[:-1], c.rms_norm_eps, mtp.hnorm.weight) @ mtp.h_proj.weight.T
        ahead, _, layer_balance = block(e[:, None] + h, ids[1:], mtp, c, 0)
        balance = balance + layer_balance
        ahead = logits(ahead, model.head, mtp.hc_head, mtp.norm, c)
        losses["mtp"] = c.mtp_loss_coef * F.cross_entropy(ahead, targets[1:])
    return main, losses | {"seq_balance": c.seq_balance_loss_coef * balance}
