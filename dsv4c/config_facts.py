"""What a settings file says, field by field, and how a layout describes its keys.

The ground that :mod:`dsv4c.config_layouts` and :mod:`dsv4c.config_hf` stand on: :class:`Layout` is the description of
one spelling as data, :class:`Facts` collects what a file of that spelling says and refuses contradictions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4c.config import ModelConfig
from dsv4c.errors import ConfigError

FIELDS = {f.name: f for f in dataclasses.fields(ModelConfig)}
NEEDED = tuple(name for name, f in FIELDS.items() if f.default is dataclasses.MISSING)
SAME = {name: name for name in FIELDS}
FIXED: dict[str, tuple[Any, ...]] = {"n_shared_experts": (1,), "n_group": (1,), "topk_group": (1,)}
# Of no concern to training: storage formats and sizes of a server's buffers.
_SERVING = "dtype torch_dtype expert_dtype scale_fmt scale_dtype max_batch_size max_seq_len temperature"
IGNORED = frozenset(_SERVING.split())


@dataclass(frozen=True)
class Layout:
    """One spelling of the settings. ``fields``: key -> field; ``fixed``: key -> supported values; ``ignored``: read
    by others.
    """

    name: str
    fields: Mapping[str, str]
    fixed: Mapping[str, tuple[Any, ...]]
    ignored: frozenset[str]
    structures: frozenset[str]  # keys that resolve takes apart
    needed: tuple[str, ...]  # fields that a file must state
    spelling: Mapping[str, str]  # field -> what to call it when it is missing
    resolve: Callable[[Facts, Mapping[str, Any]], None]

    @property
    def known(self) -> list[str]:
        return sorted({*self.fields, *self.fixed, *self.ignored, *self.structures})


class Facts:
    """What a file has said so far, field by field, each with the key that said it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.values: dict[str, Any] = {}
        self.keys: dict[str, str] = {}

    def put(self, name: str, value: Any, key: str) -> None:
        if name in self.values and self.values[name] != value:
            raise ConfigError(
                f"two keys disagree on {name}: {self.keys[name]} says {self.values[name]!r}, {key} says {value!r}",
                where=f"{self.source}: {self.keys[name]} and {key}",
                allowed="one value, or the same value in both places",
                do="remove the key that is wrong",
            )
        self.values.setdefault(name, value)
        self.keys.setdefault(name, key)

    def refuse(self, what: str, key: str, allowed: str, do: str = "correct the value") -> ConfigError:
        return ConfigError(what, where=f"{self.source}: {key}", allowed=allowed, do=do)

    def fix(self, key: str, value: Any, supported: tuple[Any, ...]) -> None:
        """Refuse every value of a key of which only some are implemented; 1 is not true, 'false' is not false."""
        if not any(value == s and (type(value) is bool) == (type(s) is bool) for s in supported):
            allowed = " or ".join(json.dumps(s) for s in supported)
            raise self.refuse(f"{key} is {value!r}, which is not supported", key, allowed)

    def mapping(self, value: Any, key: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.refuse(f"{key} is {value!r}", key, "an object with names and values")
        return value

    def length(self) -> int | None:
        """The number of decoder layers when the file states it properly; a bad value is reported by ModelConfig."""
        n = self.values.get("num_hidden_layers")
        return n if type(n) is int else None

    def with_mtp_slot(self, ratios: Any, key: str, *, infer: bool = False) -> Any:
        """The schedule with one entry a layer and one for each MTP layer, from one that has or lacks the MTP entry
        (B67).
        """
        layers = self.length()
        if layers is None or not isinstance(ratios, (list, tuple)):
            return ratios
        if infer and "num_nextn_predict_layers" not in self.values and len(ratios) in (layers, layers + 1):
            self.put("num_nextn_predict_layers", len(ratios) - layers, key)
        mtp = self.values.get("num_nextn_predict_layers", 1)
        if len(ratios) == layers and mtp == 1:
            return [*ratios, 0]
        return list(ratios[:layers]) if len(ratios) == layers + 1 and mtp == 0 else list(ratios)
