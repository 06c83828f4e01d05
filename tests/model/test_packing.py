"""Packed = alone, and padding is nothing: logits, losses, gradients, routing, for every layer kind."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dsv4c import DeepseekV4, ModelConfig
from dsv4c.model.moe import Gate
from dsv4c.model.objectives import Counts
from dsv4c.model.transformer import ModelOutput
from tests.model.conftest import (
    EXAMPLES,
    KINDS,
    SPEC,
    batch,
    build,
    gradients,
    largest_difference,
    one_layer,
    outputs,
)

CONFIGS = {f"{a}-{r}": one_layer(a, r, index_topk=2) for a in KINDS for r in ("learned", "hash")} | {"all": SPEC}
# no ratio divides these; some are shorter than a ratio, some are a single token
AWKWARD = [[9, 1, 3, 18, 2], [5, 13], [1, 1, 1], [3, 2, 11, 1]]


@functools.cache
def model_of(name: str) -> DeepseekV4:
    config: ModelConfig = CONFIGS[name]
    return build(config).double()


def counts_of(lengths: list[int]) -> Counts:
    """By hand: every token has a target; an MTP position needs a next token."""
    ahead = sum(n - 1 for n in lengths)
    values = (sum(lengths), ahead, len(lengths), sum(n > 1 for n in lengths), sum(lengths))
    return Counts(*(torch.tensor(float(v)) for v in values))


def documents_of(lengths: list[int]) -> Tensor:
    return torch.tensor([[d for d, n in enumerate(lengths) for _ in range(n)]])


def runs(model: DeepseekV4, lengths: list[int]) -> tuple[ModelOutput, list[ModelOutput], Tensor, Tensor]:
    """The packed row, its documents alone with the packed row's counts, and the ids and targets of the row."""
    ids, targets = batch(sum(lengths), rows=1)
    packed = model(ids, targets=targets, document_ids=documents_of(lengths))
    parts = zip(ids[0].split(lengths), targets[0].split(lengths), strict=True)
    alone = [model(i[None], targets=t[None], counts=counts_of(lengths)) for i, t in parts]
    return packed, alone, ids, targets


def assert_packed_is_alone(name: str, lengths: list[int], grads: bool = True) -> None:
    model = model_of(name)
    packed, alone, ids, _ = runs(model, lengths)
    for objective, loss in packed.losses.items():
        summed = torch.stack([a.losses[objective] for a in alone]).sum()
        torch.testing.assert_close(loss, summed, rtol=1e-7, atol=1e-12, msg=objective)
        if grads:
            assert largest_difference(gradients(model, loss), gradients(model, summed)) < 1e-5, objective
    load = torch.stack([a.metrics["expert_load"] for a in alone]).sum(0)
    assert torch.equal(packed.metrics["expert_load"], load)
    logits = model(ids, document_ids=documents_of(lengths)).logits[0]
    each = torch.cat([model(i[None]).logits[0] for i in ids[0].split(lengths)])
    torch.testing.assert_close(logits, each, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", AWKWARD, ids=str)
def test_packed_documents_are_as_if_alone(name: str, lengths: list[int]) -> None:
    # invariant 32
    assert_packed_is_alone(name, lengths)


@EXAMPLES
@given(lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5))
@example(lengths=[1])
@example(lengths=[1, 7, 1])
@example(lengths=[8, 8, 8])
@example(lengths=[3, 17])
def test_any_lengths_may_be_packed(lengths: list[int]) -> None:
    # invariant 32
    assert_packed_is_alone("all", lengths, grads=len(lengths) < 3)


def test_packed_documents_are_as_if_alone_in_fp32(tiny: DeepseekV4) -> None:
    # invariant 32: 1e-5 in single precision
    lengths = [9, 1, 3, 18, 2]
    packed, alone, ids, _ = runs(tiny, lengths)
    for objective, loss in packed.losses.items():
        torch.testing.assert_close(loss, torch.stack([a.losses[objective] for a in alone]).sum(), rtol=1e-5, atol=1e-6)
    logits = tiny(ids, document_ids=documents_of(lengths)).logits[0]
    each = torch.cat([tiny(i[None]).logits[0] for i in ids[0].split(lengths)])
    torch.testing.assert_close(logits, each, rtol=0, atol=1e-5)


def test_losses_of_a_packed_row_are_means_over_tokens_and_documents() -> None:
    # the weights written out, without the model's own counts
    model, lengths = model_of("all"), [9, 4, 18]
    ids, targets = batch(31, rows=1)
    packed = model(ids, targets=targets, document_ids=documents_of(lengths)).losses
    parts = zip(ids[0].split(lengths), targets[0].split(lengths), strict=True)
    alone = [model(i[None], targets=t[None]).losses for i, t in parts]
    weights = {
        "lm": [n / 31 for n in lengths],
        "mtp": [(n - 1) / 28 for n in lengths],
        "seq_balance": [1 / 3] * 3,
        "indexer_kl": [n / 31 for n in lengths],
    }
    for name, loss in packed.items():
        expected = torch.stack([w * a[name] for w, a in zip(weights[name], alone, strict=True)]).sum()
        torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0, msg=name)


