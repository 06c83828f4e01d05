"""Defects of gradients, objectives and precision, as changes of the model's source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from dsv4c import ops
from dsv4c.compile import capture
from dsv4c.model import norms, objectives, precision, rope, transformer
from dsv4c.model.attention import Attention
from dsv4c.model.compressor import Compressor
from dsv4c.model.hyper_connections import HyperConnection, HyperHead
from dsv4c.model.indexer import Indexer
from dsv4c.model.moe import Experts, Gate, MoE
from dsv4c.model.norms import RMSNorm
from dsv4c.model.transformer import DeepseekV4
from dsv4c.ops import reference
from tests.passes.verify.mutation import CONFIGS, Mutant

_INPUTS = "x.detach(), query_latent.detach()"
_TEACHER = "q.detach(), entries.detach(), chosen, ids, scores, lse.detach()"
_TARGET = "target.detach().to(acc)"
_CONSTANT = "q, entries, lse = q.detach(), entries.detach(), None if lse is None else lse.detach()"
_KL, _KL_METRIC = 'losses["indexer_kl"] = total * c.indexer_kl_coef', 'metrics["indexer_kl"] = total.detach()'
_MTP = 'losses["mtp"] = mtp * (self.mtp_loss_coef / c.num_nextn_predict_layers)'
_END = "return ModelOutput(losses, metrics)"
_ROUTE = "weights, ids, scores, load = ops.route(logits,"
_LOGITS = "logits = linear_wide(x, self.weight)"
_LINEAR = "return F.linear(wide(x), wide(weight))"
_NORM = "return (rms(x, self.eps) * self.weight).to(x.dtype)"
_HEAD = "return linear_wide(norm(hc_head(streams)), head.weight)"
_MEAN = "return total / n.clamp(min=1).to(total.dtype)"
_ALL_BF16 = CONFIGS["csa"].replace(keep_fp32_parameters=False)


@contextmanager
def tf32() -> Iterator[None]:
    """The setting of this process under which fp32 products may be taken in less."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def autocast_backward() -> Iterator[None]:
    """torch.compile's own default: the backward pass under the autocast of the forward pass."""
    with (
        mock.patch.object(capture, "prepare_compiler"),
        mock.patch.object(torch._functorch.config, "backward_pass_autocast", "same_as_forward"),
    ):
        yield


GRADIENTS = (
    Mutant(
        "the indexer reads x undetached", Indexer.forward, ((_INPUTS, "x, query_latent.detach()"),),
        "gradient-reach", "k = rotate(self.compressor(x, at)", says="x, made in layers.0.attn_norm",
    ),
    Mutant(
        "the indexer reads the query latent undetached", Indexer.forward, ((_INPUTS, "x.detach(), query_latent"),),
        "gradient-reach", "q = F.linear(narrow(query_latent)", says="query_latent, made in layers.0.attn.q_norm",
    ),
    Mutant(
        "the detach stands at the wrong tensor", Indexer.forward,
        ((_INPUTS, "x, query_latent.detach()"), ("rotate(q, at.cos, at.sin)", "rotate(q, at.cos.detach(), at.sin)")),
        "gradient-reach", "k = rotate(self.compressor(x, at)",
    ),
    Mutant(
        "the detach stands at the indexer's result", Attention.select,
        (("ids, scores = self.indexer(x, query_latent, at, dense)",
          "ids, scores = self.indexer(x, query_latent, at, dense); scores = scores.detach()"),),
        "objective-reported", says="indexer_kl is reported and trains nothing",
    ),
    Mutant("the indexer's inputs are cut by .data", Indexer.forward, ((_INPUTS, "x.data, query_latent.data"),)),
    Mutant(
        "the indexer's inputs are cut by no_grad", Indexer.forward,
        ((f"x, query_latent = {_INPUTS}", "with torch.no_grad(): x, query_latent = x.clone(), query_latent.clone()"),),
    ),
    Mutant("the teacher is handed q undetached: its operator has no gradient", Attention.forward,
           ((_TEACHER, _TEACHER.replace("q.detach()", "q")),)),
    Mutant("the teacher is handed entries undetached: its operator has no gradient", Attention.forward,
           ((_TEACHER, _TEACHER.replace("entries.detach()", "entries")),)),
    Mutant("the teacher is handed lse undetached: its operator has no gradient", Attention.forward,
           ((_TEACHER, _TEACHER.replace("lse.detach()", "lse")),)),
    *(
        Mutant(
            f"the teacher's formula reads {name} undetached", Attention.forward,
            ((_TEACHER, _TEACHER.replace(f"{name}.detach()", name)),), "gradient-reach",
            "loss = ops.indexer_kl(target, scores, at.real)[0]", says="target, made in layers.0.attn",
            around=ops.use_reference,
            also=(
                (reference.indexer_kl_target, ((_CONSTANT, "pass"),)),
                (reference.indexer_kl, ((_TARGET, "target.to(acc)"),)),
            ),
        )
        for name in ("q", "entries", "lse")
    ),
    Mutant(
        "the language-model loss reaches the indexer through its scores", Attention.forward,
        (("q, kv, entries, self.attn_sink", "q * scores.sum().to(q.dtype), kv, entries, self.attn_sink"),),
        "gradient-reach", "q, kv, entries, self.attn_sink", says="lm trains layers.0.attn.indexer",
    ),
    Mutant(
        "a weight of the indexer is cut off", Indexer.forward,
        (("narrow(self.weights_proj.weight)", "narrow(self.weights_proj.weight.detach())"),),
        "gradient-reach", says="indexer_kl does not train layers.0.attn.indexer.weights_proj.weight",
    ),
    Mutant("metrics keep their gradient", DeepseekV4._output,
           (("total.detach()", "total"), ("terms.detach().mean()", "terms.mean()"))),
)  # fmt: skip

