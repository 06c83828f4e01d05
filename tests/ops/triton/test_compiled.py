"""Kernels of attention and indexer compiled for AMD GPUs that are not here, at the widths of Flash, and the reader of their
assembly.  ``-s`` prints the table of registers, local memory, occupancy and instructions.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import triton
import triton.language as tl

from dsv4c.errors import LowerError
from dsv4c.ops.triton import (
    indexer_kl_target,
    indexer_topk,
    indexer_topk_backward,
    sparse_attention,
    sparse_attention_backward,
)
from dsv4c.ops.triton.compiled import TARGETS, Compiled, compile_for, report, wave_instructions

POINTERS = {
    **dict.fromkeys(["q", "kv", "entry", "key", "k", "w", "out", "grad", "dq", "dw"], "*bf16"),
    **dict.fromkeys(["sink", "cos", "sin", "lse", "grad_lse", "delta", "part", "best", "spread"], "*fp32"),
    **dict.fromkeys(["start", "end", "stop", "ids"], "*i64"),
    "chosen": "*u8",
}
FLASH = {"n_tokens": 4096, "n_entries": 1024, "n_keys": 1024, "n_chosen": 512, "n_heads": 64, "window": 128, "ratio": 4,
         "ids_stride": 1024, "chosen_stride": 1024, "first_query": 1024, "n_queries": 1024}  # fmt: skip
PLAN, WIDE_PLAN = (sparse_attention.PLANS["hip", itemsize] for itemsize in (2, 4))
ATTENTION, WIDE = (sparse_attention.tiles(64, 512, plan.heads) for plan in (PLAN, WIDE_PLAN))
BY_ID, BY_MASK, ALL = (
    {"GATHER": gather, "MASKED": masked, "MAX_CHOSEN": 512 if gather else 1}
    for gather, masked in ((True, False), (False, True), (False, False))
)
KEYS = {
    **{name: ATTENTION[name] for name in ("width", "BLOCK_C", "N_CHUNKS")},
    "BLOCK_K": PLAN.keys,
    "BLOCK_R": sparse_attention_backward.BLOCK_R,
    "ONE_QUERY": True,
}
FP32 = {name: kind.replace("bf16", "fp32") for name, kind in POINTERS.items()}


class Case(NamedTuple):
    kernel: Any
    constants: dict[str, Any]
    num_stages: int
    types: dict[str, str] | None = None  # of the pointers whose type is not the one of POINTERS
    num_warps: int = 4


def _attention(name: str, rotary: int) -> dict[str, Case]:
    forward, dq, dkv = (
        sparse_attention._forward_kernel, sparse_attention_backward._dq_kernel, sparse_attention_backward._dkv_kernel
    )  # fmt: skip
    rope, window, entries = {"ROPE": rotary}, {"WINDOW": True, "MASKED": False}, {"WINDOW": False, "MASKED": True}
    return {
        f"{name}, by id": Case(forward, ATTENTION | BY_ID | rope, PLAN.forward),
        f"{name}, by mask": Case(forward, ATTENTION | BY_MASK | rope, PLAN.forward, {"ids": "*u8"}),
        f"{name}, all": Case(forward, ATTENTION | ALL | rope, PLAN.forward),
        f"{name} dq, by id": Case(dq, ATTENTION | BY_ID | rope, PLAN.dq),
        f"{name} dq, by mask": Case(dq, ATTENTION | BY_MASK | rope, PLAN.dq, {"ids": "*u8"}),
        f"{name} dkv, window": Case(dkv, KEYS | window | rope, PLAN.dkv),
        f"{name} dkv, entries": Case(dkv, KEYS | entries | rope, PLAN.dkv),
        f"{name}, by mask, fp32": Case(forward, WIDE | BY_MASK | rope, WIDE_PLAN.forward, FP32 | {"ids": "*u8"}),
        f"{name} dq, by id, fp32": Case(dq, WIDE | BY_ID | rope, WIDE_PLAN.dq, FP32),
        f"{name} dkv, entries, fp32": Case(dkv, KEYS | entries | rope | {"BLOCK_K": WIDE_PLAN.keys}, WIDE_PLAN.dkv, FP32),
    }


def _indexer(name: str, rotary: int) -> dict[str, Case]:
    topk, dq = {"BLOCK_N": indexer_topk.BLOCK_N, "KEPT": 512}, {"BLOCK_N": indexer_topk_backward.BLOCK_N, "MAX_CHOSEN": 512}
    cases = {}
    for suffix, itemsize, types in (("", 2, {"grad": "*fp32"}), (", fp32", 4, FP32)):
        tiles, dk = indexer_topk.tiles(64, 128, rotary, itemsize), {"BLOCK_K": indexer_topk_backward.BLOCK_K[itemsize]}
        tiles["ROPE"] = rotary
        cases[f"{name}{suffix}"] = Case(indexer_topk._topk_kernel, tiles | topk, 1, types)
        cases[f"{name} dq{suffix}"] = Case(indexer_topk_backward._dq_kernel, tiles | dq, 2, types)
        cases[f"{name} dk{suffix}"] = Case(indexer_topk_backward._dk_kernel, tiles | dk, 1, types, num_warps=8)
    return cases


TAIL = {"score": "*fp32", "real": "*i1", "loss": "*fp32", "out": "*fp32"}
NO_TAIL = dict.fromkeys(("score_ptr", "real_ptr", "loss_ptr"))
CASES = {
    "indexer_kl_target, joint": Case(
        indexer_kl_target._target_kernel, indexer_kl_target.constants(64, 512, 512, True) | NO_TAIL, 2
    ),
    "indexer_kl_target, selected": Case(
        indexer_kl_target._target_kernel, indexer_kl_target.constants(64, 512, 512, False) | NO_TAIL, 2
    ),
    "indexer_distillation, joint": Case(
        indexer_kl_target._target_kernel, indexer_kl_target.constants(64, 512, 512, True, True), 2, TAIL
    ),
    "indexer_distillation, selected": Case(
        indexer_kl_target._target_kernel, indexer_kl_target.constants(64, 512, 512, False, True), 2, TAIL
    ),
    **_attention("sparse_attention", 0),
    **_attention("sparse_attention_derotated", 64),
    **_indexer("indexer_topk", 0),
    **_indexer("indexer_select", 64),
}  # fmt: skip
EVERY_CASE = pytest.mark.parametrize("name", CASES)
EVERY_TARGET = pytest.mark.parametrize("target", TARGETS)


def compiled(name: str, target: str, fresh: bool = False) -> Compiled:
    case = CASES[name]
    free = [a for a in case.kernel.arg_names if a not in case.constants]
    types = {
        a: (
            (POINTERS | (case.types or {}))[a.removesuffix("_ptr")]
            if a.endswith("_ptr")
            else "fp32"
            if a == "scale"
            else "i32"
        )
        for a in free
    }
    return compile_for(
        case.kernel, types, case.constants, target=target, num_warps=case.num_warps, num_stages=case.num_stages,
        divisible=[a for a in free if FLASH.get(a, 1) % 16 == 0], fresh=fresh,
    )  # fmt: skip


@EVERY_TARGET
@EVERY_CASE
def test_a_kernel_fits_and_comes_out_the_same_twice(name, target):
    """No register goes to memory, local memory is within the part's, no product is in tf32, and the code does not vary."""
    k = compiled(name, target)
    assert (k.vgpr_spill, k.scratch, k.instructions.get("scratch", 0)) == (0, 0, 0)
    assert k.lds <= TARGETS[target].lds
    assert k.num_warps <= TARGETS[target].max_warps
    assert "xf32" not in k.asm
    assert compiled(name, target, fresh=True).sha == k.sha