def test_documents_that_are_not_told_apart_do_see_each_other() -> None:
    # the property above can fail
    model, lengths = model_of("all"), [9, 22]
    ids, _ = batch(31, rows=1)
    together, apart = model(ids).logits, model(ids, document_ids=documents_of(lengths)).logits
    assert float((together[0, 9:] - apart[0, 9:]).detach().abs().amax(-1).min()) > 1e-3
    torch.testing.assert_close(together[0, :9], apart[0, :9], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("left", "right"), [(0, 5), (3, 0), (4, 7), (9, 1)])
def test_padding_changes_nothing_at_real_tokens(name: str, left: int, right: int) -> None:
    model, n = model_of(name), 19
    ids, targets = batch(n, rows=1)
    filler, filler_targets = batch(n + left + right, rows=1, seed=5)
    padded, padded_targets = filler.clone(), filler_targets.clone()
    real = slice(left, left + n)
    padded[:, real], padded_targets[:, real] = ids, targets
    mask = torch.zeros_like(padded, dtype=torch.bool)
    mask[:, real] = True

    logits = model(padded, padding_mask=mask).logits
    assert bool(logits.isfinite().all())
    torch.testing.assert_close(logits[:, real], model(ids).logits, rtol=0, atol=1e-9)
    found: list[ModelOutput] = []
    with_pads = outputs(model, Gate, lambda: found.append(model(padded, targets=padded_targets, padding_mask=mask)))
    without = outputs(model, Gate, lambda: found.append(model(ids, targets=targets)))
    one, two = found
    for objective, loss in two.losses.items():
        torch.testing.assert_close(one.losses[objective], loss, rtol=1e-7, atol=1e-12, msg=objective)
        assert largest_difference(gradients(model, one.losses[objective]), gradients(model, loss)) < 1e-5, objective
    assert torch.equal(one.metrics["expert_load"], two.metrics["expert_load"])
    for a, b in zip(with_pads[:-1], without[:-1], strict=True):
        assert torch.equal(a.ids[real], b.ids)
    assert torch.equal(with_pads[-1].ids[real][: n - 1], without[-1].ids[: n - 1])  # the MTP layer has one fewer
    for metric in set(two.metrics) - {"expert_load"}:
        torch.testing.assert_close(one.metrics[metric], two.metrics[metric], rtol=1e-7, atol=1e-12, msg=metric)


@EXAMPLES
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=2), lefts=st.lists(st.integers(0, 6), min_size=2, max_size=2)
)
def test_rows_of_a_batch_may_be_padded_on_either_side(lengths: list[int], lefts: list[int]) -> None:
    model = model_of("all")
    n = max(a + b for a, b in zip(lengths, lefts, strict=True)) + 2
    ids, targets = batch(n)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, (length, left) in enumerate(zip(lengths, lefts, strict=True)):
        mask[row, left : left + length] = True
    padded = model(ids, targets=targets, padding_mask=mask)
    alone = [
        model(ids[row, m][None], targets=targets[row, m][None], counts=counts_of(lengths)) for row, m in enumerate(mask)
    ]
    for name, loss in padded.losses.items():
        summed = torch.stack([a.losses[name] for a in alone]).sum()
        torch.testing.assert_close(loss, summed, rtol=1e-7, atol=1e-12, msg=name)


def test_packed_and_padded_together_are_still_as_if_alone() -> None:
    model, lengths = model_of("all"), [5, 13]
    ids, targets = batch(18 + 7, rows=1)
    documents = torch.tensor([[0] * 3 + [0] * 5 + [1] * 13 + [1] * 4])
    mask = torch.tensor([[False] * 3 + [True] * 18 + [False] * 4])
    packed = model(ids, targets=targets, document_ids=documents, padding_mask=mask)
    parts = zip(ids[0, 3:21].split(lengths), targets[0, 3:21].split(lengths), strict=True)
    alone = [model(i[None], targets=t[None], counts=counts_of(lengths)) for i, t in parts]
    for name, loss in packed.losses.items():
        summed = torch.stack([a.losses[name] for a in alone]).sum()
        torch.testing.assert_close(loss, summed, rtol=1e-7, atol=1e-12, msg=name)
        assert largest_difference(gradients(model, loss), gradients(model, summed)) < 1e-5, name


def test_a_batch_of_padding_alone_is_finite_and_counts_nothing(tiny: DeepseekV4) -> None:
    ids, targets = batch(9)
    out = tiny(ids, targets=targets, padding_mask=torch.zeros_like(ids, dtype=torch.bool))
    assert all(float(loss.detach()) == 0.0 for loss in out.losses.values())
    assert not bool(out.metrics["expert_load"].any())
    grads = gradients(tiny, torch.stack(list(out.losses.values())).sum())
    assert all(g is None or (bool(g.isfinite().all()) and not bool(g.any())) for g in grads.values())
