"""``dsv4::compress``: tokens to compressed entries by a gated softmax, channel by channel (specification, section 4).

Windows lie where the documents put them.  Where those of a block of entries follow on one another the CPU kernel reads and
writes them as a view, else by index; no token is in two slots of the same half, so that nothing is added up and the result
does not depend on an order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4c.ops.precision import accumulator

_BLOCK = 1 << 18  # elements of the slots of a block of entries


class _Half(NamedTuple):
    """Some channels of the windows that begin at these tokens, and the slots of the block that they fill."""

    first: Tensor
    channels: slice
    slots: slice

    def of(self, rows: Tensor) -> Tensor:
        """[n,m,c] of rows [tokens,wc]: a view where window follows window."""
        ratio, n = self.slots.stop - self.slots.start, len(self.first)
        if n and int(self.first[-1] - self.first[0]) == (n - 1) * ratio:
            return rows.narrow(0, int(self.first[0]), n * ratio)[:, self.channels].unflatten(0, (n, ratio))
        return rows[self.tokens(ratio), self.channels]

    def put(self, rows: Tensor, values: Tensor) -> None:
        """The inverse of :meth:`of`."""
        ratio, n = self.slots.stop - self.slots.start, len(self.first)
        if n and int(self.first[-1] - self.first[0]) == (n - 1) * ratio:
            self.of(rows).copy_(values)
        else:
            rows[self.tokens(ratio), self.channels] = values.to(rows.dtype)

    def tokens(self, ratio: int) -> Tensor:
        return self.first[:, None] + torch.arange(ratio, device=self.first.device)


class _Block(NamedTuple):
    entries: Tensor  # [n] indices into the flat B*P
    halves: list[_Half]
    values: Tensor  # [n,slots,c]; the input itself, perhaps
    weights: Tensor  # [n,slots,c]: the softmax


def _blocks(
    values: Tensor, logits: Tensor, ape: Tensor, entry_end: Tensor, has_previous: Tensor, overlap: bool
) -> Iterator[_Block]:
    """The entries there are, a block of one row and of entries with a window before, or without, at a time."""
    acc, (ratio, width), n_tokens = accumulator(values, logits), ape.shape, values.shape[1]
    c = width // 2 if overlap else width
    n_entries = entry_end.shape[1]
    step = max(1, _BLOCK // max(ratio * width, 1))
    flat_values, flat_logits, ape = values.reshape(-1, width), logits.reshape(-1, width), ape.to(acc)
    for row, (exists, previous) in enumerate(zip(entry_end < n_tokens, has_previous, strict=True)):
        for with_previous in (False, True) if overlap else (False,):
            here = (exists & (previous == with_previous) if overlap else exists).nonzero().squeeze(1)
            for entries in here.split(step):
                first = entry_end[row, entries] - ratio + 1 + row * n_tokens
                halves = [_Half(first - ratio, slice(0, c), slice(0, ratio))] if with_previous else []
                halves.append(_Half(first, slice(width - c, width), slice(ratio * len(halves), ratio * (1 + len(halves)))))
                v = _joined([half.of(flat_values).to(acc) for half in halves])
                e = _joined([half.of(flat_logits) + ape[:, half.channels] for half in halves])
                yield _Block(entries + row * n_entries, halves, v, e.softmax(1))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def plain(
    values: Tensor, logits: Tensor, ape: Tensor, entry_end: Tensor, has_previous: Tensor, overlap: bool
) -> Tensor:  # fmt: skip
    """The operator in plain torch, without the dispatcher around it."""
    c = ape.shape[1] // 2 if overlap else ape.shape[1]
    out = torch.zeros((*entry_end.shape, c), dtype=accumulator(values, logits), device=values.device)
    for block in _blocks(values, logits, ape, entry_end, has_previous, overlap):
        out.view(-1, c)[block.entries] = block.weights.mul_(block.values).sum(1)
    return out


def plain_backward(
    grad: Tensor, values: Tensor, logits: Tensor, ape: Tensor, entry_end: Tensor, has_previous: Tensor, out: Tensor,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients in plain torch."""
    width, acc = ape.shape[1], accumulator(values, logits)
    dvalues, dlogits = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (values, logits))
    dape = torch.zeros(ape.shape, dtype=acc, device=ape.device)
    flat_grad, flat_out = grad.flatten(0, 1), out.flatten(0, 1)
    for block in _blocks(values, logits, ape, entry_end, has_previous, overlap):
        da = block.weights.mul_(flat_grad[block.entries, None].to(acc))
        de = (block.values - flat_out[block.entries, None]).mul_(da)
        for half in block.halves:
            half.put(dvalues.view(-1, width), da[:, half.slots])
            half.put(dlogits.view(-1, width), de[:, half.slots])
            dape[:, half.channels] += de[:, half.slots].sum(0)
    return dvalues, dlogits, dape


@torch.library.custom_op("dsv4::compress", mutates_args=())
def compress(values: Tensor, logits: Tensor, ape: Tensor, entry_end: Tensor, has_previous: Tensor, overlap: bool) -> Tensor:
    """``entry_p = sum_slots softmax_slots(logits + ape) values``, channel by channel.

    The slots of entry p are the m tokens up to entry_end_p.  With overlap there are 2m: the first half of the channels of
    the window before (weight 0 where has_previous is False), and the second half of its own window.

    Shapes: values, logits [B,S,wc], ape [m,wc] fp32, w = 2 with overlap and else 1; entry_end [B,P] int64, S where the row
    has fewer entries; has_previous [B,P] bool.  Returns [B,P,c] fp32 (fp64 for fp64 inputs); an entry that is not there is
    zero, and no gradient leaves it.
    """
    return plain(values, logits, ape, entry_end, has_previous, overlap)


@compress.register_fake
def _(values, logits, ape, entry_end, has_previous, overlap):  # type: ignore[no-untyped-def]  # schema above
    c = ape.shape[1] // 2 if overlap else ape.shape[1]
    return torch.empty((*entry_end.shape, c), dtype=accumulator(values, logits), device=values.device)


@torch.library.custom_op("dsv4::compress_backward", mutates_args=())
def compress_backward(
    grad: Tensor, values: Tensor, logits: Tensor, ape: Tensor, entry_end: Tensor, has_previous: Tensor, out: Tensor,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``da_j = s_j G``, ``de_j = s_j (a_j - entry_p) G``, ``dape = sum de``: s the weights, formed again, G the gradient."""
    return plain_backward(grad, values, logits, ape, entry_end, has_previous, out, overlap)


@compress_backward.register_fake
def _(grad, values, logits, ape, *_):  # type: ignore[no-untyped-def]  # schema above
    return (
        torch.empty(values.shape, dtype=values.dtype, device=values.device),
        torch.empty(logits.shape, dtype=logits.dtype, device=logits.device),
        torch.empty(ape.shape, dtype=accumulator(values, logits), device=ape.device),
    )


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # autograd context
    *tensors, ctx.overlap = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # autograd context
    saved = ctx.saved_tensors  # read once: recomputation hands them out one time
    dvalues, dlogits, dape = compress_backward(grad, *saved, ctx.overlap)
    return dvalues, dlogits, dape.to(saved[2].dtype), None, None, None


compress.register_autograd(_backward, setup_context=_save)
