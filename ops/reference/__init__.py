"""The formulas of the operators in plain, differentiable torch: what tests and benchmarks compare with."""

from dsv4c.ops.reference.grouped_mm import grouped_mm
from dsv4c.ops.reference.indexer_kl_target import indexer_kl_target
from dsv4c.ops.reference.indexer_topk import indexer_topk
from dsv4c.ops.reference.rope import rope
from dsv4c.ops.reference.sinkhorn import sinkhorn
from dsv4c.ops.reference.sparse_attention import sparse_attention

__all__ = ["grouped_mm", "indexer_kl_target", "indexer_topk", "rope", "sinkhorn", "sparse_attention"]
