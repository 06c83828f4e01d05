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
from dsv4c.model import block, compressor, layout, moe, objectives, precision, rope
from dsv4c.model.attention import Attention
from dsv4c.model.hyper_connections import HyperConnection
from dsv4c.model.indexer import Indexer
from dsv4c.model.moe import Gate
from dsv4c.model.norms import RMSNorm
from dsv4c.model.transformer import DeepseekV4
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

_visibility, _attention_op, _topk_op, _sinkhorn_op = (
    sys.modules[f"dsv4c.ops.{name}"] for name in ("visibility", "sparse_attention", "indexer_topk", "sinkhorn")
)


class Mutant(NamedTuple):
    target: Any  # a function, a property or an operator
    changes: tuple[tuple[str, str], ...]
    killer: Callable[..., None]
    arguments: tuple[Any, ...] = ()


def mutant(target: Any, old: str, new: str, killer: Callable[..., None], *arguments: Any) -> Mutant:
    return Mutant(target, ((old, new),), killer, arguments)


_DETACHED = "q.detach(), entries.detach(), chosen, ids, scores, lse.detach()"
_TRAINS_INDEXER_ONLY = test_gradient_topology.test_the_distillation_trains_every_indexer_parameter_and_nothing_else
_AS_IF_ALONE = test_packing.test_packed_documents_are_as_if_alone
_PADDING_IS_NOTHING = test_packing.test_padding_changes_nothing_at_real_tokens

MUTANTS: dict[str, Mutant] = {
    "comb is not transposed (B12)": mutant(
        HyperConnection.post, "mix(comb,", "mix(comb.mT,", test_hyper_connections.test_the_first_index_of_comb_is_summed
    ),
    "post lacks its factor 2 (B12)": mutant(
        HyperConnection.pre, "2 * torch.sigmoid", "torch.sigmoid",
        test_hyper_connections.test_neutral_parameters_give_the_neutral_weights,
    ),
    "Sinkhorn starts with the rows (B12)": mutant(
        _sinkhorn_op._steps, "[_COLUMNS, *(_ROWS, _COLUMNS)", "[_ROWS, *(_COLUMNS, _ROWS)",
        test_hyper_connections.test_columns_of_comb_sum_to_one_and_rows_only_nearly,
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
        ops._indexer_topk.indexer_topk, ".relu_()", "", test_indexer.test_relu_is_taken_per_head
    ),
    "the teacher ignores window and sink (B21)": mutant(
        Attention.report, 'lse if self.target == "joint" else None', "None",
        test_distillation.test_the_model_is_taught_by_the_target_of_its_configuration, "joint",
    ),
    "previous slots of the first window are not gated": mutant(
        compressor.pool, '.masked_fill(missing, float("-inf"))', ".masked_fill(missing, 0.0)",
        test_compressor.test_equal_logits_give_the_mean, 4,
    ),
    "overlap halves are swapped": Mutant(
        compressor.pool,
        (
            ("values[..., width - c :]", "values[..., :c]"), ("logits[..., width - c :]", "logits[..., :c]"),
            ("values[..., :c][row, before]", "values[..., width - c :][row, before]"),
            ("logits[..., :c][row, before]", "logits[..., width - c :][row, before]"),
        ),
        test_compressor.test_equal_logits_give_the_mean, (4,),
    ),
    "no sink": mutant(
        ops._sparse_attention.sparse_attention, "weights.sum(-1) + torch.exp(sink.to(acc) - peak)", "weights.sum(-1)",
        test_attention.test_the_sink_takes_its_share_and_has_no_value,
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
        Gate.forward, "scores.gather(-1, ids)", "(scores + self.bias).gather(-1, ids)",
        test_moe.test_the_bias_chooses_and_does_not_weigh,
    ),
    "scores are cast back before top-k (B31)": mutant(
        Gate.forward, "sqrt_softplus(linear_wide(x, self.weight))", "sqrt_softplus(linear_wide(x, self.weight)).to(x.dtype)",
        test_precision.test_two_experts_of_one_bf16_score_are_told_apart, "bf16",
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
        moe.sqrt_softplus, "F.softplus(logits.clamp(min=-20.0)).sqrt())", "F.softplus(logits).sqrt())",
        test_moe.test_scores_and_their_gradients_are_finite_everywhere,
    ),
    "the gate is clamped on both sides (B13)": mutant(
        moe.clamped_swiglu, "g.clamp(max=limit)", "g.clamp(-limit, limit)",
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
        _visibility.window_mask, "& (s >= start[:, :, None])", "", _AS_IF_ALONE, "swa-learned", [5, 13]
    ),
    "entries are seen across documents (invariant 32)": mutant(
        _visibility.entry_mask, "& (end >= start[:, :, None])", "", _AS_IF_ALONE, "hca-learned", [9, 1, 3, 18, 2]
    ),
    "overlap crosses documents (invariant 32)": mutant(
        layout.layer_layout, "within.gather(1, last) >= 2 * ratio - 1", "last >= 2 * ratio - 1",
        _AS_IF_ALONE, "csa-learned", [9, 1, 3, 18, 2],
    ),
    "the MTP layer counts tokens without a next one": mutant(
        DeepseekV4._predict_two_ahead, "objectives.has_next(at)", "at.real", _AS_IF_ALONE, "swa-learned", [1, 1, 1]
    ),
    "padding is counted as load": mutant(
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
