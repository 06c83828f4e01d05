"""What the indexer is taught: both targets, the divergence, and rows without entries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4c import ops
from tests.model.conftest import batch, build, gradients, largest_difference, one_layer

ALL = torch.ones(1, 1, dtype=torch.bool)
pytestmark = pytest.mark.usefixtures("both")


def target(mass: Tensor, lse: Tensor | None, ids: Tensor | None = None) -> Tensor:
    """The teacher of one query whose logits are log(mass) [H,P]; lse [H]."""
    heads, n = mass.shape
    ids = torch.arange(n)[None, None] if ids is None else ids
    # the query is the last of n tokens with a window each; entries are unit vectors, so <q_h, entry_p> = log mass
    q = torch.zeros(1, n, heads, n, dtype=torch.float64)
    q[0, -1] = mass.log()
    entries = torch.eye(n, dtype=torch.float64)[None]
    ids = ids.expand(1, n, -1).contiguous()
    joint = None if lse is None else lse.expand(1, n, heads).contiguous()
    return ops.indexer_kl_target(q, entries, ids, joint, 1.0, 1)[0, -1]


def divergence(t: Tensor, scores: Tensor) -> Tensor:
    return ops.indexer_kl(t.view(1, 1, -1), scores.view(1, 1, -1), ALL)[0]


def test_a_head_counts_by_the_mass_that_its_joint_softmax_puts_on_entries() -> None:
    # B21: (0.81, 0.12) / 0.93 and KL 0.308604; normalising each head first gives 0.024899
    mass = torch.tensor([[0.8, 0.1], [0.01, 0.02]], dtype=torch.float64)
    joint = target(mass, torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(joint, torch.tensor([0.870968, 0.129032]).double(), rtol=0, atol=1e-6)
    assert float(divergence(joint, torch.zeros(2).double())) == pytest.approx(0.308604, abs=1e-6)
    selected = target(mass, None)
    torch.testing.assert_close(selected, torch.tensor([0.611111, 0.388889]).double(), rtol=0, atol=1e-6)
    assert float(divergence(selected, torch.zeros(2).double())) == pytest.approx(0.024899, abs=1e-6)


def test_both_targets_agree_for_one_head() -> None:
    # invariant 23
    mass = torch.tensor([[0.2, 0.05, 0.4]], dtype=torch.float64)
    torch.testing.assert_close(target(mass, torch.tensor([0.7]).double()), target(mass, None), rtol=1e-13, atol=0)


def test_both_targets_agree_where_all_mass_is_on_the_entries() -> None:
    # invariant 23: no window, no sink
    mass = torch.tensor([[0.2, 0.05, 0.4], [3.0, 0.1, 0.7]], dtype=torch.float64)
    torch.testing.assert_close(target(mass, mass.sum(-1).log()), target(mass, None), rtol=1e-13, atol=0)


def test_more_window_mass_lowers_the_share_of_that_head_in_the_joint_target_only() -> None:
    # invariant 23
    mass = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    before = target(mass, torch.zeros(2).double())
    after = target(mass, torch.tensor([2.0, 0.0]).double())  # head 0 looks at its window
    assert float(before[0]) == pytest.approx(0.5) and float(after[0]) < 0.2
    torch.testing.assert_close(target(mass, None), before, rtol=1e-13, atol=0)


def test_a_tiny_mass_is_still_normalised() -> None:
    # section 5.1: the floor is the smallest fp32 number
    mass = torch.tensor([[2e-9, 1e-9], [1e-9, 1e-9]], dtype=torch.float64)
    found = target(mass, torch.zeros(2).double())
    torch.testing.assert_close(found, torch.tensor([0.6, 0.4], dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_target_is_normalised_over_the_selected_entries_only() -> None:
    mass = torch.tensor([[0.5, 0.1, 0.3]], dtype=torch.float64)
    found = target(mass, torch.zeros(1).double(), torch.tensor([[[2, -1, 1]]]))
    torch.testing.assert_close(found, torch.tensor([0.75, 0.0, 0.25]).double(), rtol=1e-12, atol=1e-15)


def test_the_divergence_is_positive_and_zero_at_the_teacher() -> None:
    # invariant 22: scores = log T + const
    t = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    assert abs(float(divergence(t, t.log() + 5.0))) < 1e-9
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        assert float(divergence(t, torch.randn(3, dtype=torch.float64, generator=generator))) > 0


def test_the_gradient_is_student_minus_teacher() -> None:
    # invariant 22
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 7, 5, dtype=torch.float64, generator=generator).requires_grad_()
    t = torch.randn(2, 7, 5, dtype=torch.float64, generator=generator).softmax(-1)
    loss = ops.indexer_kl(t, scores, torch.ones(2, 7, dtype=torch.bool))[0] / 14
    (grad,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(grad, (scores.softmax(-1) - t).detach() / 14, rtol=0, atol=1e-9)
    assert float(grad.sum(-1).abs().max()) < 1e-12


def test_rows_without_entries_and_padding_give_zero_and_no_nan() -> None:
    # invariant 23
    scores = torch.tensor([[[-math.inf, -math.inf], [0.3, -math.inf], [0.1, 0.9]]], requires_grad=True)
    t = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.8, 0.2]]])
    loss, _ = ops.indexer_kl(t, scores, torch.tensor([[True, True, False]]))
    (grad,) = torch.autograd.grad(loss, scores)
    assert abs(float(loss.detach())) < 1e-6  # the one row left has one entry, which the student cannot miss
    assert bool(grad.isfinite().all()) and float(grad.abs().max()) < 1e-6


def test_the_target_has_no_nan_where_no_entry_was_selected() -> None:
    # invariant 23
    q, entries = torch.randn(1, 8, 2, 4), torch.randn(1, 2, 4)
    none = torch.full((1, 8, 2), -1)
    for lse in (None, torch.zeros(1, 8, 2)):
        assert not bool(ops.indexer_kl_target(q, entries, none, lse, 1.0, 4).any())


@pytest.mark.parametrize("kind", ["joint", "selected"])
def test_the_model_is_taught_by_the_target_of_its_configuration(kind: str) -> None:
    # section 5.1 for a whole layer, loss and gradient, against loops
    from tests.model import formulas

    model = build(one_layer("csa", indexer_kl_target=kind)).double()
    ids, targets = batch(19, rows=1)
    _, expected = formulas.forward(model, ids[0], targets[0])
    found = model(ids, targets=targets).losses["indexer_kl"]
    torch.testing.assert_close(found, expected["indexer_kl"], rtol=1e-10, atol=0)
    assert largest_difference(gradients(model, found), gradients(model, expected["indexer_kl"])) < 1e-8


def test_the_sink_takes_part_in_the_joint_target_only() -> None:
    # invariant 23: one head's sink at +8 silences that head in the joint target
    ids, targets = batch(19, rows=1)
    for kind, changes in (("joint", True), ("selected", False)):
        model = build(one_layer("csa", indexer_kl_target=kind))
        before = model(ids, targets=targets).losses["indexer_kl"]
        with torch.no_grad():
            model.layers[0].attn.attn_sink[0] += 8.0
        after = model(ids, targets=targets).losses["indexer_kl"]
        assert (abs(float((after - before).detach())) > 1e-5) == changes


def test_queries_without_entries_stay_in_the_denominator() -> None:
    # section 5.1: mean over all B*S query rows; the first three rows of a document contribute 0
    model = build(one_layer("csa", index_topk=None)).double()
    ids, targets = batch(4, rows=1)
    longer, longer_targets = batch(6, rows=1)
    short = model(ids, targets=targets).metrics["indexer_kl"]
    assert float(short) == pytest.approx(0.0, abs=1e-9)  # one entry: the student cannot be wrong
    many = model(longer, targets=longer_targets)
    assert float(many.metrics["indexer_kl"]) == pytest.approx(0.0, abs=1e-9)


def test_without_any_entry_the_objective_is_present_and_zero() -> None:
    model = build(one_layer("csa"))
    ids, targets = batch(3)
    out = model(ids, targets=targets)
    assert float(out.losses["indexer_kl"]) == 0.0
