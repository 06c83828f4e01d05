"""Every field of the configuration changes something that can be seen: a key that nothing reads cannot exist."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ModelConfig
from dsv4c.errors import DataError
from tests.model.conftest import SPEC, batch, build

N = 40
# Quantised queries let Hadamard be seen, a tight limit the clamps; long enough for entries beyond top-k.
BASE = SPEC.replace(indexer_qk_precision="fp4", swiglu_limit=0.5)
Seen = dict[str, Any]


def shapes(config: ModelConfig) -> Seen:
    return {n: tuple(t.shape) for n, t in DeepseekV4(config).state_dict().items()}


@functools.cache
def computed(config: ModelConfig) -> Seen:
    """Logits and losses with the weights of the base model."""
    model = build(config)
    model.load_state_dict(build(BASE).state_dict())
    ids, targets = batch(N)
    losses = model(ids, targets=targets).losses
    return {"logits": model(ids).logits} | losses


def logits(config: ModelConfig) -> Seen:
    return {"logits": computed(config)["logits"]}


def losses(*names: str) -> Callable[[ModelConfig], Seen]:
    """These losses and no other differ, nor do the logits."""

    def look(config: ModelConfig) -> Seen:
        seen = computed(config)
        expected = computed(BASE)
        rest = [n for n in seen if n not in names]
        assert all(torch.equal(seen[n], expected[n]) for n in rest)
        return {n: seen.get(n) for n in names}

    return look


def initial(config: ModelConfig) -> Seen:
    torch.manual_seed(0)
    return {n: p.detach() for n, p in DeepseekV4(config).named_parameters()}


def dtypes(config: ModelConfig) -> Seen:
    return {n: t.dtype for n, t in DeepseekV4(config).bfloat16().state_dict().items()}


def longest(config: ModelConfig) -> Seen:
    try:
        DeepseekV4(config)(batch(N)[0])
    except DataError as error:
        return {"refused": error.where}
    return {"refused": None}


def updated_bias(config: ModelConfig) -> Seen:
    model = build(config)
    model.update_router_bias(torch.arange(8.0).expand(6, 8))
    return {"bias": model.layers[4].ffn.gate.bias}


def expert_load(config: ModelConfig) -> Seen:
    ids, targets = batch(N)
    return {"load": build(config)(ids, targets=targets).metrics["expert_load"]}


def objectives(config: ModelConfig) -> Seen:
    ids, targets = batch(N)
    model = build(config)
    return {
        "on": set(model(ids, targets=targets).losses),
        "trained": {n for n, p in model.named_parameters() if p.requires_grad},
    }


ROWS: dict[str, tuple[dict[str, Any], Callable[[ModelConfig], Seen]]] = {
    "vocab_size": ({"vocab_size": 97}, shapes),
    "hidden_size": ({"hidden_size": 48}, shapes),
    "num_hidden_layers": ({"num_hidden_layers": 4, "compress_ratios": (0, 0, 4, 8, 0)}, shapes),
    "num_attention_heads": ({"num_attention_heads": 8}, shapes),
    "head_dim": ({"head_dim": 64}, shapes),
    "qk_rope_head_dim": ({"qk_rope_head_dim": 8}, logits),
    "q_lora_rank": ({"q_lora_rank": 16}, shapes),
    "o_groups": ({"o_groups": 4}, shapes),
    "o_lora_rank": ({"o_lora_rank": 8}, shapes),
    "sliding_window": ({"sliding_window": 7}, logits),
    "compress_ratios": ({"compress_ratios": (0, 0, 8, 8, 4, 0)}, shapes),
    "index_n_heads": ({"index_n_heads": 4}, shapes),
    "index_head_dim": ({"index_head_dim": 16}, shapes),
    "index_topk": ({"index_topk": 2}, logits),
    "n_routed_experts": ({"n_routed_experts": 4}, shapes),
    "num_experts_per_tok": ({"num_experts_per_tok": 3}, shapes),
    "moe_intermediate_size": ({"moe_intermediate_size": 16}, shapes),
    "num_hash_layers": ({"num_hash_layers": 3}, shapes),
    "routed_scaling_factor": ({"routed_scaling_factor": 2.5}, logits),
    "num_nextn_predict_layers": ({"num_nextn_predict_layers": 0, "compress_ratios": (0, 0, 4, 8, 4)}, shapes),
    "hca_ratio": ({"hca_ratio": 16, "compress_ratios": (0, 0, 4, 16, 4, 0)}, shapes),
    "max_position_embeddings": ({"max_position_embeddings": N - 1}, longest),
    "rope_theta": ({"rope_theta": 500.0}, logits),
    "compress_rope_theta": ({"compress_rope_theta": 40000.0}, logits),
    "rope_factor": ({"rope_factor": 4.0}, logits),
    "rope_original_length": ({"rope_original_length": 4096}, logits),
    "rope_beta_fast": ({"rope_beta_fast": 1.0}, logits),
    "rope_beta_slow": ({"rope_beta_slow": 16.0}, logits),
    "hc_mult": ({"hc_mult": 2}, shapes),
    "hc_sinkhorn_iters": ({"hc_sinkhorn_iters": 2}, logits),
    "hc_eps": ({"hc_eps": 1e-2}, logits),
    "rms_norm_eps": ({"rms_norm_eps": 1e-2}, logits),
    "swiglu_limit": ({"swiglu_limit": 0.25}, logits),
    "swiglu_limit_shared": ({"swiglu_limit_shared": False}, logits),
    "initializer_range": ({"initializer_range": 0.03}, initial),
    "hc_init_scale": ({"hc_init_scale": 0.5}, initial),
    "indexer_hadamard": ({"indexer_hadamard": False}, computed),
    "indexer_qk_precision": ({"indexer_qk_precision": "fp8"}, computed),
    "indexer_proj_precision": ({"indexer_proj_precision": "fp8"}, computed),
    "attention_kv_precision": ({"attention_kv_precision": "fp8"}, logits),
    "keep_fp32_parameters": ({"keep_fp32_parameters": False}, dtypes),
    "mtp_loss_coef": ({"mtp_loss_coef": 0.1}, losses("mtp")),
    "seq_balance_loss_coef": ({"seq_balance_loss_coef": 1e-3}, losses("seq_balance")),
    "indexer_kl_coef": ({"indexer_kl_coef": 0.5}, losses("indexer_kl")),
    "indexer_kl_target": ({"indexer_kl_target": "selected"}, losses("indexer_kl")),
    "router_bias_update_rate": ({"router_bias_update_rate": 1e-2}, updated_bias),
    "force_balanced_routing": ({"force_balanced_routing": True}, expert_load),
}


def differs(a: Seen, b: Seen) -> bool:
    def same(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y) and x == y

    return a.keys() != b.keys() or any(not same(a[n], b[n]) for n in a)


def test_every_field_has_a_row() -> None:
    assert set(ROWS) == {f.name for f in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize("name", ROWS)
def test_a_changed_field_is_seen(name: str) -> None:
    changes, look = ROWS[name]
    config = BASE.replace(**changes)
    assert getattr(config, name) != getattr(BASE, name)
    assert set(changes) - {name} <= {"compress_ratios"}  # nothing else but what the schedule must follow
    assert differs(look(BASE), look(config))


@pytest.mark.parametrize("look", [shapes, computed, initial, dtypes, longest, updated_bias, expert_load])
def test_what_is_looked_at_differs_by_the_configuration_alone(look: Callable[[ModelConfig], Seen]) -> None:
    again = getattr(look, "__wrapped__", look)
    assert not differs(again(BASE), again(BASE.replace()))


@pytest.mark.parametrize("name", ["mtp_loss_coef", "seq_balance_loss_coef", "indexer_kl_coef"])
def test_a_coefficient_of_zero_turns_its_objective_off(name: str) -> None:
    assert differs(objectives(BASE), objectives(BASE.replace(**{name: 0.0})))
