"""Nested Python state <-> strict JSON and a flat dictionary of tensors, exactly.

A checkpoint keeps tensors in `torch.distributed.checkpoint` and everything else as readable JSON.  What JSON would
change silently (tuples, keys that are no text, NaN) is tagged; what cannot be kept exactly is refused, not pickled.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4c.errors import CheckpointError


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON form of ``value``; tensors in it go into ``tensors`` under their path, such as
    "optim/state/embed.weight/exp_avg".

    Raises:
        CheckpointError: a value of a type that cannot be restored exactly; the message has its path.
    """
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$ndarray": [value.dtype.str, encode(value.tolist(), path, tensors)]}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is list:
        return [encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, dict):
        items = [[encode(k, path, tensors), encode(v, f"{path}/{k}", tensors)] for k, v in value.items()]
        plain = all(type(k) is str and not k.startswith("$") for k in value)
        return dict(items) if plain else {"$items": items}
    raise CheckpointError(
        f"a {type(value).__name__} cannot be stored in a checkpoint",
        where=path,
        allowed="numbers, text, None, tensors, arrays of numbers, and lists, tuples and dictionaries of them",
    )


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `encode`, bit for bit."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value), ""):
        case "$tensor":
            return tensors[value["$tensor"]]
        case "$ndarray":
            kind, content = value["$ndarray"]
            return np.array(decode(content, tensors), dtype=np.dtype(kind))
        case "$float":
            return float(value["$float"])
        case "$tuple":
            return tuple(decode(v, tensors) for v in value["$tuple"])
        case "$items":
            return {decode(k, tensors): decode(v, tensors) for k, v in value["$items"]}
    return {k: decode(v, tensors) for k, v in value.items()}


def rng_state() -> dict[str, Any]:
    """States of every random generator a run uses: Python, NumPy, torch on the CPU and on each GPU."""
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    state["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """The inverse of `rng_state`; states of GPUs that this machine does not have are left out."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, cuda in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, device)
