"""The multi-token prediction layer: which token it reads, which it predicts, and what its loss is divided by."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4
from dsv4c.model.layout import rows
from dsv4c.model.objectives import count, has_next, lm_targets, mtp_targets
from tests.model.conftest import SPEC, batch, build, gradients, reached


def targets_of(ids: Tensor, **kwargs: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Main and depth-1 targets of a batch whose targets are its ids shifted once."""
    targets = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)
    at = rows(ids, kwargs.get("document_ids"), kwargs.get("padding_mask"), None)
    return lm_targets(targets, at).tolist(), mtp_targets(targets, at).tolist()


def test_the_target_is_the_token_after_the_next_without_wrapping_around() -> None:
    # B18
    main, ahead = targets_of(torch.tensor([[10, 11, 12, 13, 14]]))
    assert main == [[11, 12, 13, 14, -100]]
    assert ahead == [[12, 13, 14, -100, -100]]


def test_a_target_never_comes_from_another_document() -> None:
    ids, documents = torch.arange(10, 17)[None], torch.tensor([[0, 0, 0, 0, 1, 1, 2]])
    _, ahead = targets_of(ids, document_ids=documents)
    # position 2 predicts the target of position 3, whatever the caller put there; 3, 5 and 6 have no next token
    assert ahead == [[12, 13, 14, -100, 16, -100, -100]]
    at = rows(ids, documents, None, None)
    assert has_next(at).tolist() == [[True, True, True, False, True, False, False]]


def test_padding_has_no_target() -> None:
    mask = torch.tensor([[False, True, True, True, True, False]])
    main, ahead = targets_of(torch.arange(10, 16)[None], padding_mask=mask)
    assert main == [[-100, 12, 13, 14, 15, -100]]
    assert ahead == [[-100, 13, 14, 15, -100, -100]]


def test_counts_are_those_of_the_batch() -> None:
    ids = torch.zeros(2, 7, dtype=torch.long)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2], [3] * 7])
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False
    targets = torch.ones(2, 7, dtype=torch.long)
    targets[0, 3] = -100
    n = count(targets, rows(ids, documents, mask, None))
    # row 0: MTP positions 0, 1, 4 (position 2 would predict the target that is missing); row 1: 4 of 5 tokens
    assert [float(v) for v in n] == [6 + 5, 3 + 4, 4, 3, 12]


def test_both_means_are_over_their_own_tokens() -> None:
    # B24: 8 tokens, 7 and 6 valid targets, uniform logits over 16 words: both losses are ln 16
    model = DeepseekV4(SPEC.replace(vocab_size=16, mtp_loss_coef=0.5))
    torch.nn.init.zeros_(model.head.weight)
    ids = torch.arange(8)[None]
    out = model(ids, targets=torch.cat((ids[:, 1:], torch.tensor([[-100]])), 1))
    assert float(out.losses["lm"].detach()) == pytest.approx(2.772589, abs=1e-6)
    assert float(out.losses["mtp"].detach()) == pytest.approx(0.5 * 2.772589, abs=1e-6)
    assert float(out.metrics["mtp"]) == pytest.approx(math.log(16), abs=1e-6)


def test_accumulated_micro_batches_train_the_mtp_projection_as_one_batch() -> None:
    # B23: M = 4 against M = 1; two models in one process do not share a scale
    ids, targets = batch(9, rows=4)
    model, other = build().double(), build(SPEC.replace(mtp_loss_coef=0.7)).double()
    counts = count(targets, rows(ids, None, None, None))
    whole = gradients(model, model(ids, targets=targets).losses["mtp"])["mtp.0.e_proj.weight"]
    other(ids, targets=targets)
    parts = [model(i[None], targets=t[None], counts=counts) for i, t in zip(ids, targets, strict=True)]
    summed = gradients(model, torch.stack([p.losses["mtp"] for p in parts]).sum())["mtp.0.e_proj.weight"]
    assert whole is not None and summed is not None
    torch.testing.assert_close(summed, whole, rtol=1e-9, atol=1e-14)


def test_neutral_projections_hand_the_normed_streams_to_the_block() -> None:
    # invariant 29
    layer = build().double().mtp[0]
    with torch.no_grad():
        layer.e_proj.weight.zero_()
        layer.h_proj.weight.copy_(torch.eye(64))
        layer.hnorm.weight.fill_(1.0)
    streams = torch.randn(2, 5, 4, 64, dtype=torch.float64)
    combined = layer.combine(streams, torch.randn(2, 5, 64, dtype=torch.float64))
    expected = streams / (streams.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(combined, expected, rtol=1e-12, atol=1e-14)


def test_the_layer_reads_the_streams_before_they_are_collapsed_and_the_next_embedding() -> None:
    # section 7: position t reads the embedding of token t+1
    model = build()
    seen: list[tuple[Tensor, Tensor]] = []
    layer = model.mtp[0]
    original = layer.combine
    layer.combine = lambda streams, e: (seen.append((streams, e)), original(streams, e))[1]
    ids, targets = batch(7)
    model(ids, targets=targets)
    (streams, next_embedding) = seen[0]
    assert streams.shape == (2, 7, 4, 64)
    assert torch.equal(next_embedding[:, :-1], model.embed.weight[ids[:, 1:]])


def test_hash_routing_would_read_the_shifted_ids() -> None:
    # section 7: Block_mtp(Y, ids shifted by one); seen by the router that the layer has
    model = build()
    seen: list[Tensor] = []
    model.mtp[0].ffn.gate.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    ids, targets = batch(7)
    model(ids, targets=targets)
    assert torch.equal(seen[0].view(2, 7)[:, :-1], ids[:, 1:])


def test_without_a_weight_the_layer_gets_no_gradient_and_with_one_the_trunk_does() -> None:
    # invariant 29
    ids, targets = batch(9)
    off = build(SPEC.replace(mtp_loss_coef=0.0))
    losses = off(ids, targets=targets).losses
    assert "mtp" not in losses
    assert not any(n.startswith("mtp.") for n in reached(gradients(off, torch.stack(list(losses.values())).sum())))
    on = build()
    touched = reached(gradients(on, on(ids, targets=targets).losses["mtp"]))
    assert {"embed.weight", "head.weight", "layers.0.attn.wkv.weight", "mtp.0.e_proj.weight"} <= touched
    assert not {"norm.weight", "hc_head.fn"} & touched


def test_the_loss_is_in_proportion_to_its_coefficient() -> None:
    ids, targets = batch(9)
    small, large = (build(SPEC.replace(mtp_loss_coef=c))(ids, targets=targets) for c in (0.25, 1.0))
    assert torch.equal(small.losses["mtp"] * 4, large.losses["mtp"])
    assert torch.equal(small.losses["lm"], large.losses["lm"])
