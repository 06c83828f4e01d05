"""Defects of rotations, scales, mixing, memory, host synchronisation and recomputation, as changes of the model's source."""

from __future__ import annotations

from dsv4c.model import block, layout, objectives, rope, transformer
from dsv4c.model.attention import Attention
from dsv4c.model.hyper_connections import HyperConnection
from dsv4c.model.indexer import Indexer, captured_mass
from dsv4c.model.moe import Experts, MoE
from tests.passes.verify.mutation import Mutant

_BACK = "o = rotate(o, at.cos, at.sin, inverse=True)"
_Q = "q = rotate(q, at.cos, at.sin)"
_KV = "self.latent(self.kv_norm(self.wkv(x)), at.cos, at.sin)"
_ENTRIES = "self.latent(self.compressor(x, at), at.entry_cos, at.entry_sin)"
_STARTS = "at.positions.gather(1, first)"
_K = "rotate(self.compressor(x, at), at.entry_cos, at.entry_sin)"
_TARGET = "target = ops.indexer_kl_target(q, entries, ids, joint, self.scale, self.ratio)"
_W = "w = linear_wide(narrow(x), narrow(self.weights_proj.weight)) * self.temperature"
_TABLES = "return angle.cos(), angle.sin()"

ROTATIONS: tuple[Mutant, ...] = (
    Mutant(
        "the output is not rotated back", Attention.project, ((_BACK, "o = o"),), "rotation",
        "return self.wo_b(self.wo_a(", "without being rotated back",
    ),
    Mutant(
        "the output of a window layer is not rotated back", Attention.project, ((_BACK, "o = o"),), "rotation",
        "return self.wo_b(self.wo_a(", "without being rotated back", config="mtp",
    ),
    Mutant(
        "the output is rotated back twice", Attention.project,
        ((_BACK, "o = rotate(rotate(o, at.cos, at.sin, inverse=True), at.cos, at.sin, inverse=True)"),), "rotation",
        _BACK, "rotated 2 times",
    ),
    Mutant(
        "the output is rotated forward again", Attention.project, ((_BACK, "o = rotate(o, at.cos, at.sin)"),), "rotation",
        _BACK, "forward again",
    ),
    Mutant(
        "the output is rotated back by the entries' table", Attention.project,
        ((_BACK, "o = rotate(o, at.entry_cos, at.entry_sin, inverse=True)"),), "rotation", _BACK, "another table",
    ),
    Mutant(
        "queries are not rotated", Attention.forward, ((_Q, "q = q"),), "rotation", "ops.sparse_attention(",
        "not rotated",
    ),
    Mutant(
        "queries are rotated twice", Attention.forward, ((_Q, "q = rotate(rotate(q, at.cos, at.sin), at.cos, at.sin)"),),
        "rotation", _Q, "rotated 2 times",
    ),
    Mutant(
        "queries are rotated backward", Attention.forward, ((_Q, "q = rotate(q, at.cos, at.sin, inverse=True)"),),
        "rotation",
        _Q, "rotated backward",
    ),
    Mutant(
        "window keys are rotated with cos and sin exchanged", Attention.forward,
        ((_KV, _KV.replace("at.cos, at.sin", "at.sin, at.cos")),), "rotation", "return rotate(x, cos, sin)", "another table",
    ),
    Mutant(
        "window keys are rotated twice", Attention.forward, ((_KV, f"rotate({_KV}, at.cos, at.sin)"),), "rotation",
        "kv = self.latent(", "rotated 2 times", config="swa",
    ),
    Mutant(
        "keys and entries are not rotated", Attention.latent, (("return rotate(x, cos, sin)", "return x"),), "rotation",
        "ops.sparse_attention(", "window keys", config="hca",
    ),
    Mutant(
        "entries are not rotated", Attention.forward, ((_ENTRIES, "self.compressor(x, at)"),), "rotation",
        "ops.sparse_attention(", "entries (entries of",
    ),
    Mutant(
        "entries stand at their index in the pool", layout.layer_layout,
        ((_STARTS, "torch.arange(n_entries, device=at.start.device).expand(len(at.start), -1)"),), "rotation",
        "*tables(at.positions.gather", "index among the entries",
    ),
    Mutant(
        "entries of HCA stand at their index in the pool", layout.layer_layout,
        ((_STARTS, "torch.arange(n_entries, device=at.start.device).expand(len(at.start), -1)"),), "rotation",
        "*tables(at.positions.gather", "index among the entries", config="hca",
    ),
    Mutant(
        "entries stand at the end of their window", layout.layer_layout, ((_STARTS, "at.positions.gather(1, last)"),),
        "rotation", "*tables(at.positions.gather", "the last token",
    ),
    Mutant(
        "entries stand one token before their window", layout.layer_layout, (("last - ratio + 1", "last - ratio"),),
        "rotation", "*tables(at.positions.gather", "token -1",
    ),
    Mutant(
        "entries take the frequencies of window layers", layout.layer_layout,
        ((f"tables({_STARTS}, inv_freq)", f"tables({_STARTS}, inverse_frequencies(config, 0, at.start.device))"),),
        "rotation", "*tables(at.positions.gather", "other frequencies",
    ),
    Mutant(
        "the indexer's queries are not rotated", Indexer.forward, ((_Q, "q = q"),), "rotation", "ops.indexer_topk(",
        "not",
    ),
    Mutant(
        "the indexer's keys are not rotated", Indexer.forward, ((_K, "self.compressor(x, at)"),), "rotation",
        "ops.indexer",
    ),
    Mutant(
        "the indexer's keys take the tokens' table", Indexer.forward,
        ((_K, _K.replace("at.entry_cos, at.entry_sin", "at.cos, at.sin")),), "rotation",
        "k = rotate(self.compressor", "by the tokens' table",
    ),
    Mutant(
        "the teacher sees queries without positions", Attention.forward,
        (("self.report(q.detach()", "self.report(rotate(q.detach(), at.cos, at.sin, inverse=True)"),), "rotation",
        "facts = self.report(", "teacher's queries",
    ),
    Mutant(
        "the table is computed again, the same", Attention.project,
        ((_BACK, "o = rotate(o, at.cos.clone(), at.sin.detach(), inverse=True)"),),
    ),
)  # fmt: skip

