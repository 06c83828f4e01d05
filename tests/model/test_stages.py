"""Training stages: what is frozen, which objectives exist, what is attended to."""

from __future__ import annotations

import pytest
import torch

from dsv4c import DeepseekV4
from dsv4c.errors import ConfigError
from tests.model import formulas
from tests.model.conftest import SPEC, batch, build, gradients, largest_difference, one_layer, reached, total

N = 26  # six entries, three selected


def staged(stage: str, **changes: object) -> DeepseekV4:
    model = build(SPEC.replace(**changes))
    model.set_stage(stage)
    return model


def frozen(model: DeepseekV4) -> set[str]:
    return {n for n, p in model.named_parameters() if not p.requires_grad}


def indexer(model: DeepseekV4) -> set[str]:
    return {n for n, _ in model.named_parameters() if ".indexer." in n}


def test_the_dense_stage_ignores_the_indexer() -> None:
    model = staged("dense")
    ids, targets = batch(N)
    out = model(ids, targets=targets)
    assert tuple(out.losses) == model.objectives == ("lm", "mtp", "seq_balance")
    assert frozen(model) == indexer(model)
    assert "captured_mass" not in out.metrics
    with torch.no_grad():
        for name in indexer(model):
            model.get_parameter(name).fill_(float("nan"))
    assert all(torch.equal(out.losses[n], loss) for n, loss in model(ids, targets=targets).losses.items())


def test_the_dense_stage_attends_to_every_visible_entry() -> None:
    model = staged("dense")
    everything = build(SPEC.replace(index_topk=None))
    ids, _ = batch(N)
    assert torch.equal(model(ids).logits, everything(ids).logits)
    assert not torch.equal(model(ids).logits, build()(ids).logits)


def test_the_warm_up_trains_the_indexer_alone() -> None:
    model = staged("indexer_warmup")
    ids, targets = batch(N)
    out = model(ids, targets=targets)
    assert frozen(model) == set(dict(model.named_parameters())) - indexer(model)
    assert model.objectives == tuple(out.losses) == SPEC.objectives
    assert reached(gradients(model, total(out))) == indexer(model)
    assert not out.losses["lm"].requires_grad


def test_the_warm_up_distils_over_all_visible_entries() -> None:
    # section 5.1: dense target over every visible entry, against loops
    model = build(one_layer("csa")).double()
    model.set_stage("indexer_warmup")
    ids, targets = batch(N, rows=1)
    _, expected = formulas.forward(model, ids[0], targets[0], dense=True)
    found = model(ids, targets=targets).losses["indexer_kl"]
    torch.testing.assert_close(found, expected["indexer_kl"], rtol=1e-10, atol=0)
    assert largest_difference(gradients(model, found), gradients(model, expected["indexer_kl"])) < 1e-8
    model.set_stage("sparse")
    sparse = model(ids, targets=targets).losses["indexer_kl"]
    assert abs(float(sparse.detach()) / float(found.detach()) - 1) > 1e-3


def test_the_warm_up_computes_the_dense_function() -> None:
    warm, dense = staged("indexer_warmup"), staged("dense")
    ids, targets = batch(N)
    assert torch.equal(warm(ids).logits, dense(ids).logits)
    assert torch.equal(warm(ids, targets=targets).losses["lm"], dense(ids, targets=targets).losses["lm"])


def test_the_sparse_stage_trains_everything() -> None:
    model = staged("sparse")
    ids, targets = batch(N)
    out = model(ids, targets=targets)
    assert not frozen(model)
    assert tuple(out.losses) == SPEC.objectives
    assert 0 < float(out.metrics["captured_mass"]) < 1
    assert reached(gradients(model, total(out))) == set(dict(model.named_parameters()))


def test_stages_may_follow_each_other_in_one_run() -> None:
    model, fresh = build(), build()
    for stage in ("dense", "indexer_warmup", "sparse"):
        model.set_stage(stage)
    ids, targets = batch(N)
    assert torch.equal(model(ids).logits, fresh(ids).logits)
    assert not frozen(model)
    assert torch.equal(total(model(ids, targets=targets)), total(fresh(ids, targets=targets)))


def test_without_the_objective_the_indexer_stays_frozen_and_the_warm_up_is_refused() -> None:
    model = staged("sparse", indexer_kl_coef=0.0)
    assert frozen(model) == indexer(model)
    with pytest.raises(ConfigError, match="indexer_kl_coef"):
        model.set_stage("indexer_warmup")
    with pytest.raises(ConfigError, match="no training stage"):
        model.set_stage("warm")
    assert model.stage == "sparse"


def test_recomputation_of_layers_that_do_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.\.5"):
        build().set_recompute([6])
    with pytest.raises(ConfigError, match="off, all"):
        build().set_recompute("some")
