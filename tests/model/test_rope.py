"""Rotary embedding: which channels, which pairs, which table in which layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ModelConfig
from dsv4c.config import LayerKind
from dsv4c.model import layout as layout_module
from dsv4c.model.attention import Attention
from dsv4c.model.layout import layer_layout, rows
from dsv4c.model.rope import inverse_frequencies, rotate, tables
from tests.model import formulas
from tests.model.conftest import SPEC, batch, build, one_layer

FLASH = ModelConfig.preset("flash")


def turned(x: Tensor, positions: Tensor, inv: Tensor, inverse: bool = False) -> Tensor:
    cos, sin = tables(positions, inv)
    return rotate(x, cos, sin, inverse=inverse)


def test_neighbouring_channels_of_the_last_r_are_rotated() -> None:
    # B01, B17: values of the case; half-split pairs give -1.984111 first
    x = torch.tensor([[[7.0, -0.3, 1.0, 2.0, 3.0, 4.0]]])
    result = turned(x, torch.tensor([[1]]), torch.tensor([1.0, 0.01]))
    expected = torch.tensor([-1.142640, 1.922076, 2.959851, 4.029800])
    torch.testing.assert_close(result[0, 0, 2:], expected, rtol=0, atol=1e-6)
    assert torch.equal(result[..., :2], x[..., :2])


def test_plain_channels_are_copied_bit_for_bit() -> None:
    # invariant 6
    x = torch.randn(2, 5, 3, 32)
    result = turned(x, torch.arange(5).expand(2, 5), inverse_frequencies(SPEC, 4))
    assert torch.equal(result[..., :16], x[..., :16])
    assert not torch.equal(result[:, 1:, :, 16:], x[:, 1:, :, 16:])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 2e-6)])
def test_rotating_back_undoes_the_rotation_and_pairs_keep_their_length(dtype: torch.dtype, tolerance: float) -> None:
    # invariant 5; cos and sin are fp32, so that in fp64 cos^2 + sin^2 = 1 to fp32 precision
    x = torch.randn(1, 9, 32, dtype=dtype)
    at, inv = torch.arange(9)[None] * 1001, inverse_frequencies(SPEC, 0)
    forth = turned(x, at, inv)
    torch.testing.assert_close(turned(forth, at, inv, inverse=True), x, rtol=0, atol=tolerance * 5)
    lengths = [v[..., 16:].unflatten(-1, (-1, 2)).norm(dim=-1) for v in (x, forth)]
    torch.testing.assert_close(*lengths, rtol=0, atol=tolerance * 5)


def test_the_operator_is_exactly_orthogonal_with_an_fp64_table() -> None:
    # invariant 5
    x, angle = torch.randn(1, 9, 32, dtype=torch.float64), torch.randn(1, 9, 8, dtype=torch.float64)
    forth = rotate(x, angle.cos(), angle.sin())
    torch.testing.assert_close(rotate(forth, angle.cos(), angle.sin(), inverse=True), x, rtol=0, atol=2e-15)


def test_a_dot_product_depends_on_the_distance_alone() -> None:
    # invariant 5
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64)
    inv = torch.linspace(0.01, 1.0, 8, dtype=torch.float64)

    def dot(t: int, s: int) -> Tensor:
        turns = [torch.tensor([[p]], dtype=torch.float64)[..., None] * inv for p in (t, s)]
        a, b = (rotate(v, angle.cos(), angle.sin()) for v, angle in zip((q, k), turns, strict=True))
        return (a * b).sum()

    torch.testing.assert_close(dot(5, 2), dot(1005, 1002), rtol=1e-11, atol=1e-12)
    assert abs(float(dot(5, 2) - dot(5, 3))) > 1e-3


@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (2, 1), (2, 6)])
def test_any_shape_is_rotated_without_touching_the_input(shape: tuple[int, int], width: int) -> None:
    # B50, B51: one token, or every channel rotated, leaves nothing to tell a copy from a view
    for heads in ((), (1,), (3,)):
        x = torch.randn(*shape, *heads, width, dtype=torch.float64)
        before, positions = x.clone(), torch.arange(7, 7 + shape[1]).expand(shape)
        result = turned(x, positions, inverse_frequencies(SPEC, 0))
        expected = [formulas.rotate(row, positions[0].tolist(), inverse_frequencies(SPEC, 0)) for row in x]
        torch.testing.assert_close(result, torch.stack(expected), rtol=0, atol=1e-14)
        assert torch.equal(x, before) and result.data_ptr() != x.data_ptr()


def test_the_gradient_of_a_rotation_is_the_inverse_rotation() -> None:
    x, grad = torch.randn(2, 2, 5, 3, 32, dtype=torch.float64)
    at, inv = torch.arange(5).expand(2, 5), inverse_frequencies(SPEC, 4)
    x.requires_grad_()
    (found,) = torch.autograd.grad(turned(x, at, inv), x, grad)
    assert torch.equal(found, turned(grad, at, inv, inverse=True))


def test_the_table_of_compressed_layers_has_the_values_of_the_specification() -> None:
    # invariant 6: base 160000, factor 16, original length 65536 -> ramp from 15 to 25
    inv = inverse_frequencies(FLASH, 4)
    expected = {
        0: 1.0, 10: 2.364354e-2, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4,
        24: 1.953125e-5, 25: 5.372312e-6, 31: 5.680529e-7,
    }  # fmt: skip
    for j, value in expected.items():
        assert float(inv[j]) == pytest.approx(value, rel=5e-7), j
    plain = 160000.0 ** (-2 * torch.arange(32, dtype=torch.float64) / 64)
    assert torch.equal(inv[:16], plain[:16].float())  # below 15 and at 15 the ramp is 0
    torch.testing.assert_close(inv[25:].double() * 16, plain[25:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("preset", ["flash", "pro"])
def test_sliding_window_layers_use_the_plain_table_and_compressed_ones_yarn(preset: str) -> None:
    # B02: read from the layout that each layer is given
    config = ModelConfig.preset(preset)
    at = rows(torch.zeros(1, 2, dtype=torch.long), None, None, None)
    plain = (10000.0 ** (-2 * torch.arange(32, dtype=torch.float64) / 64)).float()
    assert torch.equal(layer_layout(at, config, 0).sin[0, 1], plain.sin())
    for ratio in (4, 128):
        inv = inverse_frequencies(config, ratio)
        assert torch.equal(inv, inverse_frequencies(config, 4))
        assert torch.equal(layer_layout(at, config, ratio).sin[0, 1], inv.sin())
        assert float(inv[-1]) == pytest.approx(160000.0 ** (-62 / 64) / 16, rel=1e-6)


def test_without_an_original_length_nothing_is_scaled() -> None:
    inv = inverse_frequencies(FLASH.replace(rope_original_length=0), 4)
    assert torch.equal(inv, (160000.0 ** (-2 * torch.arange(32, dtype=torch.float64) / 64)).float())


def test_the_tables_agree_with_the_formula_written_out() -> None:
    for config in (SPEC, FLASH, ModelConfig.preset("pro"), ModelConfig.preset("flash-primus")):
        for ratio in (0, 4, config.hca_ratio):
            expected = formulas.frequencies(config, ratio)
            torch.testing.assert_close(inverse_frequencies(config, ratio), expected, rtol=1e-7, atol=0)


def test_yarn_changes_neither_the_magnitude_nor_the_softmax_scale() -> None:
    # B04
    cos, sin = tables(torch.tensor([[0]]), inverse_frequencies(FLASH, 4))
    assert bool((cos == 1.0).all()) and bool((sin == 0.0).all())
    with torch.device("meta"):
        for kind in (LayerKind("swa", "learned", 0), LayerKind("csa", "learned", 4), LayerKind("hca", "learned", 128)):
            assert Attention(FLASH, kind).scale == pytest.approx(0.04419417, rel=1e-7)


def test_angles_at_far_positions_are_fp32_in_a_bf16_model() -> None:
    position = torch.tensor([[1048575]])
    inv = inverse_frequencies(FLASH, 4)
    cos, _ = tables(position, inv)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos.double(), (position[..., None].double() * inv.double()).cos(), rtol=0, atol=0.07)


def test_a_constant_added_to_all_positions_changes_nothing() -> None:
    # invariant 10, B06
    model = build(SPEC.replace(num_hidden_layers=2, compress_ratios=(0, 0, 0), indexer_kl_coef=0.0))
    ids, _ = batch(6)
    here = torch.arange(6).expand(2, 6)
    torch.testing.assert_close(
        model(ids, position_ids=here).logits, model(ids, position_ids=here + 1000).logits, rtol=0, atol=1e-4
    )
    exact = copy.deepcopy(model).double()  # only the fp32 angles are left to differ, by 1000 * 2^-24
    torch.testing.assert_close(
        exact(ids, position_ids=here).logits, exact(ids, position_ids=here + 1000).logits, rtol=0, atol=1e-4
    )
    assert torch.equal(model(ids).logits, model(ids, position_ids=here).logits)


@pytest.mark.parametrize("attention", ["csa", "hca"])
def test_entries_move_with_the_positions_of_their_tokens(attention: str) -> None:
    # B06 for compressed layers, where P > 1
    model = build(one_layer(attention, index_topk=None)).double()
    ids, _ = batch(24)
    here = torch.arange(24).expand(2, 24)
    a, b = (model(ids, position_ids=here + offset).logits for offset in (0, 512))
    torch.testing.assert_close(a, b, rtol=0, atol=2e-4)
    spread = model(ids, position_ids=here * 3).logits
    assert float((a - spread).detach().abs().max()) > 1e-2  # the positions are read at all


def test_entries_stand_at_the_first_token_of_their_window(monkeypatch: pytest.MonkeyPatch) -> None:
    # B05, invariant 7: positions that reach the table for main and indexer entries alike
    seen: list[list[int]] = []

    def recorded(positions: Tensor, inv: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(positions[0].tolist())
        return tables(positions, inv)

    monkeypatch.setattr(layout_module, "tables", recorded)
    at = rows(torch.zeros(1, 12, dtype=torch.long), None, None, None)
    layer_layout(at, SPEC, 4)
    assert seen == [list(range(12)), [0, 4, 8]]


def test_main_and_indexer_entries_are_rotated_by_that_table(monkeypatch: pytest.MonkeyPatch) -> None:
    # B05: whatever is rotated with P rows is rotated by the angles of 0, 4, 8
    seen: list[Tensor] = []

    def recorded(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        if x.shape[1] == 3:
            seen.append(sin)
        return rotate(x, cos, sin, inverse=inverse)

    monkeypatch.setattr("dsv4c.model.attention.rotate", recorded)
    monkeypatch.setattr("dsv4c.model.indexer.rotate", recorded)
    model: DeepseekV4 = build(one_layer("csa", index_topk=1))
    model(batch(12)[0])
    expected = (torch.tensor([0.0, 4.0, 8.0])[:, None] * inverse_frequencies(SPEC, 4)).sin()
    assert len(seen) == 2
    assert all(torch.equal(s, expected.expand_as(s)) for s in seen)
