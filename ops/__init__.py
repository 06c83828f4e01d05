"""The operators that the model calls: ``torch.ops.dsv4.NAME``.

One file per operator holds its schema, fake, backward and CPU kernel; :mod:`dsv4c.ops.reference` holds the formula again in
plain torch.  An operator is functional (nothing is mutated, no output aliases an input), takes tensors of any strides and
returns contiguous ones, and computes in fp32, or fp64 where its inputs are fp64.

===================== =======================================================================================
``rope``              partial interleaved rotation of the last channels, and back
``sparse_attention``  window, selected entries and sink in one softmax; output and log-sum-exp
``indexer_topk``      scores of the visible entries and the best K of them; never a [B,S,Hi,P] tensor
``indexer_kl_target`` the teacher of the indexer over the selected entries; no gradient
``sinkhorn``          20 normalisations of the n x n residual mixing matrix
``grouped_mm``        one matrix product per expert over rows sorted by expert
``hadamard``          normalised Sylvester transform
``compress``          gated softmax pooling of windows into entries
``indexer_kl``        the distillation loss and its gradient in one pass
``hc_pre, hc_post``   hyper-connections before and after a block
``route``             square-root softplus scores, choice, normalised weights, load
``swiglu_clamp``      clamped gate and up with the routing weight folded in
===================== =======================================================================================

What graph passes put in the place of several of them in a joint graph comes with its backward as an operator of its own and
has no autograd formula:

============================== ==============================================================================
``sparse_attention_derotated`` ``sparse_attention`` and the inverse ``rope`` of its output, which is all it saves
``indexer_select``             ``rope`` of the queries, the scaling of the weights and ``indexer_topk``
``indexer_distillation``       ``indexer_kl_target`` and ``indexer_kl``; the teacher is never written
``hc_post_pre``                ``hc_post`` of a block and ``hc_pre`` of the next, which reads the new streams as they arise
============================== ==============================================================================

The model calls all but ``sinkhorn``, which ``hc_pre`` has inside.  ``rope_`` is ``rope`` written into its input, for a
caller who gives that up.  Kernels for a CPU that vectorised torch cannot make fast are in :mod:`dsv4c.ops.cpp`, those for
GPUs in :mod:`dsv4c.ops.triton`.

``DSV4_OPS=reference`` in the environment, or :func:`use_reference`, makes the model run on the references instead: they are
plain differentiable torch, so ``torch.func`` and double precision go through them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dsv4c.ops import compress as _compress
from dsv4c.ops import grouped_mm as _grouped_mm
from dsv4c.ops import hadamard as _hadamard
from dsv4c.ops import hc_post_pre as _hc_post_pre
from dsv4c.ops import hyper_connection as _hyper_connection
from dsv4c.ops import indexer_distillation as _indexer_distillation
from dsv4c.ops import indexer_kl as _indexer_kl
from dsv4c.ops import indexer_kl_target as _indexer_kl_target
from dsv4c.ops import indexer_select as _indexer_select
from dsv4c.ops import indexer_topk as _indexer_topk
from dsv4c.ops import reference
from dsv4c.ops import rope as _rope
from dsv4c.ops import route as _route
from dsv4c.ops import sinkhorn as _sinkhorn
from dsv4c.ops import sparse_attention as _sparse_attention
from dsv4c.ops import sparse_attention_derotated as _sparse_attention_derotated
from dsv4c.ops import swiglu_clamp as _swiglu_clamp
from dsv4c.ops import triton as _triton
from dsv4c.ops.precision import no_autocast

_on_reference = os.environ.get("DSV4_OPS", "") == "reference"


@contextmanager
def use_reference() -> Iterator[None]:
    """Run the model on the references inside this block."""
    global _on_reference
    before, _on_reference = _on_reference, True
    try:
        yield
    finally:
        _on_reference = before


def _either(operator: Callable[..., Any], formula: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if not _on_reference:
            return operator(*args)
        with no_autocast(args[0]):  # operators see to that themselves
            return formula(*args)

    call.__doc__ = operator.__doc__
    return call


compress = _either(_compress.compress, reference.compress)
hadamard = _either(_hadamard.hadamard, reference.hadamard)
hc_post = _either(_hyper_connection.hc_post, reference.hc_post)
hc_pre = _either(_hyper_connection.hc_pre, reference.hc_pre)
indexer_kl = _either(_indexer_kl.indexer_kl, reference.indexer_kl)
route = _either(_route.route, reference.route)
swiglu_clamp = _either(_swiglu_clamp.swiglu_clamp, reference.swiglu_clamp)
rope = _either(_rope.rope, reference.rope)
sparse_attention = _either(_sparse_attention.sparse_attention, reference.sparse_attention)
indexer_topk = _either(_indexer_topk.indexer_topk, reference.indexer_topk)
indexer_kl_target = _either(_indexer_kl_target.indexer_kl_target, reference.indexer_kl_target)
sinkhorn = _either(_sinkhorn.sinkhorn, reference.sinkhorn)
grouped_mm = _either(_grouped_mm.grouped_mm, reference.grouped_mm)
indexer_select = _indexer_select.indexer_select
sparse_attention_derotated = _sparse_attention_derotated.sparse_attention_derotated
indexer_distillation = _indexer_distillation.indexer_distillation
hc_post_pre = _hc_post_pre.hc_post_pre

_triton.register()

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
    "use_reference",
]
