"""The Triton kernel of ``dsv4::indexer_distillation``: interpreted against the formula, compiled, bytes and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4c.ops.reference.indexer_distillation import indexer_distillation as formula
from dsv4c.ops.triton import indexer_kl_target as kernels
from dsv4c.ops.triton.compiled import TARGETS, Compiled, compile_for, report
from tests.ops import contract
from tests.ops.cases import one_document, pack, transposed
from tests.ops.test_indexer_distillation import arguments
from tests.ops.triton.test_indexer_kl_target import PLACES

BOTH = pytest.mark.parametrize("joint", [True, False])


def assert_close(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, torch.float32)
        assert contract.relative_error(a, b, 1e-3) < 1e-5


@pytest.mark.interpret
@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
@BOTH
@pytest.mark.parametrize("k", [2, 9])
def test_kernel_equals_the_formula(at, joint, k):
    args = arguments(at, k=k, joint=joint)
    assert_close(kernels.indexer_distillation(*args), formula(*args))


@pytest.mark.interpret
@BOTH
@pytest.mark.parametrize(("n_heads", "width", "k"), [(80, 24, 20), (1, 160, 17)])
def test_more_than_one_tile_of_heads_channels_and_entries(n_heads, width, k, joint):
    args = arguments(one_document(1, 84, 4), n_heads, width, k, joint=joint)
    assert_close(kernels.indexer_distillation(*args), formula(*args))


@pytest.mark.interpret
@BOTH
def test_bf16_inputs_are_summed_in_fp32(joint):
    args = arguments(dtype=torch.bfloat16, joint=joint)
    assert_close(kernels.indexer_distillation(*args), formula(*args))


@pytest.mark.interpret
def test_inputs_of_any_strides_and_ids_in_any_place():
    q, entries, ids, lse, scores, real, *rest = arguments(pack([[9, 15], [24]], 4), k=3)
    ids, scores = ids.flip(-1), scores.flip(-1)  # the slots without an entry come first
    tensors = q, entries, ids, lse, scores, real
    assert_close(kernels.indexer_distillation(*map(transposed, tensors), *rest), formula(*tensors, *rest))


@pytest.mark.interpret
def test_one_bad_query_is_seen_and_spoils_the_gradient_of_no_other():
    q, *rest = arguments()
    rest[4] = torch.ones_like(rest[4])
    bad = q.clone()
    bad[0, 10] = float("nan")
    others = torch.arange(18) != 10
    (loss, ours), (_, good) = (kernels.indexer_distillation(x, *rest) for x in (bad, q))
    assert torch.equal(ours[0, others], good[0, others]) and torch.equal(ours[1], good[1])
    assert loss.isnan()


@pytest.mark.interpret
def test_no_query_and_rows_that_do_not_fit():
    q, entries, ids, lse, scores, real, *rest = arguments()
    none = slice(0, 0)
    empty = q[:, none], entries, ids[:, none], lse[:, none], scores[:, none], real[:, none]
    assert_close(kernels.indexer_distillation(*empty, *rest), formula(*empty, *rest))
    more = (0, kernels.LARGEST)
    ids, scores = torch.nn.functional.pad(ids, more, value=-1), torch.nn.functional.pad(scores, more, value=float("-inf"))
    args = q, entries, ids, lse, scores, real, *rest
    assert_close(kernels.indexer_distillation(*args), formula(*args))


F, B = "*fp32", "*bf16"
SIGNATURE = dict.fromkeys(("q_ptr", "entry_ptr"), B) | dict.fromkeys(("lse_ptr", "score_ptr", "loss_ptr", "out_ptr"), F)
SIGNATURE |= {"ids_ptr": "*i64", "real_ptr": "*i1", "scale": "fp32"}
SIGNATURE |= (SIZES := dict.fromkeys(("n_tokens", "n_entries", "n_chosen", "n_heads"), "i32"))


def compiled(target: str, joint: bool, n_chosen: int, tail: bool = True) -> Compiled:
    constants = kernels.constants(64, 512, n_chosen, joint, tail)
    if not tail:
        constants |= dict.fromkeys(("score_ptr", "real_ptr", "loss_ptr"))
    types = {name: kind for name, kind in SIGNATURE.items() if name not in constants}
    return compile_for(kernels._target_kernel, types, constants, target=target, divisible=SIZES)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("n_chosen", [512, 1024, kernels.LARGEST])
@BOTH
def test_the_tail_takes_no_wave_from_the_kernel(target, n_chosen, joint):
    with_tail, without = (compiled(target, joint, n_chosen, tail) for tail in (True, False))
    print()
    report(replace(c, name=f"K={n_chosen} {what}") for c, what in ((without, "target"), (with_tail, "distillation")))
    assert with_tail.vgpr_spill == with_tail.sgpr_spill == with_tail.scratch == 0
    assert with_tail.lds <= TARGETS[target].lds
    assert with_tail.occupancy == without.occupancy


def test_bytes_and_memory_at_flash_widths():
    """Floor 3e of performance.md: 295.7 MB, with ids of 4 bytes; the operator's ids have 8."""
    parts = kernels.bytes_moved(1, 4096, 64, 512, 1024, 512)
    moved, extra = parts["memory"] + parts["tail"], 4096 * 512 * 4 + 4096 * 4 + 4
    print(f"\nindexer_distillation: {moved / 1e6:.1f} MB, {moved / 295.7e6:.3f} of the floor; makes {extra / 1e6:.2f} MB")
    assert moved <= 1.10 * 295.7e6
    assert extra <= 16e6
