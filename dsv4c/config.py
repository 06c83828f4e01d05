"""What a model is: its sizes, its layer schedule, and the coefficients of its objectives.

First thing in the way of the data: everything else reads a :class:`ModelConfig` and nothing changes one. Field names
are those of the Hugging Face layout where it has one. The two published JSON layouts are read in
:mod:`dsv4c.config_layouts`, the named sizes are data in :mod:`dsv4c.presets`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dsv4c.errors import ConfigError

Attention = Literal["swa", "csa", "hca"]
Router = Literal["hash", "learned"]


QUANTISATION_BLOCKS = {"full": 0, "fp8": 64, "fp4": 32}  # channels that share a scale


@dataclass(frozen=True)
class LayerKind:
    """What a decoder layer is made of: only layers of different kinds differ in code (specification, section 0)."""

    attention: Attention
    router: Router
    ratio: int  # m: tokens per compressed entry, 0 for a pure sliding window

    @property
    def name(self) -> str:
        return f"{self.attention}-{self.router}"


def _size(low: int = 1, high: int | None = None) -> Any:
    return field(metadata={"low": low, "high": high})


def _setting(default: Any, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "choices": choices})


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V4 model and the objectives it is trained for.

    Sizes carry the letters of the specification in their comments. Instances are immutable: :meth:`replace` gives a
    changed, validated copy. Raises :class:`dsv4c.errors.ConfigError` for a value of the wrong type or range, or for
    values that contradict each other.
    """

    vocab_size: int = _size()  # V
    hidden_size: int = _size()  # D
    num_hidden_layers: int = _size()  # L
    num_attention_heads: int = _size()  # H
    head_dim: int = _size(2)  # c
    qk_rope_head_dim: int = _size(2)  # r
    q_lora_rank: int = _size()  # q
    o_groups: int = _size()  # G
    o_lora_rank: int = _size()  # g
    sliding_window: int = _size()  # W, the token itself included
    compress_ratios: tuple[int, ...] = _size()  # m of every layer, then one more for each MTP layer
    index_n_heads: int = _size()  # Hi
    index_head_dim: int = _size(2)  # ci
    index_topk: int | None = _size()  # K; None: attend to every visible entry
    n_routed_experts: int = _size()  # E
    num_experts_per_tok: int = _size()  # k
    moe_intermediate_size: int = _size()  # I
    num_hash_layers: int = _size(0)
    routed_scaling_factor: float = _setting(1.5, 1e-6)
    num_nextn_predict_layers: int = _setting(1, 0, 1)
    hca_ratio: int = _setting(128, 2)  # tokens per entry of an HCA layer
    max_position_embeddings: int = _setting(1048576, 1)

    rope_theta: float = _setting(10000.0, 1.000001)  # sliding-window layers
    compress_rope_theta: float = _setting(160000.0, 1.000001)  # CSA and HCA layers
    rope_factor: float = _setting(16.0, 1.0)  # YaRN, CSA and HCA layers
    rope_original_length: int = _setting(65536, 0)  # 0: no YaRN
    rope_beta_fast: float = _setting(32.0, 1e-3)
    rope_beta_slow: float = _setting(1.0, 1e-3)

    hc_mult: int = _setting(4, 1, 16)  # n
    hc_sinkhorn_iters: int = _setting(20, 1)
    hc_eps: float = _setting(1e-6, 0.0)
    rms_norm_eps: float = _setting(1e-6, 0.0)
    swiglu_limit: float = _setting(10.0, 0.0)  # 0: no clamp
    swiglu_limit_shared: bool = _setting(True)  # the launch-day release did not clamp the shared expert
    initializer_range: float = _setting(0.02, 0.0)
    hc_init_scale: float = _setting(0.01)  # "gating factors small"

    indexer_hadamard: bool = _setting(True)
    indexer_qk_precision: str = _setting("full", choices=("full", "fp8", "fp4"))
    indexer_proj_precision: str = _setting("full", choices=("full", "fp8", "fp4"))
    attention_kv_precision: str = _setting("full", choices=("full", "fp8"))
    keep_fp32_parameters: bool = _setting(True)

    mtp_loss_coef: float = _setting(0.3, 0.0)
    seq_balance_loss_coef: float = _setting(1e-4, 0.0)
    indexer_kl_coef: float = _setting(0.0, 0.0)
    indexer_kl_target: str = _setting("joint", choices=("joint", "selected"))
    router_bias_update_rate: float = _setting(1e-3, 0.0)
    force_balanced_routing: bool = _setting(False)  # benchmarks only

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _checked(f, getattr(self, f.name)))
        _check_schedule(self)
        _check_divisibility(self)
        _check_rope(self)
        _check_objectives(self)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every decoder layer, then of every MTP layer."""
        names: dict[int, Attention] = {0: "swa", 4: "csa", self.hca_ratio: "hca"}
        return tuple(
            LayerKind(names[m], "hash" if i < self.num_hash_layers else "learned", m)
            for i, m in enumerate(self.compress_ratios)
        )

    @property
    def trains_indexer(self) -> bool:
        return self.indexer_kl_coef > 0

    @property
    def balances_routing(self) -> bool:
        """Whether the balance objective is on: off where the routing it would judge is thrown away."""
        learned = any(k.router == "learned" for k in self.layer_kinds)
        return self.seq_balance_loss_coef > 0 and learned and not self.force_balanced_routing

    @property
    def predicts_two_ahead(self) -> bool:
        return self.num_nextn_predict_layers > 0 and self.mtp_loss_coef > 0

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names of the objectives that are on, in the order in which they are reported."""
        on = {
            "lm": True,
            "mtp": self.predicts_two_ahead,
            "seq_balance": self.balances_routing,
            "indexer_kl": self.trains_indexer,
        }
        return tuple(name for name, is_on in on.items() if is_on)

    def replace(self, **changes: Any) -> ModelConfig:
        """A changed copy, validated as a whole; an unknown name is an error that offers the nearest known one."""
        unknown = sorted(set(changes) - {f.name for f in dataclasses.fields(self)})
        if unknown:
            raise unknown_key(unknown[0], [f.name for f in dataclasses.fields(self)], where="ModelConfig.replace")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under our own field names; :meth:`from_json` reads them back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ModelConfig:
        """One of the named sizes of :data:`dsv4c.presets.PRESETS`, with changes."""
        from dsv4c.presets import PRESETS

        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            raise ConfigError(
                f"there is no preset {name!r}",
                allowed=", ".join(PRESETS),
                do=f"did you mean {near[0]!r}?" if near else "choose one of these, or give a config file",
            )
        config = cls(**PRESETS[name])
        return config.replace(**changes) if changes else config

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Read the Hugging Face layout, the released inference layout, or our own; a path or a dict."""
        from dsv4c.config_layouts import read

        return read(source)

    def warn_if_everything_is_selected(self, seq_len: int) -> None:
        """Warn where top-k keeps every entry at this length, so that the sparse KL equals the dense one (B66)."""
        if self.trains_indexer and self.index_topk is not None and self.index_topk * 4 >= seq_len:
            warnings.warn(
                f"index_topk={self.index_topk} selects every compressed entry at sequence length {seq_len} "
                f"({seq_len // 4} entries): the indexer is trained but prunes nothing; "
                f"it starts to prune above {self.index_topk * 4} tokens",
                stacklevel=2,
            )


def unknown_key(key: str, known: list[str], *, where: str) -> ConfigError:
    """The error for a key that nothing reads, with the nearest known name."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return ConfigError(
        f"unknown key {key!r}: nothing would read it",
        where=where,
        allowed=", ".join(sorted(known)) if not near else "",
        do=f"did you mean {near[0]!r}?" if near else "remove it, or use one of the known keys",
    )


