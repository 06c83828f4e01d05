"""The named model sizes, as data.

``flash`` and ``pro`` are the released models (specification, section 11); ``flash-primus`` is Flash under the recipe of the
public trainer that pairs a compressed RoPE base of 40000 with a YaRN factor of 4 and balances with 1e-3; ``tiny`` and
``small`` train on a CPU and have every layer kind.  Training coefficients are those of the report.
"""

from __future__ import annotations

from typing import Any

_FLASH: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": (0, 0, *(4, 128) * 20, 4, 0),
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "routed_scaling_factor": 1.5,
    "indexer_kl_coef": 1e-2,
}

_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "compress_ratios": (0, 0, 4, 8, 4, 0),
    "hca_ratio": 8,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_hash_layers": 2,
    "rope_original_length": 64,
    "max_position_embeddings": 65536,
    "indexer_kl_coef": 1e-2,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "small": _TINY
    | {
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_groups": 4,
        "o_lora_rank": 64,
        "sliding_window": 64,
        "compress_ratios": (0, 0, 4, 32, 4, 32, 4, 32, 0),
        "hca_ratio": 32,
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "rope_original_length": 4096,
    },
    "flash": _FLASH,
    "flash-primus": _FLASH
    | {"compress_rope_theta": 40000.0, "rope_factor": 4.0, "seq_balance_loss_coef": 1e-3, "mtp_loss_coef": 0.1},
    "pro": _FLASH
    | {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "compress_ratios": (128, 128, *(4, 128) * 29, 4, 0),
        "index_topk": 1024,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
    },
}


RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 300, "seq_len": 256, "batch_size": 4, "lr": 3e-3, "warmup_steps": 20},
    "small": {"steps": 1000, "seq_len": 1024, "batch_size": 4, "lr": 1e-3, "warmup_steps": 100},
    "flash": {"steps": 100000, "seq_len": 4096, "batch_size": 1, "lr": 2.7e-4, "warmup_steps": 2000},
    "pro": {"steps": 100000, "seq_len": 4096, "batch_size": 1, "lr": 2.0e-4, "warmup_steps": 2000},
}
"""Training defaults of a preset (specification, section 7 for the released sizes); ``flash-primus`` shares Flash's."""
RECIPES["flash-primus"] = RECIPES["flash"]