OBJECTIVES = (
    Mutant(
        "losses are summed inside", DeepseekV4._output,
        ((_END, f'losses["lm"] = losses["lm"] + losses.pop("indexer_kl"); {_END}'),),
        "gradient-reach", says="names objective indexer_kl, which the module does not return",
    ),
    Mutant(
        "losses are summed inside and the log lacks one", DeepseekV4._output,
        ((_END, f'losses["lm"] = losses["lm"] + losses.pop("indexer_kl"); {_END}'),),
        "objective-reported", says="indexer_kl is on and is not returned",
    ),
    Mutant(
        "a loss is returned and added to another too", DeepseekV4._output,
        ((_END, f'losses["lm"] = losses["lm"] + losses["indexer_kl"]; {_END}'),),
        "gradient-reach", _END, says="lm trains layers.0.attn.indexer",
    ),
    Mutant(
        "the distillation loss is formed and dropped", DeepseekV4._output, ((_KL, "pass"),),
        "objective-reported", "loss = ops.indexer_kl(target, scores, at.real)[0]",
        says="reaches no objective",
    ),
    Mutant(
        "the balance loss is not in the log", DeepseekV4._output, (('losses["seq_balance"] = terms.sum()', "pass"),),
        "objective-reported", says="seq_balance is on and is not returned",
    ),
    Mutant(
        "a loss is a constant 0", DeepseekV4._output, ((_KL, 'losses["indexer_kl"] = total.new_zeros(())'),),
        "objective-reported", _KL, says="indexer_kl is a constant",
    ),
    Mutant(
        "a loss is detached", DeepseekV4._output, ((_KL, _KL.replace("total * c", "total.detach() * c")),),
        "objective-reported", _KL, says="indexer_kl is reported and trains nothing",
    ),
    Mutant(
        "a metric is a hard zero", DeepseekV4._output, (("total.detach()", "torch.zeros_like(total)"),),
        "objective-reported", _KL_METRIC, says="metrics.indexer_kl does not depend on",
    ),
    Mutant(
        "the coefficient is applied twice", DeepseekV4._output,
        ((_KL, f"{_KL} * c.indexer_kl_coef"),),
        "objective-reported", _KL, says="by 0.0001 and its coefficient is 0.01: it is applied twice",
    ),
    Mutant(
        "the coefficient of MTP is forgotten", DeepseekV4._output,
        ((_MTP, 'losses["mtp"] = mtp * 1.0'),),
        "objective-reported", _MTP, says="it is not applied", config="mtp",
    ),
    Mutant(
        "the balance loss is a mean over layers", DeepseekV4._output,
        (("= terms.sum()", "= terms.mean()"),), "objective-reported", says="seq_balance is multiplied by",
        config="two",
    ),
    Mutant(
        "a mean is divided twice", objectives.mean, ((_MEAN, f"{_MEAN} / n.clamp(min=1)"),),
        "objective-reported", _MEAN, says="is divided by a count 2 times",
    ),
    Mutant(
        "a mean of a mean", transformer.output_loss, (("0.0).sum()", "0.0).mean()"),),
        "objective-reported", _MEAN, says="lm is divided by a count 2 times",
    ),
    Mutant(
        "a sum that is not divided", objectives.mean, ((_MEAN, "return total"),), "objective-reported",
        says="is a sum and not a mean",
    ),
    Mutant(
        "the indexer is frozen and its loss is on", DeepseekV4.set_stage,
        (("on = self.config.trains_indexer and", "on = False and"),), "objective-reported", _KL,
        says="indexer_kl is reported and trains nothing",
    ),
)  # fmt: skip