def _checked(f: dataclasses.Field[Any], value: Any) -> Any:
    """The value in its field's type, or a ConfigError; text is never read as a number or a truth value."""

    def refuse(allowed: str) -> ConfigError:
        return ConfigError(f"{f.name} is {value!r}", where=f"ModelConfig.{f.name}", allowed=allowed, do="correct the value")

    kind = str(f.type)
    low, high = f.metadata["low"], f.metadata["high"]
    choices: tuple[str, ...] = f.metadata.get("choices", ())
    span = f"{'at least ' + format(low, 'g') if low is not None else 'any'}" + (
        f", at most {high:g}" if high is not None else ""
    )
    if value is None and "None" in kind:
        return None
    if kind.startswith("tuple"):
        if not isinstance(value, (list, tuple)) or any(type(v) is not int for v in value):
            raise refuse("a list of whole numbers")
        return tuple(value)
    if kind == "bool":
        if type(value) is not bool:
            raise refuse("true or false (a truth value, not text or a number)")
        return value
    if kind == "str":
        if value not in choices:
            raise refuse(", ".join(choices))
        return value
    if type(value) is bool or not isinstance(value, (int, float)):
        raise refuse(f"a number, {span}")
    if not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
        raise refuse(f"a finite number, {span}")
    if kind.startswith("int") and value != int(value):
        raise refuse(f"a whole number, {span}")
    return int(value) if kind.startswith("int") else float(value)