SCALES: tuple[Mutant, ...] = (
    Mutant("queries are scaled by YaRN's magnitude", Attention.forward, ((_Q, f"{_Q} * 1.2773"),), "scales", _Q, "1.2773"),
    Mutant(
        "keys are scaled after their norm", Attention.latent, (("return rotate(x, cos, sin)",
        "return rotate(x * 1.1, cos, sin)"),),
        "scales", "return rotate(x, cos, sin)", "kv of", config="swa",
    ),
    Mutant(
        "attention has no scale", Attention.scale, (("self.width**-0.5", "1.0"),), "scales", "ops.sparse_attention(",
        "scale of",
    ),
    Mutant(
        "attention's scale is applied twice", Attention.scale, (("self.width**-0.5", "self.width**-1.0"),), "scales",
        "ops.sparse_attention(", "times 32^-0.5", config="hca",
    ),
    Mutant(
        "queries are scaled beside attention's scale", Attention.forward, ((_Q,
        "q = rotate(q * self.scale, at.cos, at.sin)"),),
        "scales", _Q, "scaled again",
    ),
    Mutant(
        "attention's scale has YaRN's magnitude", Attention.scale, (("self.width**-0.5", "self.width**-0.5 * 1.2773**2"),),
        "scales", "ops.sparse_attention(", "1.6315",
    ),
    Mutant(
        "the indexer has no temperature", Indexer.temperature, (("self.width**-0.5 * self.heads**-0.5", "1.0"),), "scales",
        "ops.indexer_topk(", "they have none",
    ),
    Mutant(
        "the indexer's temperature is applied twice", Indexer.forward, ((_W, f"{_W} * self.temperature"),), "scales", _W,
        "twice",
    ),
    Mutant(
        "the indexer's temperature has the factor of heads only", Indexer.temperature, (("self.width**-0.5 * ", ""),),
        "scales",
        _W, "32^-0.5 is missing",
    ),
    Mutant(
        "the indexer's temperature has the factor of width only", Indexer.temperature, ((" * self.heads**-0.5", ""),),
        "scales",
        _W, "4^-0.5 is missing",
    ),
    Mutant(
        "the indexer's temperature is in queries and weights", Indexer.forward,
        ((_Q, "q = rotate(q * self.temperature, at.cos, at.sin)"),), "scales", "", "twice",
    ),
    Mutant(
        "scores are sharpened on their way into the loss", Attention.report,
        (("ops.indexer_kl(target, scores, at.real)", "ops.indexer_kl(target, scores * 90.5, at.real)"),), "scales",
        "ops.indexer_kl(target", "into the loss",
    ),
    Mutant(
        "the teacher has another scale", Attention.report, ((_TARGET, _TARGET.replace("self.scale", "1.0")),), "scales",
        _TARGET,
    ),
    Mutant(
        "cos and sin have YaRN's magnitude", rope.tables, ((_TABLES, "return angle.cos() * 1.2773, angle.sin() * 1.2773"),),
        "scales", _TABLES, "stretches",
    ),
    Mutant(
        "route_scale is applied again", Experts.forward,
        (("routing.weights.flatten()", "(routing.weights * 1.5).flatten()"),), "scales", "routing.weights.flatten()",
        "again",
    ),
    Mutant(
        "route_scale is applied again after the experts", Experts.forward, ((".sum(1)", ".sum(1) * 1.5"),), "scales",
        "return wide(_Permute", "again", config="swa",
    ),
    Mutant(
        "the indexer's temperature is in its queries", Indexer.forward,
        ((_Q, "q = rotate(q * self.temperature, at.cos, at.sin)"), (_W, _W.replace(" * self.temperature", ""))),
    ),
    Mutant(
        "the indexer's temperature is split", Indexer.forward,
        ((_Q, "q = rotate(q / self.width**0.5, at.cos, at.sin)"), ("* self.temperature", "* self.heads**-0.5")),
    ),
)  # fmt: skip

