"""Routers and experts: scores, choices, weights, clamps and the balance loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4c import ops
from dsv4c.config import LayerKind
from dsv4c.model.layout import layer_layout, rows
from dsv4c.model.moe import Experts, Gate, MoE, Routing, expert_counts, sequence_balance
from tests.model import formulas
from tests.model.conftest import SPEC, randomise

pytestmark = pytest.mark.usefixtures("both")
LEARNED, HASH = LayerKind("swa", "learned", 0), LayerKind("swa", "hash", 0)


def gate(kind: LayerKind = LEARNED, **changes: Any) -> Gate:
    module = Gate(SPEC.replace(**changes), kind)
    randomise(module)
    return module


def routed(logits: list[float], bias: list[float], k: int, scale: float = 1.5) -> Routing:
    """A gate whose logits for the one token are exactly these."""
    n = len(logits)
    module = gate(n_routed_experts=n, num_experts_per_tok=k, routed_scaling_factor=scale, hidden_size=n)
    module.weight.data = torch.diag(torch.tensor(logits))
    module.bias.copy_(torch.tensor(bias))
    return module(torch.ones(1, n), torch.zeros(1, dtype=torch.long))


def sqrt_softplus(logits: Tensor) -> Tensor:
    """The router's scores for these logits [E] of one token."""
    return ops.route(logits[None], None, None, None, 1, 1.5)[2][0]


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """The experts' activation of one row [2I], unweighted."""
    return ops.swiglu_clamp(gate_up[None], None, limit)[0]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    # B14
    routing = routed([2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 10.0], 2)
    weights = dict(zip(routing.ids[0].tolist(), routing.weights[0].tolist(), strict=True))
    assert weights == {3: pytest.approx(0.416009, abs=1e-6), 0: pytest.approx(1.083991, abs=1e-6)}


def test_a_missing_bias_is_an_error() -> None:
    # B14: never zeros in its place
    module = gate()
    with pytest.raises(RuntimeError, match="bias"):
        module.load_state_dict({"weight": module.weight})


def test_two_experts_closer_than_bf16_can_tell_are_told_apart() -> None:
    # invariant 24
    scores = sqrt_softplus(torch.tensor([1.0, 1.0078125]))
    torch.testing.assert_close(scores, torch.tensor([1.14597631, 1.14846814]), rtol=0, atol=2e-7)
    assert routed([1.0, 1.0078125], [0.001, 0.0], 1).ids.tolist() == [[1]]


def test_the_weights_sum_to_the_route_scale() -> None:
    # invariant 25
    for kind in (LEARNED, HASH):
        routing = gate(kind, routed_scaling_factor=2.5)(normal(50, 64).float(), torch.arange(50))
        torch.testing.assert_close(routing.weights.sum(-1), torch.full((50,), 2.5), rtol=1e-6, atol=0)


def test_a_constant_added_to_the_bias_changes_nothing() -> None:
    # invariant 25
    module, x = gate(), normal(50, 64).float()
    before = module(x, torch.zeros(50).long())
    module.bias += 3.0
    after = module(x, torch.zeros(50).long())
    assert torch.equal(before.ids.sort(-1).values, after.ids.sort(-1).values)
    torch.testing.assert_close(before.weights.sort(-1).values, after.weights.sort(-1).values, rtol=1e-6, atol=0)


def test_a_bias_that_keeps_the_choice_keeps_the_weights() -> None:
    # invariant 25
    module, x = gate(num_experts_per_tok=8), normal(50, 64).float()
    before = module(x, torch.zeros(50).long())
    module.bias.copy_(torch.linspace(-1, 1, 8))
    after = module(x, torch.zeros(50).long())
    by_expert = [r.weights.gather(1, r.ids.argsort(-1)) for r in (before, after)]
    torch.testing.assert_close(*by_expert, rtol=1e-6, atol=0)


def test_scores_and_their_gradients_are_finite_everywhere() -> None:
    # B63: values of the case
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logits = torch.tensor([-104.0, -20.0, 0.0, 2.0, 25.0, 200.0, -1e4], dtype=dtype, requires_grad=True)
        scores = sqrt_softplus(logits)
        assert scores.dtype == torch.promote_types(dtype, torch.float32)
        (grad,) = torch.autograd.grad(scores.sum(), logits)
        expected = torch.tensor([2.6e-23, 4.53999e-5, 0.832555, 1.458399, 5.0, math.sqrt(200.0), 0.0])
        slopes = torch.tensor([1.3e-23, 2.26999e-5, 0.300281, 0.301974, 0.1, 0.5 / math.sqrt(200.0), 0.0])
        tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(scores.float(), expected, rtol=1e-5, atol=1e-22)
        torch.testing.assert_close(grad.float(), slopes, rtol=tolerance, atol=1e-22)
        # neither is 0, which those absolute tolerances would let pass
        assert float(scores[0].detach()) == pytest.approx(2.6e-23, rel=1e-2, abs=0)
        assert float(grad[0]) == pytest.approx(1.3e-23, rel=1e-2, abs=0)


