"""The table of names and shapes against the published counts and against the models themselves."""

from __future__ import annotations

from math import prod

import pytest
import torch

from dsv4c.config import ModelConfig
from dsv4c.model.transformer import DeepseekV4
from dsv4c.weights.keymap import MARKS, entries, tensors
from dsv4c.weights.write import plan


def parameters(name: str, *, mtp: bool) -> int:
    """Parameters of a preset without the tables of hash routers, which the specification's totals leave out."""
    wanted = (t for t in tensors(ModelConfig.preset(name)) if t.storage != "int64" and (mtp or t.name[:3] != "mtp"))
    return sum(prod(t.shape) for t in wanted)


def test_the_parameter_totals_are_those_of_the_specification() -> None:  # invariant 30
    assert (parameters("flash", mtp=False), parameters("flash", mtp=True)) == (284_332_240_471, 290_942_289_362)
    assert (parameters("pro", mtp=False), parameters("pro", mtp=True)) == (1_572_997_201_763, 1_598_837_347_742)


def test_the_released_layout_stores_as_many_tensors_and_elements_as_was_published() -> None:  # invariant 30
    pro = plan(ModelConfig.preset("pro"), "released", "released", lambda entry: torch.bfloat16)
    assert len(pro) == 145_116
    assert sum(prod(p.shape) for p in pro) == 861_608_274_846
    flash = plan(ModelConfig.preset("flash"), "released", "released", lambda entry: torch.bfloat16)
    assert len(flash) == 69_187
    assert len({p.key for p in flash}) == len(flash)


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_the_table_names_every_tensor_of_our_model_in_its_shape(preset: str) -> None:
    with torch.device("meta"):
        state = DeepseekV4(ModelConfig.preset(preset)).state_dict()
    assert {t.name: t.shape for t in tensors(ModelConfig.preset(preset))} == {k: tuple(v.shape) for k, v in state.items()}


def test_the_table_names_every_tensor_of_transformers_model_in_its_shape(config: ModelConfig) -> None:
    transformers = pytest.importorskip("transformers")
    from dsv4c.config_layouts import write_hf

    with torch.device("meta"):
        state = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**write_hf(config))).state_dict()
    ours = {e.key: e.shape for e in entries(config, "hf") if not e.key.startswith("mtp.")}
    assert ours == {k: tuple(v.shape) for k, v in state.items()}


@pytest.mark.parametrize("layout", MARKS)
def test_the_parts_of_every_key_tile_it_and_the_parts_of_every_tensor_tile_that(config: ModelConfig, layout: str) -> None:
    seen = {t.name: torch.zeros(t.shape, dtype=torch.int8) for t in tensors(config)}
    for entry in entries(config, layout):  # type: ignore[arg-type]  # the parameter comes from MARKS
        key = torch.zeros(entry.shape, dtype=torch.int8)
        for part in entry.parts:
            name, select = part.place("dsv4c")
            assert part.place(layout)[0] == entry.key  # type: ignore[arg-type]
            assert seen[name][select].shape == key[part.place(layout)[1]].shape == part.shape  # type: ignore[arg-type]
            seen[name][select] += 1
            key[part.place(layout)[1]] += 1  # type: ignore[arg-type]
        assert bool((key == 1).all())
    assert all(bool((count == 1).all()) for count in seen.values())


def test_gate_rows_come_before_up_rows(config: ModelConfig) -> None:
    (w13,) = (t for t in tensors(config) if t.name == "layers.0.ffn.experts.w13")
    first, second = w13.parts[2], w13.parts[3]
    assert first.place("released") == ("layers.0.ffn.experts.1.w1.weight", ())
    assert first.place("dsv4c") == ("layers.0.ffn.experts.w13", (1, slice(0, 32)))
    assert second.place("released") == ("layers.0.ffn.experts.1.w3.weight", ())
    assert second.place("hf") == ("model.layers.0.mlp.experts.gate_up_proj", (1, slice(32, 64)))
