"""What each fusion saves where code is generated for an AMD GPU, at the widths of Flash: launches, bytes, before and after.

``-s`` prints the table.  Bytes are of the arguments and results of every kernel and operator; what our own kernels read and
write in fact is computed from their loads and stores in ``tests/ops/triton``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4c import ops
from dsv4c.passes.fuse import FUSIONS
from tests.passes.fuse.hip import Generated, generated

S, H, C, R, K, P, W = 4096, 64, 512, 64, 512, 1024, 128
HI, CI = 64, 128
N, D = 4, 4096


def of(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def fp32(*shape: int, grad: bool = False) -> Tensor:
    return of(*shape, dtype=torch.float32, grad=grad)


def ints(*shape: int) -> Tensor:
    return of(*shape, dtype=torch.int64)


def attention(q, kv, entries, sink, start, end, ids, cos, sin, grad):
    o, lse = ops.sparse_attention(q, kv, entries, sink, start, end, ids, C**-0.5, W, 4)
    turned = ops.rope(o, cos, sin, True)
    return (turned, lse, *torch.autograd.grad(turned, (q, kv, entries, sink), grad))


def indexer(q, k, w, cos, sin, start, end, grad):
    turned = ops.hadamard(ops.rope(q, cos, sin, False))
    ids, scores = ops.indexer_topk(turned, ops.hadamard(k), w * (CI**-0.5 * HI**-0.5), start, end, K, 4)
    return (ids, scores, *torch.autograd.grad(scores, (q, k, w), grad))


def distillation(q, entries, ids, lse, scores, real):
    target = ops.indexer_kl_target(q, entries, ids, lse, C**-0.5, 4)
    loss = ops.indexer_kl(target, scores, real)[0]
    return (loss, *torch.autograd.grad(loss, (scores,)))


def mixing(y, streams, post, comb, fn, base, scale, grad, grad_u):
    new = ops.hc_post(y, streams, post, comb)
    u, post_, comb_, _, _ = ops.hc_pre(new, fn, base, scale, 20, 1e-6, 1e-6)
    inputs = (y, streams, post, comb, fn, base, scale)
    return (new, u, post_, comb_, *torch.autograd.grad((new, u), inputs, (grad, grad_u)))


class Case(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    calls: tuple[int, int]  # of our operators, before and after
    bytes_after: float  # at most, of those before


TABLE = (fp32(1, S, R // 2), fp32(1, S, R // 2))
CASES = {
    "derotation": Case(
        attention,
        (of(1, S, H, C, grad=True), of(1, S, C, grad=True), of(1, P, C, grad=True), fp32(H, grad=True), ints(1, S),
         ints(1, P), ints(1, S, K), *TABLE, of(1, S, H, C)),
        (4, 2), 0.66,
    ),
    "indexer-scaling": Case(
        indexer,
        (of(1, S, HI, CI, grad=True), of(1, P, CI, grad=True), fp32(1, S, HI, grad=True), *TABLE, ints(1, S), ints(1, P),
         fp32(1, S, K)),
        (8, 2), 0.5,
    ),
    "distillation": Case(
        distillation,
        (of(1, S, H, C), of(1, P, C), ints(1, S, K), fp32(1, S, H), fp32(1, S, K, grad=True),
         of(1, S, dtype=torch.bool)),
        (2, 1), 0.97,
    ),
    "hyper-connections": Case(
        mixing,
        (of(1, S, D, grad=True), of(1, S, N, D, grad=True), fp32(1, S, N, grad=True), fp32(1, S, N, N, grad=True),
         fp32(24, N * D, grad=True), fp32(24, grad=True), fp32(3, grad=True), of(1, S, N, D), of(1, S, D)),
        (4, 2), 0.8,
    ),
}  # fmt: skip


def ours(found: Generated) -> int:
    return sum(call.startswith("torch.ops.dsv4") for call in found.calls)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_launches_less_and_moves_less(name: str, arch: str) -> None:
    case = CASES[name]
    before, after = (generated(case.function, case.args, arch, fusion) for fusion in (None, FUSIONS[name]))
    print(
        f"\n{name:>18} {arch}: {before.launches} -> {after.launches} launches, {before.bytes / 1e6:,.0f} -> "
        f"{after.bytes / 1e6:,.0f} MB ({after.bytes / before.bytes:.2f})"
    )
    assert (ours(before), ours(after)) == case.calls
    assert after.kernels <= before.kernels
    assert after.bytes <= case.bytes_after * before.bytes


def test_the_rotation_adds_no_launch_and_a_hundredth_of_the_bytes() -> None:
    """Attention alone against attention that also rotates back, forward and backward."""

    def alone(q, kv, entries, sink, start, end, ids, cos, sin, grad):
        o, lse = ops.sparse_attention(q, kv, entries, sink, start, end, ids, C**-0.5, W, 4)
        return (o, lse, *torch.autograd.grad(o, (q, kv, entries, sink), grad))

    plain = generated(alone, CASES["derotation"].args)
    fused = generated(attention, CASES["derotation"].args, fusion=FUSIONS["derotation"])
    print(f"\nattention alone {plain.bytes / 1e6:,.1f} MB, with its rotations {fused.bytes / 1e6:,.1f} MB")
    assert fused.launches == plain.launches
    assert fused.bytes <= 1.01 * plain.bytes


def test_no_scores_and_no_rotated_queries_are_made() -> None:
    """Nothing of S*Hi*P or S*P numbers, and nothing of the queries' size but their gradient, is allocated."""
    found = generated(indexer, CASES["indexer-scaling"].args, fusion=FUSIONS["indexer-scaling"])
    sizes = [ast.literal_eval(shape) for shape in re.findall(r"empty_strided_\w+\((\([^()]*\))", found.source)]
    assert all(torch.Size(size).numel() < S * P for size in sizes), sizes


def test_plain_torch_moves_more_by_far() -> None:
    """What Inductor makes of the formula of the rotation: a copy of everything (section 1 of performance.md: 538 MB)."""
    found = generated(lambda o, c, s: ops.reference.rope(o, c, s, True), (of(1, S, H, C), *TABLE))
    assert found.kernels == 1
    assert found.bytes == pytest.approx(538e6, rel=0.01)
