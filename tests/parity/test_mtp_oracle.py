"""The MTP layer, which transformers does not have: its loss against section 7 written out, and what it may depend on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4c import DeepseekV4
from dsv4c.model.layout import layer_layout, rows
from tests.parity.models import Batch, distance, tiny, tokens


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    return tiny(indexer_kl_coef=0.0).double()


@pytest.fixture
def batch() -> Batch:
    return tokens(19)


def rms_w(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def last_streams(model: DeepseekV4, batch: Batch) -> Tensor:
    """X [B,S,n,D] after the last decoder layer, before HChead."""
    seen = []
    hook = model.layers[-1].register_forward_hook(lambda _m, _a, out: seen.append(out[0]))
    model(*batch)
    hook.remove()
    return seen[0]


def mtp_loss(model: DeepseekV4, batch: Batch, **more: Tensor) -> Tensor:
    return model(*batch, **more).metrics["mtp"]


def test_loss_is_that_of_section_7(model, batch):
    """``Y_t[j] = e_proj RMS(Emb[id_t+1]) + h_proj RMS(X_t[j])``, a block, HChead, norm, head; CE with id_t+2, t <= S-3."""
    (layer,) = model.mtp
    ids, targets = batch.input_ids, batch.targets
    streams, n = last_streams(model, batch), model.config.hc_mult
    following = torch.cat((ids[:, 1:], torch.zeros(2, 1).long()), 1)
    embedded = rms_w(model.embed.weight[following], layer.enorm.weight) @ layer.e_proj.weight.T
    mixed = embedded[:, :, None] + rms_w(streams, layer.hnorm.weight) @ layer.h_proj.weight.T
    at = layer_layout(rows(ids, None, None, None), model.config, 0)
    y, _ = layer.body(mixed, following, at, False, False)
    flat = y.flatten(2)
    z = flat @ layer.hc_head.fn.T / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    weights = torch.sigmoid(z * layer.hc_head.scale + layer.hc_head.base) + 1e-6
    hidden = sum(weights[..., j, None] * y[..., j, :] for j in range(n))
    logits = rms_w(hidden, layer.norm.weight) @ model.head.weight.T
    # Only ids of the row itself: position t predicts targets[t+1], and the last one has no next token to stand on.
    written = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    assert distance(mtp_loss(model, batch), written) < 1e-12


def test_with_e_proj_zero_and_h_proj_one_the_input_is_the_normed_streams(batch):
    """Invariant 29."""
    model = tiny().double()
    (layer,) = model.mtp
    with torch.no_grad():
        layer.e_proj.weight.zero_()
        layer.h_proj.weight.copy_(torch.eye(64))
        layer.hnorm.weight.fill_(1.0)
    streams = last_streams(model, batch)
    combined = layer.combine(streams, model.embed(batch.input_ids))
    assert distance(combined, rms_w(streams, torch.ones(64).double())) < 1e-12


def test_a_coefficient_of_zero_removes_every_gradient_of_the_layer(batch):
    """Invariant 29."""
    model = tiny(mtp_loss_coef=0.0)
    out = model(*batch)
    sum(out.losses.values()).backward()
    assert "mtp" not in out.losses and "mtp" not in out.metrics
    assert all(p.grad is None for p in model.mtp.parameters())
    assert model.embed.weight.grad.any()


def test_gradient_flows_into_trunk_embedding_and_head_but_not_into_the_main_output(model, batch):
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = model(*batch).losses["mtp"]
    found = torch.autograd.grad(loss, [p.requires_grad_() for p in parameters], allow_unused=True)
    reached = {n for n, g in zip(names, found, strict=True) if g is not None and g.any()}
    untouched = {n for n in names if n not in reached}
    assert untouched == {n for n in names if ".indexer." in n or n.startswith(("hc_head.", "norm."))}


def test_the_first_target_and_the_first_token_alone_are_nobodys_second_next(model, batch):
    other = batch.targets.clone()
    other[:, 0] = (other[:, 0] + 1) % 96
    assert torch.equal(mtp_loss(model, batch._replace(targets=other)), mtp_loss(model, batch))
    other[:, 1] = (other[:, 1] + 1) % 96
    assert not torch.equal(mtp_loss(model, batch._replace(targets=other)), mtp_loss(model, batch))


def test_a_constant_added_to_all_positions_changes_nothing(batch):
    """Position t or t+1, it does not matter: windows see differences only (invariant 10)."""
    model = tiny(compress_ratios=(0, 0, 0, 0, 0, 0), indexer_kl_coef=0.0).double()
    there = torch.arange(19).expand(2, -1)
    moved = mtp_loss(model, batch, position_ids=there + 7)
    # Tables are fp32: angles of moved positions are rounded elsewhere.
    assert distance(moved, mtp_loss(model, batch, position_ids=there)) < 1e-6


def test_a_token_without_a_next_one_in_its_document_predicts_nothing(model, batch):
    """Two documents in a row have one prediction fewer than one, and each its own."""
    documents = (torch.arange(19) >= 8).long().expand(2, -1)
    together = mtp_loss(model, batch._replace(document_ids=documents))
    pieces = [Batch(batch.input_ids[:, s], batch.targets[:, s]) for s in (slice(0, 8), slice(8, 19))]
    apart = [mtp_loss(model, piece) for piece in pieces]
    assert distance(together, (7 * apart[0] + 10 * apart[1]) / 17) < 1e-12
