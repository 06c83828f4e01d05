"""The tables that say which optimizer a parameter belongs to and which matrices a tensor holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsv4c.train.assignment import Rule, matrix_rows, parameter_names, rule_for

SHAPES = {
    "hc_head.fn": (2, 16),
    "layers.0.hc_attn.fn": (8, 16),
    "layers.0.attn.wq_b.weight": (8, 4),
    "layers.0.attn.wo_a": (2, 3, 4),
    "layers.0.attn.compressor.wkv.weight": (8, 8),
    "layers.0.attn.compressor.norm.weight": (4,),
    "layers.1.attn.compressor.wkv.weight": (4, 8),
    "layers.1.attn.compressor.norm.weight": (4,),
    "layers.0.attn.indexer.compressor.wkv.weight": (4, 8),
    "layers.0.attn.indexer.compressor.norm.weight": (2,),
    "layers.0.ffn.experts.w13": (4, 12, 8),
    "layers.0.ffn.experts.w2": (4, 8, 6),
    "layers.0.ffn.shared_experts.w13.weight": (12, 8),
}
PARAMETERS = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("layers.0.ffn.experts.w13", (6, 6)),
        ("layers.0.ffn.shared_experts.w13.weight", (6, 6)),
        ("layers.0.ffn.experts.w2", None),
        ("layers.0.hc_attn.fn", (2, 2, 4)),
        ("hc_head.fn", None),
        ("layers.0.attn.compressor.wkv.weight", (4, 4)),
        ("layers.1.attn.compressor.wkv.weight", None),
        ("layers.0.attn.indexer.compressor.wkv.weight", (2, 2)),
        ("layers.0.attn.wo_a", None),
        ("layers.0.attn.wq_b.weight", None),
    ],
)
def test_tensors_that_hold_several_matrices_are_cut_into_them(name: str, rows: tuple[int, ...] | None) -> None:
    assert matrix_rows(name, PARAMETERS) == rows


def test_a_flat_output_projection_is_cut_into_its_groups() -> None:
    shapes = {"x.attn.wq_b.weight": (8, 4), "x.attn.wo_a.weight": (6, 4)}
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    assert matrix_rows("x.attn.wo_a.weight", params) == (3, 3)


@pytest.mark.parametrize(
    ("name", "shape", "algorithm"),
    [
        ("embed.weight", (4, 4), "adamw"),
        ("mtp.0.hnorm.weight", (4,), "adamw"),
        ("layers.3.hc_ffn.scale", (3,), "adamw"),
        ("layers.3.attn.attn_sink", (4,), "adamw"),
        ("layers.3.hc_ffn.fn", (24, 16), "muon"),
        ("layers.3.ffn.gate.weight", (4, 4), "muon"),
        ("layers.3.attn.compressor.ape", (4, 8), "muon"),
        ("layers.3.embed.weight", (4, 4), "muon"),
    ],
)
def test_the_first_rule_that_matches_decides_and_dimensions_decide_the_rest(
    name: str, shape: tuple[int, ...], algorithm: str
) -> None:
    assert rule_for(name, torch.zeros(shape)).algorithm == algorithm


def test_a_matrix_decays_and_a_vector_does_not() -> None:
    assert rule_for("x", torch.zeros(2, 2)) == Rule("x", "muon", True)
    assert rule_for("x", torch.zeros(2)) == Rule("x", "adamw", False)


def test_wrappers_of_the_compiler_do_not_show_in_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0] = torch.compile(model[0])  # type: ignore[assignment]  # wraps the module
    assert list(parameter_names(model)) == ["0.weight"]