def test_scores_and_their_gradients_are_the_same_compiled() -> None:
    # B63: exponentials of generated code flush and fuse differently
    compiled = torch.compile(sqrt_softplus, fullgraph=True)
    results = []
    for function in (sqrt_softplus, compiled):
        logits = torch.tensor([-1e4, -104.0, -87.5, -20.0, 0.0, 2.0, 25.0, 200.0], requires_grad=True)
        scores = function(logits)
        results += [(scores.detach(), *torch.autograd.grad(scores.sum(), logits))]
    for eager, fused in zip(*results, strict=True):
        assert bool(fused.isfinite().all())
        torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-22)


def test_the_two_branches_of_the_score_meet() -> None:
    logits = torch.linspace(-20.5, -19.5, 101, dtype=torch.float64)
    torch.testing.assert_close(sqrt_softplus(logits), F.softplus(logits).sqrt(), rtol=1e-8, atol=0)


def test_a_very_negative_logit_does_not_poison_the_gate() -> None:
    # B63
    module = gate()
    x = torch.full((3, 64), 50.0)
    module.weight.data[2] = -1.0
    routing = module(x, torch.zeros(3).long())
    (grad,) = torch.autograd.grad((routing.weights * normal(3, 2).float()).sum() + routing.scores.sum(), module.weight)
    assert bool(grad.isfinite().all())


def test_hash_routing_depends_on_the_token_id_alone() -> None:
    # invariant 28, B15
    module, ids = gate(HASH), torch.tensor([3, 3, 95, 0])
    x = normal(4, 64).float()
    routing = module(x, ids)
    assert torch.equal(routing.ids, module.tid2eid[ids])
    assert torch.equal(routing.ids, module(x[[2, 0, 3, 1]], ids).ids)
    scores = F.softplus(x @ module.weight.T).sqrt()
    chosen = scores.gather(1, routing.ids)
    torch.testing.assert_close(routing.weights, chosen / chosen.sum(-1, keepdim=True) * 1.5, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(routing.weights[:, 0].sum(), module.weight)
    assert bool(grad.any())
    assert not module.tid2eid.is_floating_point() and "bias" not in dict(module.named_buffers())


@pytest.mark.parametrize(("vocab", "experts", "k"), [(96, 8, 2), (96, 8, 3), (1000, 16, 6), (50, 3, 3)])
def test_a_fresh_hash_table_is_balanced_and_its_rows_are_distinct(vocab: int, experts: int, k: int) -> None:
    module = Gate(SPEC.replace(vocab_size=vocab, n_routed_experts=experts, num_experts_per_tok=k), HASH)
    module.reset_parameters(0.02)
    table = module.tid2eid
    assert all(len(set(row)) == k for row in table.tolist())
    counts = table.flatten().bincount(minlength=experts)
    assert int(counts.max() - counts.min()) <= 1


@pytest.mark.parametrize("kind", [LEARNED, HASH])
@pytest.mark.parametrize("changes", [{}, {"swiglu_limit": 0.5}, {"swiglu_limit": 0.0}, {"swiglu_limit_shared": False}])
def test_the_output_is_that_of_the_formula(kind: LayerKind, changes: dict[str, Any]) -> None:
    config = SPEC.replace(**changes)
    module = MoE(config, kind)
    randomise(module)
    module = module.double()
    x, ids = 4 * normal(9, 64), torch.randint(0, 96, (9,))
    at = layer_layout(rows(ids[None], None, None, None), config, 0)
    y, facts = module(x[None], ids[None], at)
    expected, balance = formulas.moe(x, ids, module, config)
    torch.testing.assert_close(y[0], expected, rtol=1e-12, atol=1e-12)
    assert (facts.balance is None) == (kind == HASH)
    if facts.balance is not None:
        torch.testing.assert_close(facts.balance, balance, rtol=1e-12, atol=0)
    assert float(facts.load.sum()) == 9 * 2


def test_the_gate_is_clamped_above_only_and_the_other_half_on_both_sides() -> None:
    # invariant 27, B13
    g, u = torch.tensor([20.0, 10.0, -20.0, 1.0]), torch.tensor([-20.0, -10.0, 1.0, 20.0])
    gate_up = torch.cat((g, u)).requires_grad_()
    out = clamped_swiglu(gate_up, 10.0)
    expected = torch.tensor([-99.995460, -99.995460, -4.1223e-8, 10 * 0.731058579])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-12)
    (grad,) = torch.autograd.grad(out.sum(), gate_up)
    assert grad[0] == 0 and grad[4] == 0 and grad[7] == 0
    assert grad[2] != 0 and grad[3] != 0 and grad[6] != 0
    assert float(clamped_swiglu(torch.tensor([20.0, -20.0]), 0.0)) == pytest.approx(-400.0, rel=1e-6)
    assert float(clamped_swiglu(torch.tensor([-1e3, 1.0]), 10.0)) == 0.0