@EVERY_TARGET
@pytest.mark.parametrize("name", ["indexer_kl_target, joint", "indexer_kl_target, selected"])
def test_the_kl_target_spills_no_scalar_register_and_spends_its_loop_on_products(name, target):
    """Section 5c of performance.md: at most 12 other instructions for each matrix product in the loop over entries.

    The figure is of gfx942; a product of gfx950 covers twice as much.
    """
    k = compiled(name, target)
    assert k.sgpr_spill == 0
    assert k.occupancy >= 2
    inner = k.loops[-1].instructions
    others = (sum(inner.values()) - inner["mfma"]) / inner["mfma"]
    assert others <= (12 if target == "gfx942" else 24)


ROTATING = {"sparse_attention": "sparse_attention_derotated", "indexer_topk": "indexer_select"}


@pytest.mark.parametrize("plain", ROTATING)
def test_a_rotation_takes_no_kernel_of_its_own(plain):
    kernels = [[c.kernel for name, c in CASES.items() if re.match(rf"{x}\b", name)] for x in (plain, ROTATING[plain])]
    assert kernels[0] == kernels[1]


@pytest.mark.parametrize(
    ("module", "widths", "most"),
    [
        (sparse_attention, (64, 512, 1024, 512, 128), 1.01),
        (sparse_attention_backward, (64, 512, 1024, 512, 128), 1.01),
        (indexer_topk, (64, 128, 1024, 512), 1.02),
        (indexer_topk_backward, (64, 128, 1024, 512), 1.02),
    ],
)
def test_a_rotation_costs_no_bytes_but_its_table_s(module, widths, most):
    """At most a hundredth of attention's (section 5b of performance.md) and, of the fewer that the indexer moves, two."""
    plain, rotating = (module.bytes_moved(1, 4096, *widths, rotary=rotary) for rotary in (0, 64))
    print(f"\n{module.__name__.rpartition('.')[2]:>26}: {plain} -> {rotating} bytes")
    assert all(plain[part] <= rotating[part] <= most * plain[part] for part in plain)


