"""The Triton kernel of ``dsv4::indexer_kl_target``: interpreted against the formula, compiled for AMD GPUs, bytes moved."""

from __future__ import annotations

import pytest
import torch

from dsv4c.ops import reference
from dsv4c.ops.triton import indexer_kl_target as kernels
from tests.ops import contract
from tests.ops.cases import one_document, pack, transposed
from tests.ops.test_indexer_kl_target import arguments

PLACES = {
    "documents": pack([[7, 11], [18]], 4),
    "no entry": one_document(2, 3, 4),
    "one token": one_document(1, 1, 4),
    "one entry": one_document(1, 4, 4),
    "ragged": pack([[5, 9, 8], [13, 2, 7]], 4),
}


@pytest.mark.interpret
@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("k", [2, 9])
def test_kernel_equals_the_formula(at, joint, k):
    args = arguments(at, k=k, joint=joint)
    ours, expected = kernels.indexer_kl_target(*args), reference.indexer_kl_target(*args)
    assert (ours.shape, ours.dtype) == (expected.shape, torch.float32)
    assert contract.relative_error(ours, expected) < 1e-5


@pytest.mark.interpret
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(("n_heads", "width", "k"), [(80, 24, 20), (1, 160, 17)])
def test_more_than_one_tile_of_heads_channels_and_entries(n_heads, width, k, joint):
    args = arguments(one_document(1, 84, 4), n_heads, width, k, joint=joint)
    assert contract.relative_error(kernels.indexer_kl_target(*args), reference.indexer_kl_target(*args)) < 1e-5


@pytest.mark.interpret
@pytest.mark.parametrize("joint", [True, False])
def test_bf16_inputs_are_summed_in_fp32(joint):
    args = arguments(dtype=torch.bfloat16, joint=joint)
    assert contract.relative_error(kernels.indexer_kl_target(*args), reference.indexer_kl_target(*args)) < 1e-5


@pytest.mark.interpret
def test_inputs_of_any_strides_and_ids_in_any_place():
    q, entries, ids, lse, *rest = arguments(pack([[9, 15], [24]], 4), k=3)
    ids = ids.flip(-1)  # the slots without an entry come first
    expected = reference.indexer_kl_target(q, entries, ids, lse, *rest)
    ours = kernels.indexer_kl_target(transposed(q), transposed(entries), transposed(ids), transposed(lse), *rest)
    assert contract.relative_error(ours, expected) < 1e-5


@pytest.mark.interpret
def test_one_bad_query_spoils_no_other():
    args = arguments()
    bad = args[0].clone()
    bad[0, 8] = float("nan")
    others = torch.arange(18) != 8
    ours, good = (kernels.indexer_kl_target(q, *args[1:]) for q in (bad, args[0]))
    assert torch.equal(ours[0, others], good[0, others]) and torch.equal(ours[1], good[1])


def test_bytes_moved_at_flash_widths():
    """Floor 3a of performance.md: 287.3 MB, with ids of 4 bytes; the operator's ids have 8."""
    moved = kernels.bytes_moved(1, 4096, 64, 512, 1024, 512)
    print(f"\nindexer_kl_target: {moved['memory'] / 1e6:.1f} MB, {moved['memory'] / 287.3e6:.3f} of the floor", moved)
    assert moved["memory"] <= 1.10 * 287.3e6
