"""A model's parameters from and to a weight folder.

:func:`load_weights` fills a model tensor by tensor, also one on the meta device, whose tensors come into being as they
are read; :func:`save_weights` writes one. ``DeepseekV4.from_pretrained`` and ``save_pretrained`` end here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsv4c.config import ModelConfig
from dsv4c.config_layouts import read
from dsv4c.errors import WeightsError
from dsv4c.weights.check import CheckReport, check
from dsv4c.weights.keymap import Entry, Part, tensors
from dsv4c.weights.shards import MAX_SHARD_BYTES
from dsv4c.weights.stream import Source
from dsv4c.weights.write import Progress, write

if TYPE_CHECKING:
    from dsv4c.model.transformer import DeepseekV4

_COMPILED = "_orig_mod."  # torch.compile's wrapper puts this into names


@torch.no_grad()
def load_weights(
    model: nn.Module,
    folder: str | Path,
    *,
    layout: str | None = None,
    strict: bool = True,
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Fill ``model`` (which has a ``config``) from a folder; returns what was compared, with what was not loaded.

    Every key and shape is compared before the first tensor is read, and then all that is wrong is said at once.
    ``allow_missing`` and ``allow_unexpected`` are glob patterns of keys that may be absent or left over;
    ``strict=False`` is ``"*"`` for both. What is missing keeps its initial value. A router's bias or table is never
    left at its initial value while its router is loaded, and shapes always have to fit (B14). A tensor on the meta
    device is created on ``device`` (default: torch's default device) in the dtype it has there. Raises
    :class:`dsv4c.errors.WeightsError`.
    """
    source = Source(folder)
    config, state = _config_of(model), _state(model)
    everything: tuple[str, ...] = () if strict else ("*",)
    report = check(
        source,
        config,
        layout=layout,
        allow_missing=(*allow_missing, *everything),
        allow_unexpected=(*allow_unexpected, *everything),
    )
    report.raise_if_bad()
    absent = set(report.not_loaded)
    total, done = sum(t.numel() * t.element_size() for t in state.values()), 0
    for tensor in tensors(config):
        places = [part.place(report.layout) for part in tensor.parts]
        missing = [key for key, _ in places if key in absent]
        if missing:
            _refuse_half_missing(tensor.name, missing, len(places), state[tensor.name])
            continue
        target = _materialised(model, tensor.name, state[tensor.name], device)
        for part, (key, select) in zip(tensor.parts, places, strict=True):
            target[part.place("dsv4c")[1]].copy_(source.read(key, select))
        done += target.numel() * target.element_size()
        if progress is not None:
            progress(done, total)
    return report


def save_weights(
    model: nn.Module,
    folder: str | Path,
    *,
    layout: str = "hf",
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write safetensors and ``config.json``; nothing is there until all of it is.

    ``dtype`` None stores every tensor as the model holds it: nothing is lost. ``torch.bfloat16`` stores what the
    release stores in bf16 or narrower as bf16 and what it keeps in fp32 as fp32; ``"released"`` (layout
    ``"released"``) encodes fp8 and FP4 as the release does. An MTP layer is written in every layout; transformers
    ignores its keys. Raises :class:`dsv4c.errors.WeightsError`, also for a folder that is not empty unless
    ``overwrite``.
    """
    state = _state(model)
    store_as: Any = "keep" if dtype is None else dtype

    def fetch(part: Part) -> Tensor:
        name, select = part.place("dsv4c")
        return state[name][select]

    def kept(entry: Entry) -> torch.dtype:
        return state[entry.ours].dtype

    meta = [name for name, tensor in state.items() if tensor.is_meta]
    if meta:
        raise WeightsError(
            f"{len(meta)} tensors have no values: the model is on the meta device",
            where=meta[0],
            allowed="a model on a device",
            do="load or initialise it first",
        )
    write(folder, _config_of(model), layout, fetch, kept, store_as=store_as, max_shard_bytes=max_shard_bytes,
          overwrite=overwrite, progress=progress)  # fmt: skip


def from_pretrained(
    folder: str | Path,
    *,
    config: ModelConfig | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> DeepseekV4:
    """A model with the weights of a folder; its ``config.json``, or ``config`` in its place.

    ``dtype`` (default fp32) is what parameters are held in, but for those that stay in fp32; ``device`` where.
    ``options`` as for :func:`load_weights`.
    """
    from dsv4c.model.transformer import DeepseekV4  # the model asks for this module, not the other way round

    settings = read(folder) if config is None else config
    keeps_initial_values = options.get("allow_missing") or not options.get("strict", True)
    where = torch.device(device) if device is not None else torch.get_default_device()
    with where if keeps_initial_values else torch.device("meta"):
        model = DeepseekV4(settings)
    load_weights(model if dtype is None else model.to(dtype), folder, device=where, **options)
    return model


def _config_of(model: nn.Module) -> ModelConfig:
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        what = f"a {type(model).__name__} has no ModelConfig"
        raise WeightsError(what, where="model.config", allowed="a DeepseekV4", do="pass the model itself")
    return config


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by our names, compared with what the config says they are."""
    state = {name.replace(_COMPILED, ""): t for name, t in model.state_dict(keep_vars=True).items()}
    expected = {t.name: t.shape for t in tensors(_config_of(model))}
    wrong = sorted(expected.keys() ^ state.keys()) + [
        name for name in expected.keys() & state.keys() if tuple(state[name].shape) != expected[name]
    ]
    if wrong:
        raise WeightsError(
            f"{len(wrong)} tensors of the model are not those of its config: {', '.join(wrong[:5])}",
            where=type(model).__name__,
            allowed="the parameters of a DeepseekV4 of this config",
            do="pass the model itself, unchanged",
        )
    return state


def _refuse_half_missing(name: str, missing: list[str], parts: int, tensor: Tensor) -> None:
    if len(set(missing)) < parts and parts > 1 and len(missing) < parts:
        raise WeightsError(
            f"{len(missing)} of the {parts} tensors that make up {name} are missing: {', '.join(missing[:5])}",
            where=name,
            allowed="all of them, or none",
            do="fetch the files again",
        )
    if tensor.is_meta:
        raise WeightsError(
            f"{missing[0]} is missing, and on the meta device there is no initial value to keep",
            where=name,
            allowed="a model on a device",
            do="build the model on a device before loading",
        )


def _materialised(model: nn.Module, name: str, tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """The tensor itself, or, where it is on the meta device, a new one in its place."""
    if not tensor.is_meta:
        return tensor.detach()
    fresh = torch.empty_like(tensor, device=device if device is not None else torch.get_default_device())
    actual = next(n for n in (name, *_wrapped_names(model, name)) if _has(model, n))
    owner_name, _, leaf = actual.rpartition(".")
    owner = model.get_submodule(owner_name)
    if isinstance(tensor, nn.Parameter):
        parameter = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        parameter.__dict__.update(tensor.__dict__)
        owner.register_parameter(leaf, parameter)
    else:
        owner.register_buffer(leaf, fresh)
    return fresh


def _has(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    try:
        return hasattr(model.get_submodule(owner), leaf)
    except AttributeError:
        return False


def _wrapped_names(model: nn.Module, name: str) -> list[str]:
    return [n for n in model.state_dict(keep_vars=True) if n.replace(_COMPILED, "") == name]
