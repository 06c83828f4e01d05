"""No tensor nobody needs: the largest allocation of a layer grows with the length, not with its square."""

from __future__ import annotations

import functools
import sys

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.model.conftest import KINDS, batch, build, one_layer, total

HEADS, TOPK, LONG = 16, 64, 1024


@functools.cache
def largest_allocation(attention: str, n_tokens: int, recompute: bool = False) -> int:
    """Bytes of the largest single allocation in a forward and backward, inside operators as well."""
    config = one_layer(
        attention, num_attention_heads=HEADS, index_n_heads=HEADS, index_topk=TOPK, num_nextn_predict_layers=0,
        compress_ratios=(KINDS[attention],),
    )  # fmt: skip
    model = build(config)
    model.set_recompute("all" if recompute else "off")
    ids, targets = batch(n_tokens, rows=1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        total(model(ids, targets=targets)).backward()
    return max(event.self_cpu_memory_usage for event in profiler.events())


@pytest.mark.parametrize("attention", KINDS)
def test_the_largest_allocation_grows_about_linearly(attention: str) -> None:
    short, long = largest_allocation(attention, LONG // 2), largest_allocation(attention, LONG)
    assert long / short < 2.3
    ratio = KINDS[attention]
    n_entries = LONG // ratio if ratio else 0
    forbidden = {
        "[B,H,S,S+P]": HEADS * LONG * (LONG + n_entries),
        "[B,H,S,P]": HEADS * LONG * n_entries,
        "[B,S,Hi,P]": HEADS * LONG * n_entries if ratio == 4 else 0,
        "[B,S,K,c]": LONG * TOPK * 32 if ratio == 4 else 0,
    }
    for name, elements in forbidden.items():
        assert not elements or long < 4 * elements, name


@pytest.mark.parametrize("name", ["sparse_attention", "indexer_topk", "indexer_kl_target"])
def test_the_measure_sees_inside_operators(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # the property above can fail: an operator that takes all its queries in one block is seen
    module = sys.modules[f"dsv4c.ops.{name}"]
    monkeypatch.setattr(module, "query_blocks", lambda n_queries, *_: [(0, n_queries)])
    monkeypatch.setattr(module, "QUERIES", 512, raising=False)  # for which the indexer reserves its space
    n_keys = 512 + 128 if name == "sparse_attention" else 128
    assert largest_allocation.__wrapped__("csa", 512) >= 4 * HEADS * 512 * n_keys


def test_recomputation_allocates_nothing_larger() -> None:
    assert largest_allocation("csa", 512, recompute=True) <= largest_allocation("csa", 512) * 1.01