ROUTER = (
    Mutant(
        "the router multiplies in bf16 and widens", Gate.forward,
        ((_LOGITS, "logits = F.linear(x, self.weight.to(x.dtype)).float()"),), "router-fp32", _LOGITS,
        says="layers.0.ffn.gate.weight is multiplied in bfloat16",
    ),
    Mutant(
        "autocast lowers the router's product", precision.linear_wide, (("with no_autocast(x):", "if True:"),),
        "router-fp32", _LINEAR, says="is multiplied in bfloat16", autocast=True,
    ),
    Mutant(
        "the fp32 product is overwritten by a bf16 one", Gate.forward,
        ((_LOGITS, f"{_LOGITS}; logits = F.linear(x, self.weight.to(x.dtype)).float()"),), "router-fp32", _LOGITS,
        says="is multiplied in bfloat16",
    ),
    Mutant(
        "the bf16 product is overwritten by the fp32 one", Gate.forward,
        ((_LOGITS, f"logits = F.linear(x, self.weight.to(x.dtype)); {_LOGITS}"),),
    ),
    Mutant(
        "logits are rounded before the choice", Gate.forward,
        ((_ROUTE, "weights, ids, scores, load = ops.route(logits.to(x.dtype).float(),"),), "router-fp32", _ROUTE,
        says="rounded to bfloat16 before the choice",
    ),
    Mutant(
        "the bias buffer follows the model to bf16", None, (), "router-fp32", _ROUTE,
        says="layers.0.ffn.gate.bias is bfloat16", config=_ALL_BF16,
    ),
    Mutant(
        "a hash router multiplies in bf16", Gate.forward,
        ((_LOGITS, "logits = F.linear(x, self.weight.to(x.dtype)).float()"),), "router-fp32", _LOGITS, config="swa-hash",
    ),
    Mutant(
        "the process allows tf32", None, (), "router-fp32", _LINEAR, says='set_float32_matmul_precision("highest")',
        around=tf32,
    ),
    Mutant(
        "routing weights promote the stream", MoE.forward, ((".to(x.dtype).view_as(x)", ".view_as(x)"),), "router-fp32",
        "y = (self.experts(flat, routing", says="makes the residual stream float32",
        also=((HyperConnection.post, (("ops.hc_post(y, streams, post, comb)",
               "y[:, :, None] * post[..., None].to(streams.dtype) + (comb.mT.to(streams.dtype) @ streams)"),)),),
    ),
    Mutant(
        "the router goes backward under autocast", None, (), "router-fp32", _LINEAR, says="goes backward in bfloat16",
        autocast=True, around=autocast_backward,
    ),
    Mutant("a model that is fp32 throughout", None, (), dtype=torch.float32),
)  # fmt: skip