def test_table_of_registers_local_memory_occupancy_and_instructions():
    print()
    report(replace(compiled(name, target), name=name) for name in CASES for target in TARGETS)


@triton.jit
def _nested(x_ptr, y_ptr, n, m, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for i in range(m):
        total = tl.zeros([BLOCK], tl.float32)
        for j in range(n):
            total += tl.load(x_ptr + j * BLOCK + at).to(tl.float32)
        tl.store(y_ptr + i * BLOCK + at, total)


NESTED = {"x_ptr": "*bf16", "y_ptr": "*fp32", "n": "i32", "m": "i32"}


@EVERY_TARGET
def test_loops_are_found_with_their_own_instructions(target):
    k = compile_for(_nested, NESTED, {"BLOCK": 1024}, target=target, num_warps=2)
    outer, inner = k.loops
    assert (outer.parent, inner.parent) == ("", outer.label)
    assert (inner.instructions["global_load_x4"], outer.instructions["global_store_x4"]) == (1, 2)
    assert "global_load_x4" not in outer.instructions
    assert sum(k.instructions.values()) > sum(sum(x.instructions.values()) for x in k.loops)


def test_wave_instructions_count_a_body_as_often_as_it_runs():
    k = compile_for(_nested, NESTED, {"BLOCK": 1024}, target="gfx942", num_warps=2)
    outer, inner = (sum(loop.instructions.values()) for loop in k.loops)
    straight = sum(k.instructions.values()) - outer - inner
    assert wave_instructions(k, 10, [3, 5]) == 10 * 2 * (straight + 3 * outer + 3 * 5 * inner)
    with pytest.raises(ValueError, match="2 loops, 1 trip counts"):
        wave_instructions(k, 10, [3])


def test_the_identity_of_the_code_does_not_depend_on_where_its_source_lies():
    code = compile_for(_nested, NESTED, {"BLOCK": 1024}, target="gfx942")
    assert __file__.rpartition("/")[0] in code.asm
    other = compile_for(_nested, NESTED, {"BLOCK": 2048}, target="gfx942")
    assert code.sha != other.sha


@pytest.mark.parametrize(
    ("target", "num_warps", "signature", "message"),
    [
        ("gfx90a", 4, NESTED, "no facts about target"),
        ("gfx942", 32, NESTED, "more than a workgroup holds"),
        ("gfx942", 4, {"x_ptr": "*bf16"}, "disagree on y_ptr, n, m"),
        ("gfx942", 4, {**NESTED, "other": "i32"}, "disagree on other"),
    ],
)
def test_what_cannot_be_compiled_is_refused(target, num_warps, signature, message):
    with pytest.raises(LowerError, match=message):
        compile_for(_nested, signature, {"BLOCK": 1024}, target=target, num_warps=num_warps)


def test_a_target_may_carry_its_features():
    plain, featured = (compile_for(_nested, NESTED, {"BLOCK": 1024}, target=t) for t in ("gfx942", "gfx942:sramecc+:xnack-"))
    assert plain.sha == featured.sha and featured.target == "gfx942"