MIXING: tuple[Mutant, ...] = (
    Mutant(
        "comb is not transposed", HyperConnection.post, (("post, comb)", "post, comb.mT)"),), "mixing",
        "return ops.hc_post(", "transposed", config="swa",
    ),
    Mutant(
        "the experts' streams are mixed by attention's comb", block._Layer.body,
        (("u, post, comb = self.hc_ffn.pre(streams)", "u, post, _ = self.hc_ffn.pre(streams)"),), "mixing",
        "return ops.hc_post(", "not made of the streams", config="swa",
    ),
)  # fmt: skip

_GATHERED = "entries[torch.arange(len(ids), device=q.device)[:, None, None], ids.clamp(min=0)].float()"

MEMORY: tuple[Mutant, ...] = (
    Mutant(
        "the teacher gathers its entries for every query", Attention.report,
        ((_TARGET, f"target = ({_GATHERED} * q.float().sum(2)[:, :, None]).sum(-1).softmax(-1)"),), "memory-growth", _TARGET,
        "selected entries for every query", symbolic=True,
    ),
    Mutant(
        "the teacher's logits are written for every entry", Attention.report,
        ((_TARGET, "target = torch.einsum('bshc,bpc->bsp', q, entries).softmax(-1).gather(-1, ids.clamp(min=0)).float()"),),
        "memory-growth", _TARGET, "square of S", symbolic=True,
    ),
    Mutant(
        "the indexer's scores are written for every entry", Indexer.forward,
        ((_W, f"{_W} + torch.einsum('bshc,bpc->bsp', q, k).amax(-1, keepdim=True)"),), "memory-growth", _W, "square of S",
        symbolic=True,
    ),
    Mutant(
        "a mask [S,S] is written", layout.layer_layout,
        (("within = index - at.start", "within = index - at.start - (index[:, None] < index[None]).long().amin(1)"),),
        "memory-growth", "within = index - at.start", "square of S", config="hca", symbolic=True,
    ),
    Mutant(
        "the watch on the selection looks at every query", captured_mass,
        (("min(n_tokens, max(8, 65536 // max(n_entries, 1)))", "n_tokens"),), "memory-growth", "z = torch.einsum(",
        "square of S",
        symbolic=True,
    ),
)  # fmt: skip

HOST: tuple[Mutant, ...] = (
    Mutant(
        "a loss is divided by a number on the host", objectives.mean,
        (("n.clamp(min=1).to(total.dtype)", "(n.item() + 1e-9)"),), "no-host-sync", "return total /", "reads a number",
        config="swa",
    ),
    Mutant(
        "targets are picked by a boolean mask", transformer.output_loss,
        ((".masked_fill(targets == IGNORED, 0.0).sum()", "[targets != IGNORED].sum()"),), "no-host-sync",
        "return (logits.logsumexp", "boolean mask", config="swa",
    ),
    Mutant(
        "the experts' load goes to the host", MoE.forward, (("routing.load.float()", "routing.load.float().to('cpu')"),),
        "no-host-sync", "return y, MoEFacts(", "copies from", config="swa",
    ),
)  # fmt: skip

_SAVED = "chooses = op in (ours.route.default, ours.indexer_topk.default, aten.topk.default, aten.sort.stable)"

RECOMPUTED: tuple[Mutant, ...] = (
    Mutant(
        "experts and entries are chosen again", block._keep_choices, ((_SAVED, "chooses = False"),),
        "no-recompute-of-random",
        "ops.route(", "dsv4.route chose", recompute=True,
    ),
    Mutant(
        "entries are chosen again", block._keep_choices, (("ours.indexer_topk.default, ", ""),),
        "no-recompute-of-random", "ops.indexer_topk(", "dsv4.indexer_topk chose", recompute=True,
    ),
    Mutant(
        "a dropout is drawn again", block._Layer.body,
        (("y, attention = self.attn(self.attn_norm(u), at, dense, teach)",
          "y, attention = self.attn(torch.nn.functional.dropout(self.attn_norm(u), 0.1), at, dense, teach)"),),
        "no-recompute-of-random", "y, attention = self.attn(", "draws again", config="swa", recompute=True,
    ),
    Mutant("choices are kept", block._keep_choices, (("if chooses else", "if bool(chooses) else"),), recompute=True),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = (*ROTATIONS, *SCALES, *MIXING, *MEMORY, *HOST, *RECOMPUTED)
