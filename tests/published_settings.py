"""The keys and values of the two settings files that the Flash model was published with."""

from __future__ import annotations

from typing import Any

FLASH_RATIOS = [0, 0, *[4, 128] * 20, 4, 0]
YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
# The keys of the published config.json of the Flash model.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1", "use_cache": True, "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "tie_word_embeddings": False, "num_key_value_heads": 1, "n_shared_experts": 1,
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_nextn_predict_layers": 1,
    "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
    "o_lora_rank": 1024, "sliding_window": 128, "compress_ratios": FLASH_RATIOS, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": YARN,
    "max_position_embeddings": 1048576, "n_routed_experts": 256, "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048, "routed_scaling_factor": 1.5, "num_hash_layers": 3, "swiglu_limit": 10.0,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
}  # fmt: skip
# The keys of the released inference code's config.json of the Flash model.
FLASH_INFERENCE: dict[str, Any] = {
    "vocab_size": 129280, "dim": 4096, "moe_inter_dim": 2048, "n_layers": 43, "n_hash_layers": 3, "n_heads": 64,
    "n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 6, "score_func": "sqrtsoftplus",
    "route_scale": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 1024, "head_dim": 512, "rope_head_dim": 64, "o_groups": 8,
    "o_lora_rank": 1024, "window_size": 128, "original_seq_len": 65536, "rope_theta": 10000, "rope_factor": 16,
    "beta_fast": 32, "beta_slow": 1, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "compress_rope_theta": 160000, "compress_ratios": FLASH_RATIOS, "dtype": "fp8",
    "scale_fmt": "ue8m0", "expert_dtype": "fp4", "max_batch_size": 4,
}  # fmt: skip
