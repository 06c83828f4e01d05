"""The Triton kernel of ``dsv4::indexer_kl``: interpreted against the formula, compiled, instructions and bytes."""

from __future__ import annotations

import pytest
import torch

from dsv4c.ops.reference.indexer_kl import indexer_kl as formula
from dsv4c.ops.triton import indexer_kl as kernels
from dsv4c.ops.triton.compiled import TARGETS, Compiled, compile_for, report, wave_instructions
from tests.ops import contract
from tests.ops.cases import transposed
from tests.ops.test_indexer_kl import SHAPES, arguments

SIGNATURE = {"real_ptr": "*i1", "n_chosen": "i32"}
SIGNATURE |= dict.fromkeys(("target_ptr", "score_ptr", "loss_ptr", "grad_ptr"), "*fp32")


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [*SHAPES, (9, 512), (2, 3, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_the_formula(shape, dtype):
    args = contract.detached(arguments(shape, dtype))
    for ours, expected in zip(kernels.indexer_kl(*args), formula(*args), strict=True):
        assert (ours.shape, ours.dtype) == (expected.shape, torch.float32)
        assert contract.relative_error(ours, expected) < 1e-5


@pytest.mark.interpret
def test_inputs_of_any_strides():
    args = contract.detached(arguments())
    other = [transposed(a) for a in args]
    assert all(torch.equal(a, b) for a, b in zip(kernels.indexer_kl(*other), kernels.indexer_kl(*args), strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("poisoned", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_row_spoils_the_gradient_of_no_other_and_is_seen(poisoned, value):
    args = [*contract.detached(arguments((5, 9)))]
    args[1], args[2] = args[1].clamp(min=-9.0), torch.ones(5, dtype=torch.bool)
    bad = args[poisoned].clone()
    bad[1] = value
    spoilt = [*args[:poisoned], bad, *args[poisoned + 1 :]]
    loss, dscores = kernels.indexer_kl(*spoilt)
    others = torch.arange(5) != 1
    assert torch.equal(dscores[others], kernels.indexer_kl(*args)[1][others])
    assert not loss.isfinite()


def test_what_the_kernel_does_not_take_is_left_to_plain_torch():
    args = contract.detached(arguments((1, kernels.LARGEST + 1)))
    assert not kernels.fits(*args[:2])
    for ours, expected in zip(kernels.indexer_kl(*args), formula(*args), strict=True):
        assert contract.relative_error(ours, expected) < 1e-5


def compiled(target: str, n_chosen: int = 512) -> Compiled:
    return compile_for(
        kernels._kl_kernel, SIGNATURE, kernels.constants(n_chosen), target=target, num_warps=kernels.warps(n_chosen),
        divisible=("n_chosen",),
    )  # fmt: skip


@pytest.mark.parametrize("n_chosen", [512, 1024, kernels.LARGEST])
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_fits_the_gpu(target, n_chosen):
    c = compiled(target, n_chosen)
    report([c])
    assert c.vgpr_spill == c.scratch == 0
    assert c.lds <= TARGETS[target].lds and c.num_warps <= TARGETS[target].max_warps


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_of_512_stays_within_one_wave(target):
    """Bar of performance.md, section 5c."""
    c = compiled(target)
    issued = wave_instructions(c, 1)
    print(f"\nindexer_kl on {target}: {issued} wave instructions a row")
    assert issued <= 700
    assert c.lds == 0 and "barrier" not in c.instructions and "ds" not in c.instructions


def test_bytes_moved_at_flash_widths():
    """Floor 3d of performance.md: 25.2 MB."""
    moved = kernels.bytes_moved(4096, 512)
    print(f"\nindexer_kl: {moved / 1e6:.2f} MB, {moved / 25.2e6:.3f} of the floor")
    assert moved <= 1.10 * 25.2e6
