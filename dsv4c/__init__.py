"""dsv4c: DeepSeek-V4 training with ``torch.compile``.

The public names, loaded when they are first used, so that importing a part alone stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "ModelConfig": "dsv4c.config",
    "DeepseekV4": "dsv4c.model.transformer",
    "TrainStep": "dsv4c.train.step",
    "compile_model": "dsv4c.compile.backend",
    "verify_model": "dsv4c.compile.verify",
    "verify_module": "dsv4c.compile.verify",
    "verify_graph": "dsv4c.compile.verify",
    "Reach": "dsv4c.reach",
}

__all__ = [
    "DeepseekV4", "ModelConfig", "Reach", "TrainStep", "compile_model", "verify_graph", "verify_model", "verify_module",
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dsv4c' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
