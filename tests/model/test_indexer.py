"""The indexer: its scores, the entries it selects, and the scale that only the distillation can see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c import ModelConfig, ops
from dsv4c.config import LayerKind
from dsv4c.model.attention import Attention
from dsv4c.model.indexer import Indexer, captured_mass
from dsv4c.model.layout import LayerLayout, layer_layout, rows
from dsv4c.model.rope import inverse_frequencies
from tests.model import formulas
from tests.model.conftest import SPEC, batch, build, one_layer, randomise


def indexer(**changes: Any) -> Indexer:
    module = Indexer(SPEC.replace(**changes))
    randomise(module)
    return module.double()


def layout(n_tokens: int, documents: list[int] | None = None) -> LayerLayout:
    ids = torch.zeros(1, n_tokens, dtype=torch.long)
    return layer_layout(rows(ids, None if documents is None else torch.tensor([documents]), None, None), SPEC, 4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def chosen_scores(ids: Tensor, scores: Tensor, n_entries: int) -> Tensor:
    """[S,K] choices as one row of scores for all entries, -inf for what was not chosen."""
    full = torch.full((len(ids), n_entries + 1), float("-inf"), dtype=scores.dtype)
    full.scatter_(1, torch.where(ids < 0, n_entries, ids), scores)
    return full[:, :n_entries]


@pytest.mark.usefixtures("both")
def test_the_hadamard_matrix_is_symmetric_and_orthogonal() -> None:
    # invariant 17
    h = ops.hadamard(torch.eye(128, dtype=torch.float64))
    assert float((h @ h.T - torch.eye(128)).abs().max()) <= 3e-16
    assert torch.equal(h, h.T)
    assert torch.equal(h[0], torch.full((128,), 128**-0.5, dtype=torch.float64))
    for n in (1, 2, 32, 128):
        torch.testing.assert_close(ops.hadamard(torch.eye(n).double()), formulas.sylvester(n), rtol=1e-15, atol=0)


@pytest.mark.parametrize("rotates", [True, False])
def test_scores_are_those_of_the_formula_and_hadamard_changes_none(rotates: bool) -> None:
    # B16: relu per head, signed weights, both temperature factors
    module = indexer(indexer_hadamard=rotates)
    x, latent, n = normal(26, 64), normal(26, 32, seed=1), 6
    expected = formulas.indexer_scores(x, latent, module, SPEC, inverse_frequencies(SPEC, 4))
    ids, scores = module(x[None], latent[None], layout(26), dense=True)
    found = chosen_scores(ids[0], scores[0], n)
    for t in range(26):
        visible = (t + 1) // 4
        torch.testing.assert_close(found[t, :visible], expected[t, :visible], rtol=0, atol=1e-12)
        assert bool((found[t, visible:] == float("-inf")).all())


@pytest.mark.parametrize("topk", [1, 3, 6, 50])
def test_as_many_entries_as_are_visible_and_allowed_are_chosen_once_each(topk: int) -> None:
    # invariant 20
    ids, scores = indexer(index_topk=topk)(normal(1, 26, 64), normal(1, 26, 32, seed=1), layout(26), dense=False)
    assert ids.shape == (1, 26, min(topk, 6)) and ids.dtype == torch.int64
    for t, (row, values) in enumerate(zip(ids[0].tolist(), scores[0].tolist(), strict=True)):
        kept = [p for p in row if p >= 0]
        assert len(kept) == len(set(kept)) == min(topk, (t + 1) // 4)
        assert all(p < (t + 1) // 4 for p in kept)
        assert [p < 0 for p in row] == [v == float("-inf") for v in values]


def test_the_best_entries_are_chosen() -> None:
    module = indexer(index_topk=2)
    x, latent = normal(26, 64), normal(26, 32, seed=1)
    expected = formulas.indexer_scores(x, latent, module, SPEC, inverse_frequencies(SPEC, 4))
    ids, _ = module(x[None], latent[None], layout(26), dense=False)
    for t in range(11, 26):
        best = expected[t, : (t + 1) // 4].topk(2).indices.tolist()
        assert sorted(ids[0, t].tolist()) == sorted(best)


def test_relu_is_taken_per_head() -> None:
    # B16: head dots (-5, 3) against (1, 1): 3 wins over 2; without relu the other wins
    k = torch.tensor([[[-5.0, 3.0], [1.0, 1.0]]])
    q, w = torch.eye(2)[None, None].expand(1, 8, 2, 2).contiguous(), torch.ones(1, 8, 2)
    ids, scores = ops.indexer_topk(q, k, w, torch.zeros(1, 8).long(), torch.tensor([[3, 7]]), 1, 4)
    assert ids[0, 7].tolist() == [0] and scores[0, 7].tolist() == [3.0]


def test_the_temperature_is_that_of_the_specification() -> None:
    # invariant 18
    with torch.device("meta"):
        flash = Indexer(ModelConfig.preset("flash"))
    assert flash.temperature == pytest.approx(1 / 90.50966799, rel=1e-9)
    assert flash.temperature == pytest.approx(0.011048543, rel=1e-7)
    module = indexer()
    weights = module.weights_proj.weight
    _, scores = module(normal(1, 26, 64), normal(1, 26, 32, seed=1), layout(26), dense=True)
    with torch.no_grad():
        weights.mul_(90.50966799)
    _, scaled = module(normal(1, 26, 64), normal(1, 26, 32, seed=1), layout(26), dense=True)
    torch.testing.assert_close(scaled, scores * 90.50966799)


def test_the_rotary_slice_is_the_last_one_and_interleaved() -> None:
    # B17: values of B01, on a query that the indexer's projection passes through unchanged
    module = Indexer(SPEC.replace(indexer_hadamard=False, qk_rope_head_dim=4, index_head_dim=32, index_n_heads=1))
    module.compressor.wkv.weight.data.normal_()
    seen: list[Tensor] = []
    query = torch.zeros(1, 2, 32)
    query[0, 1, :4] = torch.tensor([5.0, 6.0, 7.0, 8.0])
    query[0, 1, 28:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.nn.init.eye_(module.wq_b.weight)
    config = SPEC.replace(qk_rope_head_dim=4, rope_original_length=0, compress_rope_theta=10000.0)
    at = layer_layout(rows(torch.zeros(1, 2).long(), None, None, None), config, 4)
    original = ops.indexer_topk
    try:
        ops.indexer_topk = lambda q, *rest: (seen.append(q), original(q, *rest))[1]  # type: ignore[assignment]
        module(torch.zeros(1, 2, 64), query, at, dense=True)
    finally:
        ops.indexer_topk = original  # type: ignore[assignment]
    expected = torch.tensor([-1.142640, 1.922076, 2.959851, 4.029800])
    torch.testing.assert_close(seen[0][0, 1, 0, 28:], expected, rtol=0, atol=1e-6)
    assert seen[0][0, 1, 0, :4].tolist() == [5.0, 6.0, 7.0, 8.0]


def test_inputs_are_detached() -> None:
    module = indexer()
    x, latent = normal(1, 26, 64).requires_grad_(), normal(1, 26, 32, seed=1).requires_grad_()
    _, scores = module(x, latent, layout(26), dense=False)
    loss = scores.masked_fill(scores == float("-inf"), 0.0).square().sum()
    assert torch.autograd.grad(loss, [x, latent], allow_unused=True, retain_graph=True) == (None, None)
    assert all(bool(g.any()) for g in torch.autograd.grad(loss, list(module.parameters())))


@pytest.mark.parametrize("topk", [6, 7, None])
def test_where_all_is_selected_the_logits_do_not_depend_on_the_indexer(topk: int | None) -> None:
    # invariant 19
    config = one_layer("csa", index_topk=topk)
    one, two = build(config), build(config)
    with torch.no_grad():
        for name, p in two.named_parameters():
            if ".indexer." in name:
                p.mul_(-3.0).add_(0.1)
    ids, _ = batch(27)
    assert torch.equal(one(ids).logits, two(ids).logits)
    few = config.replace(index_topk=2)
    one_few, two_few = build(few), build(few)
    two_few.load_state_dict(two.state_dict())
    assert not torch.equal(one_few(ids).logits, two_few(ids).logits)


def test_changing_the_last_token_leaves_every_output_before_it_bit_for_bit() -> None:
    # B08: S=16, more entries allowed than exist
    config = one_layer("csa", index_topk=8)
    attn = Attention(config, LayerKind("csa", "learned", 4))
    randomise(attn)
    x = normal(1, 16, 64).float()
    changed = x.clone()
    changed[:, 15] += 1.0
    for topk in (8, 2):
        assert attn.indexer is not None
        attn.indexer.topk = topk
        before, after = (attn(v, layout(16), False, False)[0] for v in (x, changed))
        assert torch.equal(before[:, :15], after[:, :15])
        assert not torch.equal(before[:, 15], after[:, 15])


def test_an_unused_slot_is_not_the_last_entry() -> None:
    # B08: -1 must not wrap around
    q, kv, entries = normal(1, 8, 2, 4), normal(1, 8, 4, seed=1), normal(1, 2, 4, seed=2)
    start, ends = torch.zeros(1, 8).long(), torch.tensor([[3, 7]])
    sink = torch.zeros(2).double()
    none = torch.full((1, 8, 2), -1)
    only_window = ops.sparse_attention(q, kv, entries[:, :0], sink, start, ends[:, :0], None, 0.5, 8, 0)
    masked = ops.sparse_attention(q, kv, entries, sink, start, ends, none, 0.5, 8, 4)
    for a, b in zip(only_window, masked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)
    assert bool((ops.indexer_kl_target(q, entries, none, None, 0.5, 4) == 0).all())


def test_ties_are_broken_towards_distinct_entries() -> None:
    # B37: no comparison with a rounded value decides anything; only -inf is compared, exactly
    q, k, w = (torch.ones(s, dtype=torch.bfloat16) for s in ((1, 32, 2, 4), (1, 8, 4), (1, 32, 2)))
    k[:, 5] /= 3
    q.requires_grad_()
    ids, scores = ops.indexer_topk(q, k, w, torch.zeros(1, 32).long(), torch.arange(3, 32, 4)[None], 4, 4)
    assert len(set(ids[0, 31].tolist())) == 4 and 5 not in ids[0, 31].tolist()
    scores.masked_fill(scores == float("-inf"), 0.0).sum().backward()
    assert q.grad is not None and bool(q.grad.isfinite().all())


def test_captured_mass_is_the_share_of_attention_on_the_selected_entries() -> None:
    q, entries, at = normal(1, 26, 3, 8), normal(1, 6, 8, seed=1), layout(26)
    ids, _ = indexer(index_topk=2)(normal(1, 26, 64), normal(1, 26, 32, seed=1), at, dense=False)
    shares = []
    for t in range(3, 26):
        weights = (q[0, t] @ entries[0, : (t + 1) // 4].T / math.sqrt(8)).softmax(-1)
        shares.append(weights[:, ids[0, t][ids[0, t] >= 0]].sum(-1).mean())
    found = captured_mass(q, entries, ids, at, 8**-0.5)
    torch.testing.assert_close(found, torch.stack(shares).mean(), rtol=1e-12, atol=0)
    assert float(captured_mass(q, entries, None, at, 8**-0.5)) == 1.0


def test_captured_mass_is_one_where_no_query_has_an_entry() -> None:
    q, ids = normal(1, 5, 3, 8), torch.full((1, 5, 1), -1)
    assert float(captured_mass(q, normal(1, 1, 8), ids, layout(5, [0, 0, 0, 1, 1]), 0.3)) == 1.0
