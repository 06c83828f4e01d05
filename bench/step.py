"""The training step against transformers' eager model of the same shapes: time and peak memory.

Both sides: the same sizes, the same tokens, fp32, the language-model loss alone (transformers has no MTP and no indexer
loss), forward, backward and the same AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress

from dsv4c.bench.measure import peak_bytes, seconds
from dsv4c.compile.backend import compile_model
from dsv4c.config import ModelConfig
from dsv4c.config_layouts import write_hf
from dsv4c.model.transformer import DeepseekV4


def comparable(config: ModelConfig) -> ModelConfig:
    """The part of a model that transformers has too."""
    return config.replace(
        num_nextn_predict_layers=0, compress_ratios=config.compress_ratios[: config.num_hidden_layers],
        indexer_kl_coef=0.0, seq_balance_loss_coef=0.0,
    )  # fmt: skip


def transformers_model(config: ModelConfig) -> torch.nn.Module:
    """transformers' deepseek_v4 of the same sizes, eager attention."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    hf = DeepseekV4Config(**write_hf(config))
    hf._attn_implementation = "eager"
    return DeepseekV4ForCausalLM(hf).float().train()


def compare_step(
    preset: str, *, seq_len: int, batch_size: int, repeats: int, threads: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Seconds and peak bytes of one training step of each side, and their ratios."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = comparable(ModelConfig.preset(preset))
    ids = torch.randint(0, config.vocab_size, (batch_size, seq_len))
    targets = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)

    ours, theirs = compile_model(DeepseekV4(config)), transformers_model(config)
    our_adam, their_adam = (torch.optim.AdamW(m.parameters(), lr=1e-4, foreach=True) for m in (ours, theirs))

    def our_step() -> None:
        ours(ids, targets).losses["lm"].backward()
        our_adam.step()
        our_adam.zero_grad()

    def their_step() -> None:
        logits = theirs(input_ids=ids, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        their_adam.step()
        their_adam.zero_grad()

    sides = {"dsv4c": our_step, "transformers": their_step}
    time = seconds(sides, repeats=repeats, progress=progress)
    peak = {name: peak_bytes(step) for name, step in sides.items()}
    return {
        "bench": "step", "preset": preset, "parameters": sum(p.numel() for p in ours.parameters()),
        "seq_len": seq_len, "batch_size": batch_size, "threads": threads, "repeats": repeats, "seconds": time,
        "peak_bytes": peak, "speedup": time["transformers"] / time["dsv4c"],
        "memory_ratio": peak["dsv4c"] / peak["transformers"],
    }  # fmt: skip
