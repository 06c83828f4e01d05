"""``dsv4::sparse_attention_derotated``: attention that rotates its output back before writing it (specification, section 3).

What graph passes put in the place of ``sparse_attention`` and ``rope`` in a joint graph, forward and backward; it has no
autograd formula.  The output before the rotation is never in memory: the backward needs it for ``delta = <dO, O> - dlse``
alone, and a rotation is orthogonal, ``<dO', O'> = <dO, O>``.  So O' is all that is saved, as the projection behind it does
anyway (performance.md, 0.6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator
from dsv4c.ops.sparse_attention import backward, forward


@torch.library.custom_op("dsv4::sparse_attention_derotated", mutates_args=())
def sparse_attention_derotated(
    q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor, entry_end: Tensor, ids: Tensor | None,
    scale: float, window: int, ratio: int, cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``o' = rope(o, cos, sin, inverse=True)``, with o and lse of :func:`dsv4c.ops.sparse_attention.sparse_attention`.

    Shapes: those of ``sparse_attention``, and cos and sin [B,S,r/2] fp32.  Returns o' [B,S,H,c] in q's dtype, rounded once,
    and lse [B,S,H] fp32 (fp64 for fp64 inputs).
    """
    return forward(q, kv, entries, sink, start, entry_end, ids, scale, window, ratio, (cos, sin))


@sparse_attention_derotated.register_fake
def _(q, kv, entries, sink, start, entry_end, ids, scale, window, ratio, cos, sin):  # type: ignore[no-untyped-def]
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:3], dtype=accumulator(q, kv), device=q.device),
    )


@torch.library.custom_op("dsv4::sparse_attention_derotated_backward", mutates_args=())
def sparse_attention_derotated_backward(
    grad: Tensor, grad_lse: Tensor, q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor,
    entry_end: Tensor, ids: Tensor | None, out: Tensor, lse: Tensor, scale: float, window: int, ratio: int,
    cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, kv, entries and sink.

    ``grad`` and ``out`` [B,S,H,c] are dO' and O', of the output that was rotated back: ``delta = <dO', O'> - dlse`` and
    ``dO = rope(dO', cos, sin, inverse=False)``; the rest as in ``sparse_attention_backward``.
    """
    table = (cos, sin)
    return backward(grad, grad_lse, q, kv, entries, sink, start, entry_end, ids, out, lse, scale, window, ratio, table)


@sparse_attention_derotated_backward.register_fake
def _(grad, grad_lse, q, kv, entries, sink, *_):  # type: ignore[no-untyped-def]  # schema above
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, kv, entries, sink))
