"""``torch.compile(model, backend="dsv4c")``: found by its name, it proves, fuses and trains; what it refuses says why."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ModelConfig, compile_model, ops
from dsv4c.compile.backend import Backend, Region
from dsv4c.errors import ConfigError, FusionError, VerifyError
from dsv4c.model.attention import Attention
from dsv4c.passes.base import Record
from dsv4c.passes.manager import PIPELINE, Passes
from dsv4c.torch_compat import inductor_settings, prepare_compiler, reset_compiler
from dsv4c.train.optim import OptimConfig, build_optimizer
from tests.passes.verify.mutation import mutated

SEQ_LEN = 40


@pytest.fixture(autouse=True)
def _fresh_compiler():
    reset_compiler()
    yield
    reset_compiler()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the passes log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("dsv4c.passes")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(before)


def batches(n: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 300, (2, SEQ_LEN + 1), generator=g) for _ in range(n)]
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def one_layer(passes: Passes, **changes: object) -> tuple[DeepseekV4, Backend]:
    """A CSA layer and the head; the layer is the first region."""
    settings = {"num_hidden_layers": 1, "compress_ratios": (4,), "num_hash_layers": 0, "num_nextn_predict_layers": 0}
    torch.manual_seed(0)
    model = compile_model(DeepseekV4(ModelConfig.preset("tiny", index_topk=3, **settings, **changes)), passes=passes)
    return model, model.compiler


def test_by_its_name_it_trains_the_tiny_model_to_the_losses_of_the_eager_one() -> None:
    prepare_compiler()
    runs = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = DeepseekV4(ModelConfig.preset("tiny", index_topk=4))
        optimizer = build_optimizer(model, OptimConfig(lr=1e-3))
        forward = torch.compile(model, backend="dsv4c", fullgraph=True) if is_compiled else model
        losses = []
        for ids, targets in batches(20):
            out = forward(ids, targets)
            loss = torch.stack(list(out.losses.values())).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.update_router_bias(out.metrics["expert_load"])
            losses.append(float(loss.detach()))
        runs.append(losses)
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)


def test_a_graph_that_breaks_a_rule_is_not_compiled_and_its_line_is_named() -> None:
    with mutated(Attention.forward, ("q.detach(), entries.detach()", "q, entries.detach()")):
        model, _ = one_layer(Passes())
        model(*batches(1)[0])  # the teacher has no gradient: this one is right
    reset_compiler()
    with mutated(Attention.project, ("inverse=True", "inverse=False")):
        model, compiler = one_layer(Passes(until="verify"))
        with pytest.raises(Exception, match="rotation") as error:
            model(*batches(1)[0])
    assert isinstance(error.value.inner_exception, VerifyError)
    assert "attention.py:" in str(error.value)
    assert not compiler.regions


def test_a_chain_that_one_argument_keeps_from_matching_stops_the_compilation() -> None:
    with mutated(Attention.project, ("inverse=True", "inverse=False")):
        model, _ = one_layer(Passes(only=("derotation",)))
        with pytest.raises(Exception, match="derotation") as error:
            model(*batches(1)[0])
    text = str(error.value)
    assert isinstance(error.value.inner_exception, FusionError)
    assert "should match dsv4.sparse_attention and does not" in text
    assert "nearest: rope" in text
    assert "argument 'inverse': True was expected and False was found" in text
    assert "skip='derotation'" in text


def test_passes_are_numbered_and_say_what_they_matched(logged: list[str]) -> None:
    with inductor_settings(force_disable_caches=True):
        model, compiler = one_layer(Passes(only=("verify", "derotation", "distillation")))
        model(*batches(1)[0])
    region, head = compiler.regions
    assert (region.name, head.name) == ("csa-learned", "HyperHead")
    assert [r.name for r in region.records] == ["verify", "derotation", "distillation"]
    assert region.records[1].matches == {"forward": 1, "backward": 1}
    assert region.records[1].operators["dsv4.sparse_attention_derotated"] == 1
    assert [r.number for r in region.records] == [1, 2, 3]
    assert "  2  csa-learned/joint  derotation: 1 forward, 1 backward" in "\n".join(logged)
    assert region.rules
    assert not region.cached


@pytest.mark.parametrize("given", [{"only": ("derotate",)}, {"skip": ("verfy",)}, {"until": "fuse"}])
def test_a_pass_that_there_is_not_is_refused_before_anything_is_compiled(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="there is no pass") as error:
        compile_model(DeepseekV4(ModelConfig.preset("tiny")), passes=Passes(**given))
    assert all(p.name in str(error.value) for p in PIPELINE)


def test_a_region_says_on_how_many_places_its_verdict_stands_and_that_there_is_none() -> None:
    verified = Record(1, "csa", "joint", "verify", "verify", 0.1, {"rotation": 8, "scales": 15}, {})
    fused = Record(2, "csa", "joint", "derotation", "fuse", 0.1, {"forward": 1, "backward": 1}, {})
    assert str(Region("csa", "0123", ("rotation", "scales"), False, (verified, fused))) == (
        "csa: 2 rules hold at 23 places; derotation 1x"
    )
    assert str(Region("csa", "0123", ("rotation",), True, ())) == "csa: in the cache, proved there by 1 rules, identity 0123"
    assert str(Region("csa", "0123", (), False, (fused,))) == "csa: NOT verified; derotation 1x"


def test_only_skip_and_until_choose_among_the_passes() -> None:
    names = [p.name for p in PIPELINE]
    assert [p.name for p in Passes().chosen()] == names
    assert [p.name for p in Passes(until="derotation").chosen()] == ["verify", "derotation"]
    assert [p.name for p in Passes(skip=("verify",)).chosen()] == names[1:]
    assert not Passes(only=("derotation",)).verifies


def test_to_compile_without_passes_has_to_be_asked_for_and_is_said(logged: list[str]) -> None:
    compile_model(DeepseekV4(ModelConfig.preset("tiny")), passes="off")
    assert "nothing is verified" in "\n".join(logged)
    with pytest.raises(ConfigError, match="there are no passes 'none'"):
        compile_model(DeepseekV4(ModelConfig.preset("tiny")), passes="none")


def test_no_operator_of_the_references_is_fused_and_none_is_missed() -> None:
    """On the references a graph has none of the operators that chains begin with: nothing fires, and nothing has to."""
    with ops.use_reference():
        model, compiler = one_layer(Passes(only=("derotation", "indexer-scaling", "distillation", "hyper-connections")))
        model(*batches(1)[0])
    assert not any(n for r in compiler.regions[0].records for n in r.matches.values())
