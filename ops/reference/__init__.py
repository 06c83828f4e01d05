"""The formulas of the operators in plain, differentiable torch: what tests and benchmarks compare with."""

from dsv4c.ops.reference.compress import compress
from dsv4c.ops.reference.grouped_mm import grouped_mm
from dsv4c.ops.reference.hadamard import hadamard
from dsv4c.ops.reference.hc_post_pre import hc_post_pre
from dsv4c.ops.reference.hyper_connection import hc_post, hc_pre
from dsv4c.ops.reference.indexer_distillation import indexer_distillation
from dsv4c.ops.reference.indexer_kl import indexer_kl
from dsv4c.ops.reference.indexer_kl_target import indexer_kl_target
from dsv4c.ops.reference.indexer_select import indexer_select
from dsv4c.ops.reference.indexer_topk import indexer_topk
from dsv4c.ops.reference.rope import rope
from dsv4c.ops.reference.route import route
from dsv4c.ops.reference.sinkhorn import sinkhorn
from dsv4c.ops.reference.sparse_attention import sparse_attention
from dsv4c.ops.reference.sparse_attention_derotated import sparse_attention_derotated
from dsv4c.ops.reference.swiglu_clamp import swiglu_clamp

__all__ = [
    "compress",
    "grouped_mm",
    "hadamard",
    "hc_post",
    "hc_post_pre",
    "hc_pre",
    "indexer_distillation",
    "indexer_kl",
    "indexer_kl_target",
    "indexer_select",
    "indexer_topk",
    "rope",
    "route",
    "sinkhorn",
    "sparse_attention",
    "sparse_attention_derotated",
    "swiglu_clamp",
]
