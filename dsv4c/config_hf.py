"""The Hugging Face layout: its keys as data, and the settings it nests or spells per layer.

Read by :func:`dsv4c.config_layouts.read`. Covers the published ``config.json`` (``compress_ratios``, ``rope_scaling``)
and what transformers writes itself (``layer_types``, ``compress_rates``, ``rope_parameters`` with ``main`` and
``compress``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsv4c.config import ModelConfig, unknown_key
from dsv4c.config_facts import FIXED, IGNORED, NEEDED, SAME, Facts, Layout

CSA, HCA, SWA = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_ATTENTION = {SWA: 0, CSA: 4, HCA: 128}
_PUBLISHED_HCA = 128
_YARN = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_length",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
}
# The model scales neither cos and sin nor the softmax with YaRN's magnitude factor (B04).
_YARN_FIXED = {"attention_factor": (1.0,), "mscale": (1.0,), "mscale_all_dim": (1.0,), "truncate": (True,)}
_FIXED: dict[str, tuple[Any, ...]] = FIXED | {
    "model_type": ("deepseek_v4",),
    "num_key_value_heads": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "tie_word_embeddings": (False,),
    # transformers' own balance loss and router noise are other functions than this model's: off is all there is.
    "output_router_logits": (False,),
    "router_jitter_noise": (0.0,),
}
_WRITTEN = ("num_key_value_heads", "n_shared_experts", "scoring_func", "topk_method", "norm_topk_prob", "hidden_act",
               "attention_bias", "attention_dropout", "tie_word_embeddings")  # fmt: skip
_OF_NO_CONCERN = """
architectures transformers_version use_cache bos_token_id eos_token_id pad_token_id quantization_config auto_map
router_aux_loss_coef _name_or_path name_or_path chunk_size_feed_forward id2label label2id is_encoder_decoder
output_attentions output_hidden_states problem_type return_dict tokenizer_class
_attn_implementation_internal _experts_implementation_internal
"""
_TAKEN_APART = """
compress_ratios layer_types mlp_layer_types compress_rates compress_rate_csa compress_rate_hca
rope_scaling rope_parameters partial_rotary_factor index_topk_all
"""
_IGNORED = IGNORED | frozenset(_OF_NO_CONCERN.split())
_STRUCTURES = frozenset(_TAKEN_APART.split())
HF_MARKS = frozenset(_FIXED) | _IGNORED | (_STRUCTURES - {"compress_ratios"})


def write_hf(config: ModelConfig) -> dict[str, Any]:
    """The settings in the Hugging Face layout, which transformers' ``DeepseekV4Config`` loads.

    Fields that layout has no key for stand under our own names. transformers ignores those, so that it computes
    another function where one of them changes the forward (``swiglu_limit_shared=False`` is the only such field at
    inference).
    """
    c = config
    out: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    out |= {k: v[0] for k, v in _FIXED.items() if k in _WRITTEN}
    out |= {k: v for k, v in c.to_dict().items() if k not in (*_YARN.values(), "compress_ratios", "hca_ratio")}
    if c.index_topk is None:  # transformers wants a number: as many entries as there can be
        out |= {"index_topk": _every_entry(c.max_position_embeddings), "index_topk_all": True}
    decoder = c.compress_ratios[: c.num_hidden_layers]
    name_of = {0: SWA, 4: CSA, c.hca_ratio: HCA}
    out["layer_types"] = [name_of[m] for m in decoder]
    out["mlp_layer_types"] = ["hash_moe" if i < c.num_hash_layers else "moe" for i in range(c.num_hidden_layers)]
    out["compress_rates"] = {CSA: 4, HCA: c.hca_ratio}
    if c.hca_ratio == _PUBLISHED_HCA:  # the published spelling, where 128 is the only other ratio that readers know
        out["compress_ratios"] = list(c.compress_ratios)
    share = c.qk_rope_head_dim / c.head_dim
    if int(c.head_dim * share) < c.qk_rope_head_dim:  # transformers cuts off where it should round
        share = math.nextafter(share, 1.0)
    main = {"rope_type": "default", "rope_theta": c.rope_theta, "partial_rotary_factor": share}
    compress = {"rope_type": "default", "rope_theta": c.compress_rope_theta, "partial_rotary_factor": share}
    yarn = {key: getattr(c, name) for key, name in _YARN.items()}
    if c.rope_original_length:
        compress |= yarn | {"rope_type": "yarn", "attention_factor": 1.0}
    else:
        out |= {name: getattr(c, name) for name in _YARN.values()}
    return out | {"rope_parameters": {"main": main, "compress": compress}}


def _resolve_hf(facts: Facts, raw: Mapping[str, Any]) -> None:
    _rates(facts, raw)
    _schedule(facts, raw)
    _routers(facts, raw)
    _rope(facts, raw)
    share = raw.get("partial_rotary_factor")
    if share is not None:
        _rotary_share(facts, share, "partial_rotary_factor")
    elif "qk_rope_head_dim" not in facts.values and type(facts.values.get("head_dim")) is int:
        _rotary_share(facts, 64 / 512, "head_dim")  # what DeepseekV4Config takes when a file is silent
    facts.values.setdefault("num_hash_layers", min(3, facts.length() or 3))  # likewise
    if "index_topk_all" in raw:
        facts.fix("index_topk_all", raw["index_topk_all"], (True,))
        every = _every_entry(facts.values.get("max_position_embeddings"))
        facts.fix("index_topk", facts.values.get("index_topk"), (every, None))
        facts.values["index_topk"] = None


def _every_entry(positions: Any) -> int:
    return max(1, positions // 4) if type(positions) is int else 1


def _rates(facts: Facts, raw: Mapping[str, Any]) -> None:
    rates = dict(facts.mapping(raw.get("compress_rates") or {}, "compress_rates"))
    given = {f"compress_rates.{name}": (name, rate) for name, rate in rates.items()}
    given |= {key: (name, raw[key]) for key, name in (("compress_rate_csa", CSA), ("compress_rate_hca", HCA)) if key in raw}
    for key, (name, rate) in given.items():
        if name == CSA:
            facts.fix(key, rate, (4,))
        elif name == HCA:
            facts.put("hca_ratio", rate, key)
        else:
            raise unknown_key(name, [CSA, HCA], where=f"{facts.source}: compress_rates")


def _schedule(facts: Facts, raw: Mapping[str, Any]) -> None:
    hca = facts.values.get("hca_ratio", _PUBLISHED_HCA)
    if raw.get("compress_ratios") is not None:
        ratios = raw["compress_ratios"]
        if isinstance(ratios, (list, tuple)):  # 128 names the kind; the rate may be given apart from it
            ratios = [hca if type(m) is int and m == _PUBLISHED_HCA else m for m in ratios]
        ratios = facts.with_mtp_slot(ratios, "compress_ratios")
        facts.put("compress_ratios", ratios, "compress_ratios")
    types = raw.get("layer_types")
    if types is None:
        return
    if not isinstance(types, (list, tuple)):
        raise facts.refuse(f"layer_types is {types!r}", "layer_types", "a list with one name a layer")
    for i, name in enumerate(types):
        if name not in _ATTENTION:
            raise facts.refuse(f"layer {i} is {name!r}", f"layer_types[{i}]", ", ".join(_ATTENTION))
    ratios = [hca if name == HCA else _ATTENTION[name] for name in types]
    facts.put("compress_ratios", facts.with_mtp_slot(ratios, "layer_types"), "layer_types")


def _routers(facts: Facts, raw: Mapping[str, Any]) -> None:
    types = raw.get("mlp_layer_types")
    if types is None:
        return
    if not isinstance(types, (list, tuple)) or any(t not in ("hash_moe", "moe") for t in types):
        bad = next(((i, t) for i, t in enumerate(types) if t not in ("hash_moe", "moe")), (0, types))
        raise facts.refuse(f"the router of layer {bad[0]} is {bad[1]!r}", f"mlp_layer_types[{bad[0]}]", "hash_moe, moe")
    count = list(types).count("hash_moe")
    if any(t != "hash_moe" for t in types[:count]):
        late = max(i for i, t in enumerate(types) if t == "hash_moe")
        raise facts.refuse(
            f"layer {late} has a hash router after a learned one",
            f"mlp_layer_types[{late}]",
            "hash_moe in the first layers only",
        )
    layers = facts.length()
    if layers is not None and len(types) not in (layers, layers + 1):
        what = f"mlp_layer_types has {len(types)} entries for {layers} layers"
        raise facts.refuse(what, "mlp_layer_types", f"{layers} entries, one a layer")
    facts.put("num_hash_layers", count, "mlp_layer_types")


def _rotary_share(facts: Facts, share: Any, key: str) -> None:
    width = facts.values.get("head_dim")
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise facts.refuse(f"{key} is {share!r}", key, "a number above 0 and up to 1: the share of head_dim that is rotated")
    if type(width) is int:
        facts.put("qk_rope_head_dim", round(width * share), key)


def _rope(facts: Facts, raw: Mapping[str, Any]) -> None:
    found = False
    for key in ("rope_scaling", "rope_parameters"):
        if raw.get(key) is None:
            continue
        rope, found = facts.mapping(raw[key], key), True
        if "main" in rope or "compress" in rope:
            if set(rope) != {"main", "compress"}:
                what = f"{key} has the keys {', '.join(sorted(rope))}"
                raise facts.refuse(what, key, "main and compress together, or one flat set")
            _rope_set(facts, rope["main"], f"{key}.main", "rope_theta", ("default",))
            _rope_set(facts, rope["compress"], f"{key}.compress", "compress_rope_theta", ("default", "yarn"))
        else:
            _rope_set(facts, rope, key, "rope_theta", ("default", "yarn"))
    if not found:  # as DeepseekV4Config does: no scaling given, none applied
        facts.values.setdefault("rope_original_length", 0)


def _rope_set(facts: Facts, given: Any, key: str, theta: str, kinds: tuple[str, ...]) -> None:
    rope = dict(facts.mapping(given, key))
    named = {rope.pop(name) for name in ("rope_type", "type") if name in rope} or {"default"}
    kind = named.pop()
    if named or kind not in kinds:
        raise facts.refuse(
            f"the rotation type is {kind!r}" + (f" and {named.pop()!r}" if named else ""), key, ", ".join(kinds)
        )
    known = ["rope_type", "type", "rope_theta", "partial_rotary_factor"] + ([*_YARN, *_YARN_FIXED] if kind == "yarn" else [])
    for name, value in rope.items():
        place = f"{key}.{name}"
        if name == "rope_theta":
            facts.put(theta, value, place)
        elif name == "partial_rotary_factor":
            _rotary_share(facts, value, place)
        elif kind == "yarn" and name in _YARN:
            facts.put(_YARN[name], value, place)
        elif kind == "yarn" and name in _YARN_FIXED:
            facts.fix(place, value, _YARN_FIXED[name])
        else:
            raise unknown_key(name, known, where=f"{facts.source}: {key} (rope type {kind})")
    if kind == "yarn":
        missing = [name for name in ("factor", "original_max_position_embeddings") if name not in rope]
        if missing:
            raise facts.refuse(f"YaRN without {' and '.join(missing)}", key, "both numbers", "add them")
    elif "yarn" in kinds:
        facts.put("rope_original_length", 0, f"{key}.rope_type")


HF = Layout(
    name="Hugging Face",
    fields=SAME | {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
    fixed=_FIXED,
    ignored=_IGNORED,
    structures=_STRUCTURES,
    needed=NEEDED,
    spelling={"compress_ratios": "compress_ratios (or layer_types)"},
    resolve=_resolve_hf,
)