def _check_schedule(c: ModelConfig) -> None:
    expected = c.num_hidden_layers + c.num_nextn_predict_layers
    if len(c.compress_ratios) != expected:
        raise ConfigError(
            f"compress_ratios has {len(c.compress_ratios)} entries for {c.num_hidden_layers} layers"
            f" and {c.num_nextn_predict_layers} MTP layers",
            where="ModelConfig.compress_ratios",
            allowed=f"{expected} entries: one a layer, then one for each MTP layer",
            do="add or remove entries, or change num_hidden_layers",
        )
    allowed = sorted({0, 4, c.hca_ratio})
    for i, m in enumerate(c.compress_ratios):
        if m not in allowed:
            raise ConfigError(
                f"layer {i} has compress ratio {m}",
                where=f"ModelConfig.compress_ratios[{i}]",
                allowed="{" + ", ".join(map(str, allowed)) + "} (0 sliding window, 4 CSA, hca_ratio HCA)",
                do="correct the entry, or set hca_ratio for another HCA ratio",
            )
    if c.hca_ratio == 4:
        raise ConfigError(
            "hca_ratio is 4, the ratio of CSA layers", where="ModelConfig.hca_ratio",
            allowed="any whole number from 2 but 4", do="a ratio of 4 means CSA: overlapping windows and an indexer",
        )  # fmt: skip
    for i in range(c.num_hidden_layers, expected):
        if c.compress_ratios[i] != 0:
            raise ConfigError(
                f"the MTP layer has compress ratio {c.compress_ratios[i]}", where=f"ModelConfig.compress_ratios[{i}]",
                allowed="0: the MTP layer is a sliding-window layer", do="correct the last entry",
            )  # fmt: skip
    if c.num_hash_layers > c.num_hidden_layers:
        raise ConfigError(
            f"num_hash_layers is {c.num_hash_layers} for {c.num_hidden_layers} layers",
            where="ModelConfig.num_hash_layers", allowed=f"0 to {c.num_hidden_layers}",
            do="hash routers are in the first layers",
        )  # fmt: skip


def _check_divisibility(c: ModelConfig) -> None:
    def refuse(what: str, field_name: str, allowed: str) -> ConfigError:
        return ConfigError(what, where=f"ModelConfig.{field_name}", allowed=allowed, do="change one of the two")

    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > c.head_dim:
        raise refuse(
            f"qk_rope_head_dim is {c.qk_rope_head_dim} with head_dim {c.head_dim}",
            "qk_rope_head_dim",
            "an even number of at most head_dim: channels are rotated in pairs",
        )
    if c.num_attention_heads % c.o_groups:
        raise refuse(
            f"{c.num_attention_heads} heads cannot be put in {c.o_groups} output groups",
            "o_groups",
            "a divisor of num_attention_heads",
        )
    if c.num_experts_per_tok > c.n_routed_experts:
        raise refuse(
            f"num_experts_per_tok is {c.num_experts_per_tok} of {c.n_routed_experts} experts",
            "num_experts_per_tok",
            "at most n_routed_experts",
        )
    for setting, precision, width, of in (
        ("attention_kv_precision", c.attention_kv_precision, c.head_dim - c.qk_rope_head_dim, "unrotated key channels"),
        ("indexer_proj_precision", c.indexer_proj_precision, c.q_lora_rank, "q_lora_rank"),
        ("indexer_proj_precision", c.indexer_proj_precision, c.hidden_size, "hidden_size"),
        ("indexer_qk_precision", c.indexer_qk_precision, c.index_head_dim, "index_head_dim"),
    ):
        block = min(QUANTISATION_BLOCKS[precision], width)
        if block and width % block:
            raise refuse(f"{setting} is {precision} with {width} {of}", setting, f"full, or a multiple of {block} channels")
    if 4 in c.compress_ratios:
        if c.index_head_dim < c.qk_rope_head_dim:
            raise refuse(
                f"index_head_dim {c.index_head_dim} is smaller than qk_rope_head_dim {c.qk_rope_head_dim}",
                "index_head_dim",
                "at least qk_rope_head_dim: the indexer rotates as many channels",
            )
        if c.indexer_hadamard and c.index_head_dim & (c.index_head_dim - 1):
            raise refuse(
                f"index_head_dim is {c.index_head_dim} with indexer_hadamard on",
                "index_head_dim",
                "a power of two, or indexer_hadamard=false",
            )


def _check_rope(c: ModelConfig) -> None:
    if c.rope_original_length and c.rope_beta_fast < c.rope_beta_slow:
        raise ConfigError(
            f"rope_beta_fast is {c.rope_beta_fast:g} and rope_beta_slow is {c.rope_beta_slow:g}",
            where="ModelConfig.rope_beta_fast",
            allowed="at least rope_beta_slow: fast rotations are kept, slow ones are scaled",
            do="exchange the two",
        )


def _check_objectives(c: ModelConfig) -> None:
    if c.trains_indexer and 4 not in c.compress_ratios[: c.num_hidden_layers]:
        raise ConfigError(
            f"indexer_kl_coef is {c.indexer_kl_coef:g} but no layer has an indexer",
            where="ModelConfig.indexer_kl_coef",
            allowed="0, or a schedule with at least one CSA layer (ratio 4)",
            do="set indexer_kl_coef to 0, or put a 4 into compress_ratios",
        )