@pytest.mark.parametrize("part", ["experts", "shared_experts"])
def test_routed_and_shared_experts_are_clamped_alike(part: str) -> None:
    # B13: weights so large that every unclamped product passes the limit
    def output(limit: float, shared: bool) -> Tensor:
        config = SPEC.replace(swiglu_limit=limit, swiglu_limit_shared=shared)
        module = MoE(config, LEARNED)
        randomise(module)
        other = "shared_experts" if part == "experts" else "experts"
        for p in getattr(module, other).parameters():
            torch.nn.init.zeros_(p)
        x = 20 * normal(1, 5, 64).float()
        return module(x, torch.zeros(1, 5).long(), layer_layout(rows(torch.zeros(1, 5), None, None, None), config, 0))[0]

    assert float((output(0.5, True) - output(0.0, True)).detach().abs().max()) > 1
    same = torch.equal(output(0.5, False), output(0.0, False))
    assert same == (part == "shared_experts")  # the launch-day release: routed experts only


def balance(ids: Tensor, scores: Tensor, documents: list[int] | None = None) -> Tensor:
    n = len(ids)
    ids_in = torch.zeros(1, n, dtype=torch.long)
    at = layer_layout(rows(ids_in, None if documents is None else torch.tensor([documents]), None, None), SPEC, 0)
    sent = expert_counts(ids[None], at.real, scores.shape[-1])
    return sequence_balance(scores[None], sent, at, ids.shape[-1])


def test_uniform_routing_is_worth_exactly_one_and_has_no_gradient() -> None:
    # invariant 26: whatever the scores
    ids = torch.arange(16).view(8, 2) % 8
    scores = (normal(8, 8).exp()).requires_grad_()
    value = balance(ids, scores)
    assert float(value.detach()) == pytest.approx(1.0, abs=1e-15)
    (grad,) = torch.autograd.grad(value, scores)
    assert float(grad.abs().max()) < 3e-13


def test_full_collapse_is_worth_experts_over_choices() -> None:
    # invariant 26: alpha E / k = 0.0426666 at E=256, k=6, alpha=1e-3
    scores = torch.zeros(12, 256, dtype=torch.float64)
    scores[:, :6] = normal(12, 6).exp()
    value = balance(torch.arange(6).expand(12, 6), scores)
    assert 1e-3 * float(value) == pytest.approx(0.0426666666, rel=1e-8)


def test_packed_documents_are_balanced_each_on_its_own() -> None:
    # section 6.1: per-document T, f and P
    scores, lengths = normal(15, 8).exp(), [4, 1, 10]
    ids = scores.topk(2).indices
    documents = [d for d, n in enumerate(lengths) for _ in range(n)]
    first, alone = 0, []
    for n in lengths:
        alone.append(balance(ids[first : first + n], scores[first : first + n]))
        first += n
    torch.testing.assert_close(balance(ids, scores, documents), torch.stack(alone).sum(), rtol=1e-12, atol=0)


def test_the_grouped_product_takes_every_shape_and_gradient() -> None:
    # experts without tokens, and widths that the fast kernel refuses
    for dtype, width in ((torch.float32, 64), (torch.float32, 6), (torch.float64, 64)):
        x, w = torch.randn(7, width, dtype=dtype), torch.randn(5, 8, width, dtype=dtype)
        ends = torch.tensor([0, 3, 3, 7, 7], dtype=torch.int32)
        x.requires_grad_(), w.requires_grad_()
        group = torch.tensor([1, 1, 1, 3, 3, 3, 3])
        plain = torch.stack([x[i] @ w[g].T for i, g in enumerate(group)])
        y = ops.grouped_mm(x, w, ends)
        torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(y.sum(), (x, w))  # a gradient of stride 0
        for a, b in zip(found, torch.autograd.grad(plain.sum(), (x, w)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_experts_give_a_row_per_token_in_the_order_of_the_tokens() -> None:
    module = Experts(SPEC)
    randomise(module)
    x = normal(6, 64).float()
    ids = torch.tensor([[7, 0], [0, 7], [3, 4], [7, 3], [0, 1], [2, 7]])
    weights = torch.rand(6, 2)
    out = module(x, Routing(ids, weights, torch.empty(0), torch.empty(0)), torch.float32)
    for t in range(6):
        mine = sum(
            formulas.expert(x[t], module.w13[e], module.w2[e], SPEC.swiglu_limit, weights[t, i])
            for i, e in enumerate(ids[t].tolist())
        )
        torch.testing.assert_close(out[t], mine, rtol=1e-4, atol=1e-5)
