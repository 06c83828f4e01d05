"""The JSON layouts a model's settings come in: Hugging Face, the released inference code's, and our own.

Stands between a file and :class:`dsv4c.config.ModelConfig`: :func:`read` recognises the layout and turns every key
into a field; :func:`write_hf` and :func:`write_released` go the other way, and reading what they wrote gives the same
config back. A layout is data (:class:`dsv4c.config_facts.Layout`): which key is which field, which keys have one
supported value, which are of no concern to training. Every other key is an error, and so are two keys that say
different things about one field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4c.config import ModelConfig, unknown_key
from dsv4c.config_facts import FIELDS, FIXED, IGNORED, NEEDED, SAME, Facts, Layout
from dsv4c.config_hf import HF, HF_MARKS, write_hf
from dsv4c.errors import ConfigError

__all__ = ["HF", "OWN", "RELEASED", "read", "write_hf", "write_released"]


def read(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """The settings in a JSON file, in a model folder's ``config.json`` or in a dict, in any of the layouts.

    Raises :class:`dsv4c.errors.ConfigError` for a file that is not JSON (with line and column), an unknown key (with
    the nearest known one), missing keys (all at once), values that are not supported, and keys that contradict each
    other.
    """
    where, raw = ("the settings given", dict(source)) if isinstance(source, Mapping) else _load(Path(source))
    layout = _recognise(raw, where)
    facts = Facts(where)
    for key, value in raw.items():
        if key in layout.structures or key in layout.ignored:
            continue
        if key in layout.fixed:
            facts.fix(key, value, layout.fixed[key])
        elif key in layout.fields:
            facts.put(layout.fields[key], value, key)
        else:
            raise unknown_key(key, layout.known, where=f"{where} ({layout.name} layout)")
    layout.resolve(facts, raw)
    _require(facts, layout)
    try:
        return ModelConfig(**facts.values)
    except ConfigError as error:
        name = error.where.removeprefix("ModelConfig.").split("[")[0]
        place = f"{where}: {facts.keys.get(name, name)} ({error.where})"
        raise ConfigError(error.what, where=place, allowed=error.allowed, do=error.do) from None


def write_released(config: ModelConfig) -> dict[str, Any]:
    """The settings as the released inference code's ``config.json`` spells them; what it has no key for, in our
    names.
    """
    spelled = {name: key for key, name in _RELEASED_NAMES.items()}
    out = {spelled.get(name, name): value for name, value in config.to_dict().items()}
    return out | {"n_shared_experts": 1, "score_func": "sqrtsoftplus"}


def _load(path: Path) -> tuple[str, dict[str, Any]]:
    if path.is_dir():
        path = path / "config.json"

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"key {twice[0]!r} stands twice", where=str(path), allowed="every key once", do="remove one")
        return dict(pairs)

    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        do = "give a JSON file, or a folder with a config.json in it"
        raise ConfigError("there is no such config file", where=str(path), do=do) from None
    except json.JSONDecodeError as error:
        place = f"{path}, line {error.lineno}, column {error.colno}"
        raise ConfigError(f"this is not JSON: {error.msg}", where=place, allowed="a JSON object", do="correct it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file cannot be read: {error}", where=str(path), do="give a JSON file") from None
    if not isinstance(raw, dict):
        what = f"the config file holds a {type(raw).__name__}"
        raise ConfigError(what, where=str(path), allowed="a JSON object: { ... }", do="put the settings in an object")
    return str(path), raw


def _recognise(raw: Mapping[str, Any], where: str) -> Layout:
    if raw.keys() & _RELEASED_MARKS and "model_type" not in raw:
        return RELEASED
    if raw.keys() & HF_MARKS:
        return HF
    if raw.keys() & FIELDS.keys():
        return OWN  # nothing but our own field names, perhaps with a key that OWN will refuse by name
    raise ConfigError(
        "no key says which layout these settings are in",
        where=where,
        allowed="Hugging Face (model_type, hidden_size), released inference (dim, n_layers), ModelConfig.to_dict()",
        do="give the model's own config.json",
    )


def _require(facts: Facts, layout: Layout) -> None:
    missing = [layout.spelling.get(name, name) for name in layout.needed if name not in facts.values]
    if missing:
        raise ConfigError(
            f"{len(missing)} settings are missing: {', '.join(missing)}",
            where=f"{facts.source} ({layout.name} layout)",
            allowed="all of them: the size of a model is never guessed",
            do="add them",
        )


def _resolve_released(facts: Facts, raw: Mapping[str, Any]) -> None:
    if "compress_ratios" in raw:
        ratios = facts.with_mtp_slot(raw["compress_ratios"], "compress_ratios", infer=True)
        facts.put("compress_ratios", ratios, "compress_ratios")


def _resolve_own(facts: Facts, raw: Mapping[str, Any]) -> None:
    """Our own names need no translation."""


_RELEASED_NAMES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_hash_layers": "num_hash_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "original_seq_len": "rope_original_length",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "route_scale": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
}
_RELEASED_MARKS = frozenset({"dim", "n_layers", "n_heads", "moe_inter_dim"})

RELEASED = Layout(
    name="released inference",
    fields=SAME | _RELEASED_NAMES,
    fixed=FIXED | {"score_func": ("sqrtsoftplus",)},
    ignored=IGNORED,
    structures=frozenset({"compress_ratios"}),
    # The inference code's own defaults for these belong to a smoke-test model, and they are not ours (section 2).
    needed=(*NEEDED, "compress_rope_theta", "rope_factor", "rope_original_length", "routed_scaling_factor"),
    spelling={name: key for key, name in _RELEASED_NAMES.items()},
    resolve=_resolve_released,
)
OWN = Layout(
    name="dsv4c",
    fields=SAME,
    fixed={},
    ignored=frozenset(),
    structures=frozenset(),
    needed=NEEDED,
    spelling={},
    resolve=_resolve_own,
)
