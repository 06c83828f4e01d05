"""The Triton kernel of ``dsv4::hadamard``: interpreted against the formula, compiled, bytes."""

from __future__ import annotations

import pytest
import torch

from dsv4c.ops.reference.hadamard import hadamard as formula
from dsv4c.ops.triton import hadamard as kernels
from dsv4c.ops.triton.compiled import TARGETS, compile_for, report
from tests.ops import contract
from tests.ops.cases import normal, transposed

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # the interpreter cuts bf16 off where the hardware rounds


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [(2, 7, 8), (3, 5, 128), (40, 64), (1, 1), (4, 2), (2, 0, 4)])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_kernel_equals_the_formula(shape, dtype):
    (x,) = normal(0, dtype, shape, trains=False)
    ours, expected = kernels.hadamard(x), formula(x)
    assert (ours.shape, ours.dtype) == (expected.shape, dtype)
    assert contract.relative_error(ours, expected) < ROUNDING[dtype]


@pytest.mark.interpret
def test_inputs_of_any_strides():
    (x,) = normal(0, torch.float32, (2, 7, 8), trains=False)
    assert torch.equal(kernels.hadamard(transposed(x)), kernels.hadamard(x))


@pytest.mark.interpret
def test_one_bad_row_spoils_no_other():
    (x,) = normal(0, torch.float32, (7, 8), trains=False)
    bad = x.clone()
    bad[2] = float("nan")
    others = torch.arange(7) != 2
    assert torch.equal(kernels.hadamard(bad)[others], kernels.hadamard(x)[others])


@pytest.mark.parametrize("target", TARGETS)
def test_kernel_fits_the_gpu_at_flash_widths(target):
    signature = {"x_ptr": "*bf16", "out_ptr": "*bf16", "n_rows": "i32", "scale": "fp32"}
    c = compile_for(
        kernels._hadamard_kernel, signature, kernels.constants(128), target=target, num_warps=4, divisible=("n_rows",)
    )
    report([c])
    assert c.vgpr_spill == c.scratch == 0 and c.lds <= TARGETS[target].lds


def test_every_byte_is_moved_once():
    """Floor 2d of performance.md: 134.2 MB for the indexer's queries."""
    assert kernels.bytes_moved(4096 * 64, 128) <= 1.001 * 134.2e6
