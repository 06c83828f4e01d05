"""The tests can fail: each known wrong formula is put into the code, in memory, and a named test must notice it."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch

from dsv4c import ops
from dsv4c.model import block, layout, moe, objectives, precision, rope
from dsv4c.model.attention import Attention
from dsv4c.model.hyper_connections import HyperConnection
from dsv4c.model.indexer import Indexer
from dsv4c.model.moe import Gate
from dsv4c.model.norms import RMSNorm
from dsv4c.model.transformer import DeepseekV4
from dsv4c.ops import reference
from tests.model import (
    test_attention,
    test_compressor,
    test_distillation,
    test_gradient_topology,
    test_hyper_connections,
    test_indexer,
    test_layout,
    test_moe,
    test_mtp,
    test_norms,
    test_packing,
    test_precision,
    test_rope,
    test_router_bias,
    test_stages,
)

_visibility, _topk_op, _compress_op, _route_op, _swiglu_op = (
    sys.modules[f"dsv4c.ops.{name}"] for name in ("visibility", "indexer_topk", "compress", "route", "swiglu_clamp")
)


class Mutant(NamedTuple):
    target: Any  # a function, a property or an operator
    changes: tuple[tuple[str, str], ...]
    killer: Callable[..., None]
    arguments: tuple[Any, ...] = ()


def mutant(target: Any, old: str, new: str, killer: Callable[..., None], *arguments: Any) -> Mutant:
    return Mutant(target, ((old, new),), killer, arguments)


def on_references(killer: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        with ops.use_reference():
            killer(*arguments)

    return run


_DETACHED = "q.detach(), entries.detach(), chosen, ids, scores, lse.detach()"
# Slots of value 0 and logit 0 in front of those of a window without one before it.
_UNGATED = """if overlap and not with_previous:
                    v, e = (torch.cat((torch.zeros_like(t), t), 1) for t in (v, e))
                """
_TRAINS_INDEXER_ONLY = test_gradient_topology.test_the_distillation_trains_every_indexer_parameter_and_nothing_else
_AS_IF_ALONE = test_packing.test_packed_documents_are_as_if_alone
_PADDING_IS_NOTHING = test_packing.test_padding_changes_nothing_at_real_tokens

MUTANTS: dict[str, Mutant] = {
    "comb is not transposed (B12)": mutant(
        HyperConnection.post, "post, comb)", "post, comb.mT)", test_hyper_connections.test_the_first_index_of_comb_is_summed
    ),
    "post lacks its factor 2 (B12)": mutant(
        reference.hc_pre, "2 * torch.sigmoid", "torch.sigmoid",
        on_references(test_hyper_connections.test_neutral_parameters_give_the_neutral_weights),
    ),
    "the model halves post (B12)": mutant(
        HyperConnection.pre, "return u, post, comb", "return u, post / 2, comb",
        test_hyper_connections.test_neutral_parameters_give_the_neutral_weights,
    ),
    "Sinkhorn starts with the rows (B12)": Mutant(
        reference.sinkhorn, (("c.sum(-2,", "c.sum(-1,"), ("c.sum(-1,", "c.sum(-2,")),
        on_references(test_hyper_connections.test_columns_of_comb_sum_to_one_and_rows_only_nearly),
    ),
    "the output is not rotated back (B06)": mutant(
        Attention.project, "rotate(o, at.cos, at.sin, inverse=True)", "o",
        test_attention.test_every_kind_of_layer_rotates_its_output_back, "csa",
    ),
    "entries stand at their index (B05)": mutant(
        layout.layer_layout, "at.positions.gather(1, first)", "at.positions[:, : first.shape[1]]",
        test_rope.test_main_and_indexer_entries_are_rotated_by_that_table, "monkeypatch",
    ),
    "YaRN in window layers (B02)": mutant(
        rope.inverse_frequencies, "if ratio and config", "if config",
        test_rope.test_sliding_window_layers_use_the_plain_table_and_compressed_ones_yarn, "flash",
    ),
    "no temperature (invariant 18)": mutant(
        Indexer.temperature, "self.width**-0.5 * self.heads**-0.5", "1.0",
        test_indexer.test_the_temperature_is_that_of_the_specification,
    ),
    "indexer reads x undetached (invariant 21)": mutant(
        Indexer.forward, "x.detach(), query_latent.detach()", "x, query_latent.detach()", _TRAINS_INDEXER_ONLY, False
    ),
    "indexer reads the latent undetached (invariant 21)": mutant(
        Indexer.forward, "x.detach(), query_latent.detach()", "x.detach(), query_latent", _TRAINS_INDEXER_ONLY, False
    ),
    "teacher reads q undetached": mutant(
        Attention.forward, _DETACHED, _DETACHED.replace("q.detach()", "q"),
        test_gradient_topology.test_the_teacher_is_handed_constants, "monkeypatch",
    ),
    "teacher reads entries undetached": mutant(
        Attention.forward, _DETACHED, _DETACHED.replace("entries.detach()", "entries"),
        test_gradient_topology.test_the_teacher_is_handed_constants, "monkeypatch",
    ),
    "teacher reads lse undetached": mutant(
        Attention.forward, _DETACHED, _DETACHED.replace("lse.detach()", "lse"),
        test_gradient_topology.test_the_teacher_is_handed_constants, "monkeypatch",
    ),
    "scores without relu (B16)": mutant(
        _topk_op.choose, ".relu_()", "", test_indexer.test_relu_is_taken_per_head
    ),
    "the teacher ignores window and sink (B21)": mutant(
        Attention.report, 'lse if self.target == "joint" else None', "None",
        test_distillation.test_the_model_is_taught_by_the_target_of_its_configuration, "joint",
    ),
    "previous slots of the first window are not gated": mutant(
        _compress_op._blocks, "yield _Block(", _UNGATED + "yield _Block(", test_compressor.test_equal_logits_give_the_mean, 4
    ),
    "previous slots of the first window are not gated, in the formula": mutant(
        reference.compress, ".masked_fill(missing, NOWHERE)", ".masked_fill(missing, 0.0)",
        on_references(test_compressor.test_equal_logits_give_the_mean), 4,
    ),
    "overlap halves are swapped": Mutant(
        _compress_op._blocks, (("slice(0, c)", "slice(width - c, width)"), ("slice(width - c, width)", "slice(0, c)")),
        test_compressor.test_equal_logits_give_the_mean, (4,),
    ),
    "overlap halves are swapped, in the formula": Mutant(
        reference.compress,
        (
            ("values[..., width - c :]", "values[..., :c]"), ("logits[..., width - c :]", "logits[..., :c]"),
            ("values[..., :c][row, before]", "values[..., width - c :][row, before]"),
            ("logits[..., :c][row, before]", "logits[..., width - c :][row, before]"),
        ),
        on_references(test_compressor.test_equal_logits_give_the_mean), (4,),
    ),
    "no sink": mutant(
        reference.sparse_attention, "torch.logsumexp(joint, -1)", "torch.logsumexp(z, -1)",
        on_references(test_attention.test_the_sink_takes_its_share_and_has_no_value),
    ),
    "a layer without its sink": mutant(
        Attention.forward, "self.attn_sink,", "self.attn_sink - 1e30,",
        test_attention.test_the_output_is_that_of_the_formula, "swa", 10, False,
    ),
    "the window is one token longer": mutant(
        _visibility.window_mask, "s > t - window", "s >= t - window",
        test_layout.test_a_token_sees_itself_and_what_fits_in_the_window, 3,
    ),
    "an entry is visible one token late, t//4 (B08)": mutant(
        _visibility.entry_mask, "end <= t", "end < t",
        test_layout.test_an_entry_is_visible_from_the_last_token_of_its_window_on, 4,
    ),
    "an entry is visible one token early (B08)": mutant(
        _visibility.entry_mask, "end <= t", "end <= t + 1",
        test_layout.test_an_entry_is_visible_from_the_last_token_of_its_window_on, 4,
    ),
    "MTP predicts the next token (B18)": mutant(
        objectives.mtp_targets, "shifted(targets, IGNORED)", "targets",
        test_mtp.test_the_target_is_the_token_after_the_next_without_wrapping_around,
    ),
    "MTP predicts across documents (B18)": mutant(
        objectives.has_next, "index < at.end", "index <= at.end",
        test_mtp.test_a_target_never_comes_from_another_document,
    ),
    "MTP is divided by the main count (B24)": mutant(
        DeepseekV4._output, 'sums["mtp"], n.mtp', 'sums["mtp"], n.lm', test_mtp.test_both_means_are_over_their_own_tokens
    ),
    "weights are biased (B14)": mutant(
        _route_op._plain, "scores.gather(-1, ids)", "(scores + bias).gather(-1, ids)",
        test_moe.test_the_bias_chooses_and_does_not_weigh,
    ),
    "scores are cast back before top-k (B31)": mutant(
        _route_op._plain, "sqrt_softplus(logits.to(acc).contiguous())",
        "sqrt_softplus(logits.to(acc).contiguous()).bfloat16().to(acc)",
        test_precision.test_two_experts_of_one_bf16_score_are_told_apart, "bf16",
    ),
    "logits are cast back before the scores (B31)": mutant(
        Gate.forward, "linear_wide(x, self.weight)", "linear_wide(x, self.weight).to(x.dtype)",
        test_precision.test_scores_and_weights_are_those_of_fp32, "learned", "bf16",
    ),
    "autocast lowers the gate (B35)": mutant(
        precision.linear_wide, "with no_autocast(x):", "if True:",
        test_precision.test_scores_and_weights_are_those_of_fp32, "learned", "autocast",
    ),
    "autocast lowers the products of the indexer's operator (B35)": mutant(
        _topk_op.indexer_topk, "with no_autocast(q):", "if True:",
        test_precision.test_autocast_does_not_reach_into_an_operator, "monkeypatch", "indexer_topk",
    ),
    "recomputation shares the cache of autocast (B26)": mutant(
        block._Layer.run, "with _casts_again(streams):", "if True:",
        test_gradient_topology.test_recomputation_changes_no_loss_no_gradient_and_no_count, "all", True,
    ),
    "the gate follows the activation dtype (B31)": mutant(
        precision.linear_wide, "wide(x), wide(weight)", "x, weight.to(x.dtype)",
        test_precision.test_the_gate_has_one_product_and_it_is_fp32, "bf16",
    ),
    "routing weights promote the streams (B34)": mutant(
        moe.MoE.forward, ".to(x.dtype).view_as(x)", ".view_as(x)",
        test_precision.test_streams_are_bf16_after_every_block_and_losses_fp32, "bf16", False,
    ),
    "the score underflows (B63)": mutant(
        _route_op.sqrt_softplus, "torch.where(logits < _EXPONENTIAL, torch.exp(logits / 2), scores)", "scores",
        test_moe.test_scores_and_their_gradients_are_finite_everywhere,
    ),
    "the slope of a score of 0 is 0 / 0 (B63)": mutant(
        _route_op._slope, "torch.where(scores < 1e-4, scores / 2, torch.expm1(-square).div_(-2 * scores))",
        "torch.expm1(-square).div_(-2 * scores)", test_moe.test_scores_and_their_gradients_are_finite_everywhere,
    ),
    "the score underflows, in the formula (B63)": mutant(
        reference.route, "F.softplus(wide.clamp(min=-20.0)).sqrt())", "F.softplus(wide).sqrt())",
        on_references(test_moe.test_scores_and_their_gradients_are_finite_everywhere),
    ),
    "the gate is clamped on both sides (B13)": mutant(
        _swiglu_op._halves, "g.clamp(max=limit)", "g.clamp(-limit, limit)",
        test_moe.test_the_gate_is_clamped_above_only_and_the_other_half_on_both_sides,
    ),
    "the first hash layer ends the bias update (B27)": mutant(
        DeepseekV4.update_router_bias, "if not gate.hashed:", "if gate.hashed:\n            return\n        if True:",
        test_router_bias.test_the_bias_moves_against_the_load_and_hash_layers_do_not_stop_it,
    ),
    "choices are recomputed (B44, B45)": mutant(
        block._keep_choices, "MUST_SAVE", "PREFER_RECOMPUTE",
        test_gradient_topology.test_a_bias_that_moves_between_forward_and_backward_changes_no_gradient, "all",
    ),
    "the norm is rounded before its weight": mutant(
        RMSNorm.forward, "(rms(x, self.eps) * self.weight).to(x.dtype)",
        "rms(x, self.eps).to(x.dtype) * self.weight.to(x.dtype)",
        test_norms.test_the_weight_is_applied_before_the_only_rounding,
    ),
    "the window crosses documents (invariant 32)": mutant(
        _visibility.window_mask, "& (s >= start[:, :, None])", "", on_references(_AS_IF_ALONE), "swa-learned", [5, 13]
    ),
    "a layer is not told where documents start (invariant 32)": mutant(
        Attention.forward, "at.start,", "torch.zeros_like(at.start),", _AS_IF_ALONE, "swa-learned", [5, 13]
    ),
    "entries are seen across documents (invariant 32)": mutant(
        _visibility.entry_mask, "& (end >= start[:, :, None])", "",
        on_references(_AS_IF_ALONE), "hca-learned", [9, 1, 3, 18, 2],
    ),
    "overlap crosses documents (invariant 32)": mutant(
        layout.layer_layout, "within.gather(1, last) >= 2 * ratio - 1", "last >= 2 * ratio - 1",
        _AS_IF_ALONE, "csa-learned", [9, 1, 3, 18, 2],
    ),
    "the MTP layer counts tokens without a next one": mutant(
        DeepseekV4._predict_two_ahead, "objectives.has_next(at)", "at.real", _AS_IF_ALONE, "swa-learned", [1, 1, 1]
    ),
    "padding is counted as load": mutant(
        _route_op._plain, "ids if real is None else ids[real]", "ids", _PADDING_IS_NOTHING, "swa-learned", 4, 7
    ),
    "the gate is not told what is padding": mutant(
        moe.MoE.forward, "token_ids.flatten(), at.real.flatten()", "token_ids.flatten()",
        _PADDING_IS_NOTHING, "swa-learned", 4, 7,
    ),
    "padding is counted in the balance": mutant(
        moe.expert_counts, "* real[..., None]", "", _PADDING_IS_NOTHING, "swa-learned", 4, 7
    ),
    "the warm-up trains the trunk": mutant(
        DeepseekV4.set_stage, 'stage != "indexer_warmup"', "True", test_stages.test_the_warm_up_trains_the_indexer_alone
    ),
    "the warm-up distils over the selection": mutant(
        Indexer.forward, "n_entries if dense or self.topk is None", "n_entries if self.topk is None",
        test_stages.test_the_warm_up_distils_over_all_visible_entries,
    ),
}  # fmt: skip


def function_of(target: Any) -> FunctionType:
    target = target.fget if isinstance(target, property) else target
    target = getattr(target, "_init_fn", target)  # the kernel of an operator
    return inspect.unwrap(target)


def mutated_code(function: FunctionType, changes: tuple[tuple[str, str], ...]) -> Any:
    """The function's code with its source changed; what it is decorated with stays around it."""
    source = textwrap.dedent(inspect.getsource(function))
    marks = []
    for i, (old, new) in enumerate(changes):
        assert old in source, f"{old!r} is not in {function.__qualname__}: the mutant has to follow the code"
        source = source.replace(old, f"__mark_{i}__")
        marks.append(new)
    for i, new in enumerate(marks):
        source = source.replace(f"__mark_{i}__", new)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([definition], []), function.__code__.co_filename, "exec"), function.__globals__, scope)
    return scope[definition.name].__code__


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_formula_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, changes, killer, arguments = MUTANTS[name]
    given = [monkeypatch if a == "monkeypatch" else a for a in arguments]
    test_packing.model_of.cache_clear()
    killer(*given)  # passes on the code as it is
    monkeypatch.undo()
    function = function_of(target)
    monkeypatch.setattr(function, "__code__", mutated_code(function, changes))
    with pytest.raises((AssertionError, RuntimeError)):
        killer(*given)
    torch.set_grad_enabled(True)
