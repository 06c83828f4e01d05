"""Fusions: chains of operators that become one. Each file holds one, written as data, and says how often it has to fire."""

from __future__ import annotations

from dsv4c.passes.fuse import derotation, distillation, hyper_connections, indexer_scaling
from dsv4c.passes.fuse.fusion import Fired, Fusion, fuse

FUSIONS: dict[str, Fusion] = {
    f.FUSION.name: f.FUSION for f in (derotation, indexer_scaling, distillation, hyper_connections)
}

__all__ = ["FUSIONS", "Fired", "Fusion", "fuse"]