ISLANDS = (
    Mutant(
        "the sink is rounded", Attention.forward, (("self.attn_sink,", "self.attn_sink.to(x.dtype),"),), "fp32-islands",
        "q, kv, entries, self.attn_sink", says="the attention sink",
    ),
    Mutant(
        "the sink is stored in bf16", None, (), "fp32-islands", says="layers.0.attn.attn_sink is stored in bfloat16",
        config=_ALL_BF16,
    ),
    Mutant(
        "ape is stored in bf16", None, (), "fp32-islands", "pooled = ops.compress(values, logits, self.ape",
        says="layers.0.attn.compressor.ape is stored in bfloat16", config=_ALL_BF16,
    ),
    Mutant(
        "hyper-connections are stored in bf16", None, (), "fp32-islands", "ops.hc_pre(",
        says="layers.0.hc_attn.fn is stored in bfloat16", config=_ALL_BF16,
    ),
    Mutant(
        "the compressor multiplies in bf16", Compressor.forward,
        (("linear_wide(x, self.wkv.weight)", "self.wkv(x).float()"),), "fp32-islands",
        "values, logits = linear_wide(x, self.wkv.weight)", says="the compressor's values", config="hca",
    ),
    Mutant(
        "the compressor's gate multiplies in bf16", Compressor.forward,
        (("linear_wide(x, self.wgate.weight)", "self.wgate(x).float()"),), "fp32-islands",
        "values, logits = linear_wide(x, self.wkv.weight)", says="its gate logits", config="hca",
    ),
    Mutant(
        "norms are taken in bf16", norms.rms, (("x = wide(x)", "x = x"),), "fp32-islands",
        "return x * torch.rsqrt(x.square().mean", says="the mean of squares of a norm is taken in bfloat16", config="swa",
    ),
    Mutant(
        "norms are rounded before their weight", RMSNorm.forward,
        ((_NORM, "return rms(x, self.eps).to(x.dtype) * self.weight.to(x.dtype)"),), "fp32-islands", _NORM,
        says="rounded to bfloat16 before its weight", config="swa",
    ),
    Mutant(
        "rotary tables are rounded", rope.tables,
        (("return angle.cos(), angle.sin()", "return angle.cos().bfloat16(), angle.sin().bfloat16()"),), "fp32-islands",
        "return angle.cos(), angle.sin()", says="the table of cosines", config="swa",
    ),
    Mutant(
        "rotary angles start from bf16 positions", rope.tables,
        (("positions[..., None].float()", "positions[..., None].bfloat16()"),), "fp32-islands",
        "angle = positions[..., None].float() * inv_freq", says="rotary angles", config="swa",
    ),
    Mutant(
        "logits are widened after the product", transformer.output_logits,
        ((_HEAD, "return torch.nn.functional.linear(norm(hc_head(streams)), head.weight).float()"),), "fp32-islands", _HEAD,
        says="the logits of a loss were bfloat16", config="swa",
    ),
    Mutant(
        "the loss is taken of bf16 logits", transformer.output_loss,
        (("streams)\n", "streams).bfloat16()\n"),), "fp32-islands", "return (logits.logsumexp(-1) - picked)",
        says="a logsumexp is taken in bfloat16", config="swa",
    ),
    Mutant(
        "autocast lowers the head of the hyper-connections", HyperHead.forward,
        (("linear_wide(v, self.fn)", "torch.nn.functional.linear(v, self.fn)"),), "fp32-islands",
        "z = linear_wide(v, self.fn)", says="hc_head.fn is rounded to bfloat16", config="swa", autocast=True,
    ),
    Mutant(
        "comb is rounded", HyperConnection.post, (("post, comb)", "post, comb.to(y.dtype).float())"),), "fp32-islands",
        "return ops.hc_post(y, streams, post, comb)", says="comb (comb of dsv4.hc_post) was bfloat16", config="swa",
    ),
    Mutant(
        "experts are added in bf16", Experts.forward,
        (("wide(_Permute.apply(out, inverse, order, 1))", "_Permute.apply(out, inverse, order, 1)"),), "fp32-islands",
        "return wide(_Permute.apply(out", says="experts are added in bfloat16", config="swa",
    ),
    Mutant(
        "the compressor goes backward under autocast", None, (), "fp32-islands", _LINEAR,
        says="compressor.wkv.weight goes backward in bfloat16", config="hca", autocast=True, around=autocast_backward,
    ),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = (*GRADIENTS, *OBJECTIVES, *ROUTER, *ISLANDS)
