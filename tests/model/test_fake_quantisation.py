"""Simulated fp8 and fp4: explicit values, straight-through gradients, and knobs that change only what they name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ops
from dsv4c.model import attention as attention_module
from dsv4c.model import indexer as indexer_module
from dsv4c.model.compressor import Compressor
from dsv4c.model.precision import QUANTIZE, fake_fp4, fake_fp8
from tests.model.conftest import SPEC, batch, build, one_layer

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_fp4_values_are_their_own_and_everything_else_goes_to_the_nearest() -> None:
    # section 7: e2m1 {0, .5, 1, 1.5, 2, 3, 4, 6}; ties to the even mantissa; the block's largest value is 6, so scale 1
    values = torch.tensor(FP4 + [-v for v in FP4])
    assert torch.equal(fake_fp4(values, 16), values)
    x = torch.tensor([6.0, 0.24, 0.26, 0.74, 1.24, 1.26, 1.74, 1.76, 2.4, 2.6, 3.4, 3.6, 4.9, 5.1, -2.6, -0.1])
    expected = [6.0, 0.0, 0.5, 0.5, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0, -3.0, 0.0]
    assert fake_fp4(x, 16).tolist() == expected
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert fake_fp4(ties, 8).tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_every_block_of_32_has_a_power_of_two_scale() -> None:
    # section 7: 2^ceil(log2(amax / 6)): amax 6.1 takes scale 2, so 1.0 = 2 * 0.5 stays and 0.4 goes to 0
    x = torch.zeros(64)
    x[:3], x[32:35] = torch.tensor([6.1, 1.0, 0.4]), torch.tensor([0.75, 0.4, 0.07])
    y = fake_fp4(x)
    assert y[:3].tolist() == [6.0, 1.0, 0.0]
    assert y[32:35].tolist() == pytest.approx([0.75, 0.375, 0.0625])  # scale 1/8
    assert not bool(y[3:32].any()) and bool(fake_fp4(torch.zeros(32)).eq(0).all())


def test_fp8_has_three_bits_of_mantissa_and_saturates_nowhere() -> None:
    # section 7: e4m3, blocks of 64, scale 2^ceil(log2(amax / 448)); amax 448 takes scale 1
    x = torch.tensor([448.0, 1.0, 1.0625, 1.1, 1.125, 17.0, 19.0, 2.0**-9, 0.6 * 2.0**-9, 0.4 * 2.0**-9, -300.0])
    expected = [448.0, 1.0, 1.0, 1.125, 1.125, 16.0, 20.0, 2.0**-9, 2.0**-9, 0.0, -288.0]
    assert fake_fp8(x).tolist() == expected
    assert fake_fp8(torch.tensor([449.0, 1.0])).tolist() == [448.0, 1.0]  # scale 2
    assert fake_fp8(torch.tensor([1e-5, -2e-6])).tolist() == pytest.approx([1e-5, -2e-6], rel=0.1)  # amax floor 1e-4
    two_blocks = torch.cat((torch.full((64,), 1000.0), torch.full((64,), 1e-3)))
    torch.testing.assert_close(fake_fp8(two_blocks), two_blocks, rtol=0.07, atol=0)


@pytest.mark.parametrize("name", ["fp8", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_go_straight_through(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 64).to(dtype).requires_grad_()
    y = QUANTIZE[name](x)
    grad = torch.randn(3, 64).to(dtype)
    (found,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(found, grad) and y.dtype == dtype
    assert not torch.equal(y, x)
    assert float((y - x).detach().abs().max()) < (1.0 if name == "fp4" else 0.3)


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_quantised_values_are_their_own_rounding(name: str) -> None:
    y = QUANTIZE[name](torch.randn(5, 64)).detach()
    torch.testing.assert_close(QUANTIZE[name](y), y, rtol=0, atol=0)


def test_full_is_the_tensor_itself() -> None:
    x = torch.randn(3)
    assert QUANTIZE["full"](x) is x


KNOBS = {
    "indexer_qk_precision": ("fp8", "fp4"),
    "indexer_proj_precision": ("fp8", "fp4"),
    "attention_kv_precision": ("fp8",),
}


def observed(monkeypatch: pytest.MonkeyPatch, **changes: str) -> dict[str, Tensor]:
    """What the attention and the indexer of one CSA layer hand to their operators."""
    model: DeepseekV4 = build(one_layer("csa", **changes))
    seen: dict[str, Tensor] = {}

    def attend(q: Tensor, kv: Tensor, entries: Tensor, *rest: object) -> object:
        if entries.shape[1]:  # not the MTP layer's
            seen.update(q=q, kv=kv, entries=entries)
        return original_attend(q, kv, entries, *rest)

    def score(q: Tensor, k: Tensor, w: Tensor, *rest: object) -> object:
        seen.update(index_q=q, index_k=k, index_w=w)
        return original_score(q, k, w, *rest)

    original_attend, original_score = ops.sparse_attention, ops.indexer_topk
    monkeypatch.setattr(attention_module.ops, "sparse_attention", attend)
    monkeypatch.setattr(indexer_module.ops, "indexer_topk", score)
    ids, targets = batch(24)
    model(ids, targets=targets)
    return {name: t.detach() for name, t in seen.items()}


def changed(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    return {name for name in a if not torch.equal(a[name], b[name])}


@pytest.mark.parametrize(("knob", "value"), [(k, v) for k, values in KNOBS.items() for v in values])
def test_a_knob_changes_only_what_it_names(monkeypatch: pytest.MonkeyPatch, knob: str, value: str) -> None:
    names = {
        "indexer_qk_precision": {"index_q", "index_k"},
        "indexer_proj_precision": {"index_q", "index_w"},
        "attention_kv_precision": {"kv", "entries"},
    }
    full = observed(monkeypatch)
    monkeypatch.undo()
    assert set(full) == {"q", "kv", "entries", "index_q", "index_k", "index_w"}
    assert changed(full, observed(monkeypatch, **{knob: value})) == names[knob]


def test_full_precision_is_the_default_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    full = observed(monkeypatch)
    monkeypatch.undo()
    assert not changed(full, observed(monkeypatch, **dict.fromkeys(KNOBS, "full")))
    assert all(getattr(SPEC, knob) == "full" for knob in KNOBS)


def test_attention_rounds_the_plain_channels_and_leaves_the_rotary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    # section 7: non-rotary channels of window and compressed latents
    full = observed(monkeypatch)
    monkeypatch.undo()
    low = observed(monkeypatch, attention_kv_precision="fp8")
    for name in ("kv", "entries"):
        assert torch.equal(full[name][..., 16:], low[name][..., 16:])
        assert torch.equal(fake_fp8(full[name][..., :16]), low[name][..., :16])


def test_the_indexer_quantises_after_the_hadamard_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    # section 5: q and k as the product reads them
    full = observed(monkeypatch)
    monkeypatch.undo()
    low = observed(monkeypatch, indexer_qk_precision="fp4")
    assert torch.equal(fake_fp4(full["index_q"]), low["index_q"])
    assert torch.equal(fake_fp4(full["index_k"]), low["index_k"])


def test_the_indexers_own_compressor_is_not_quantised_by_the_projection_knob() -> None:
    low = build(one_layer("csa", indexer_proj_precision="fp4", attention_kv_precision="fp8"))
    full = build(one_layer("csa"))
    outs: list[list[Tensor]] = []
    for model in (full, low):
        seen: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, Compressor):
                module.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out))
        model(batch(24)[0])
        outs.append(seen)
    assert len(outs[0]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
