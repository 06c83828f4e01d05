"""The Triton kernels of ``dsv4::indexer_topk``: interpreted against the formula, forward and backward; bytes moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4c.ops import reference
from dsv4c.ops.triton import indexer_topk as kernels
from dsv4c.ops.triton import indexer_topk_backward as backward
from dsv4c.ops.visibility import entry_mask
from tests.ops import contract
from tests.ops.cases import one_document, pack, transposed
from tests.ops.test_indexer_topk import arguments, by_entry

PLACES = {
    "documents": pack([[7, 6], [13]], 4),
    "no entry": one_document(2, 3, 4),
    "one token": one_document(1, 1, 4),
    "one entry": one_document(1, 4, 4),
    "ragged": pack([[5, 3, 6], [2, 5, 7]], 4),
}
EVERYWHERE = pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
# (tokens, heads, channels, K) at one token an entry: several blocks of heads, of channels, and of kept entries
MANY_TILES = pytest.mark.parametrize(("n_tokens", "n_heads", "width", "topk"), [(6, 80, 24, 4), (5, 1, 160, 4)])


def assert_same_choice(args: tuple[Any, ...]) -> None:
    (ids, scores), (expected_ids, expected) = kernels.indexer_topk(*args), reference.indexer_topk(*args)
    assert ids.dtype == torch.int64 and torch.equal(ids < 0, expected_ids < 0)
    assert contract.relative_error(scores, expected) < 1e-5
    n_entries = args[1].shape[1]
    ours, theirs = by_entry(ids, scores, n_entries), by_entry(expected_ids, expected, n_entries)
    assert contract.relative_error(ours, theirs) < 1e-5


@pytest.mark.interpret
@EVERYWHERE
@pytest.mark.parametrize("topk", [1, 2, 9])
def test_kernel_equals_the_formula(at, topk):
    assert_same_choice(contract.detached(arguments(at, topk=topk)))


@pytest.mark.interpret
@MANY_TILES
def test_more_than_one_tile_of_heads_channels_and_entries(n_tokens, n_heads, width, topk):
    assert_same_choice(contract.detached(arguments(one_document(1, n_tokens, 1), n_heads, width, topk)))


@pytest.mark.interpret
def test_more_than_one_chunk_of_scores(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK_N", 16)
    assert_same_choice(contract.detached(arguments(one_document(1, 20, 1), 2, 8, 3)))


@pytest.mark.interpret
def test_bf16_inputs_are_summed_in_fp32():
    assert_same_choice(contract.detached(arguments(PLACES["documents"], dtype=torch.bfloat16)))


@pytest.mark.interpret
def test_inputs_of_any_strides():
    args = contract.detached(arguments(PLACES["documents"]))
    other = [transposed(a) if isinstance(a, torch.Tensor) else a for a in args]
    for ours, expected in zip(kernels.indexer_topk(*other), kernels.indexer_topk(*args), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.interpret
def test_equal_scores_are_chosen_in_the_order_of_the_entries():
    q, k, w, *rest = contract.detached(arguments(one_document(1, 16, 4), topk=3))
    ids, _ = kernels.indexer_topk(q, torch.zeros_like(k), w, *rest)
    assert ids[0, -1].tolist() == [0, 1, 2]


@pytest.mark.interpret
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_query_spoils_no_other_and_chooses_what_it_may_see(value):
    args = contract.detached(arguments(one_document(1, 10, 4)))
    bad = args[0].clone()
    bad[0, 8] = value
    others = torch.arange(10) != 8
    spoilt, good = kernels.indexer_topk(bad, *args[1:]), kernels.indexer_topk(*args)
    assert all(torch.equal(a[0, others], b[0, others]) for a, b in zip(spoilt, good, strict=True))
    visible, chosen = entry_mask(args[3], args[4], 0)[0, 8], spoilt[0][0, 8]
    assert visible[chosen[chosen >= 0]].all()


def assert_same_gradients(args: tuple[Any, ...], limit: float = 1e-5) -> None:
    """Of the same choice, which the formula makes."""
    inputs = [a.detach().float().requires_grad_() for a in args[:3]]
    ids, scores = reference.indexer_topk(*inputs, *args[3:])
    grad = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(scores, inputs, grad.masked_fill(ids < 0, 0.0))
    grad = grad.masked_fill(ids < 0, float("nan"))  # where nothing was selected, the gradient is not to be looked at
    ours = backward.indexer_topk_backward(grad, ids, *args[:3], args[-1])
    assert [g.dtype for g in ours] == [a.dtype for a in args[:3]]
    contract.assert_same_gradients(ours, expected, limit)


@pytest.mark.interpret
@EVERYWHERE
@pytest.mark.parametrize("topk", [1, 9])
def test_gradients_equal_the_formula_s(at, topk):
    assert_same_gradients(contract.detached(arguments(at, topk=topk)))


@pytest.mark.interpret
@MANY_TILES
def test_gradients_over_more_than_one_tile(n_tokens, n_heads, width, topk):
    assert_same_gradients(contract.detached(arguments(one_document(1, n_tokens, 1), n_heads, width, topk)))


@pytest.mark.interpret
def test_gradients_over_more_than_one_block_of_queries(monkeypatch):
    monkeypatch.setattr(backward, "QUERIES", 5)
    assert_same_gradients(contract.detached(arguments(PLACES["documents"])))


@pytest.mark.interpret
def test_gradients_of_bf16_inputs():
    """The products take bf16, truncated here; the sums are fp32."""
    assert_same_gradients(contract.detached(arguments(PLACES["documents"], dtype=torch.bfloat16)), 2**-7)


@pytest.mark.interpret
def test_gradients_have_the_same_bits_twice_and_whatever_the_strides_of_the_incoming_one():
    args = contract.detached(arguments(PLACES["documents"]))
    ids, scores = kernels.indexer_topk(*args)
    loose = torch.full((), 0.75).expand(scores.shape)
    first, second, third = (
        backward.indexer_topk_backward(grad, ids, *args[:3], args[-1]) for grad in (loose, loose, loose.contiguous())
    )
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third, strict=True))
    other = [transposed(a) for a in args[:3]]
    fourth = backward.indexer_topk_backward(loose, transposed(ids), *other, args[-1])
    assert all(a.is_contiguous() and torch.equal(a, b) for a, b in zip(fourth, first, strict=True))


def test_bytes_moved_at_flash_widths():
    """Floor 2c of performance.md: 84.7 MB, with ids of 4 bytes; the operator's ids have 8."""
    moved = kernels.bytes_moved(1, 4096, 64, 128, 1024, 512)
    print(f"\nindexer_topk: {moved['memory'] / 1e6:.1f} MB, {moved['memory'] / 84.7e6:.3f} of the floor", moved)
    assert moved["memory"] <= 1.10 * 84.7e6


def test_bytes_moved_by_the_backward_at_flash_widths():
    """Floor 2f: 154.1 MB. q is read again by every tile of 128 keys that it can see: a bound, not a bar."""
    moved = backward.bytes_moved(1, 4096, 64, 128, 1024, 512)
    print(
        f"\nindexer_topk_backward: {sum(moved.values()) / 1e6:.1f} MB, {sum(moved.values()) / 154.1e6:.2f} of the floor",
        moved,
    )
    assert sum(moved.values()) <= 5 * 154.1e6
