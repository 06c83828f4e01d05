"""The compressor: which tokens make an entry, with which weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4c import ops
from dsv4c.model.compressor import Compressor
from dsv4c.model.layout import LayerLayout, layer_layout, rows
from tests.model import formulas
from tests.model.conftest import SPEC, randomise

RATIOS = [4, 8]
pytestmark = pytest.mark.usefixtures("both")


def compressor(ratio: int, seed: int = 0) -> Compressor:
    module = Compressor(SPEC, SPEC.head_dim, ratio)
    randomise(module, seed)
    return module.double()


def layout(n_tokens: int, ratio: int, documents: list[int] | None = None) -> LayerLayout:
    ids = torch.zeros(1, n_tokens, dtype=torch.long)
    return layer_layout(rows(ids, None if documents is None else torch.tensor([documents]), None, None), SPEC, ratio)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pool(values: Tensor, logits: Tensor, ape: Tensor, at: LayerLayout, overlap: bool) -> Tensor:
    return ops.compress(values, logits, ape, at.entry_end, at.entry_has_previous, overlap)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("n_tokens", [1, 3, 4, 7, 8, 17, 26])
def test_entries_are_those_of_the_formula(ratio: int, n_tokens: int) -> None:
    module, x = compressor(ratio), normal(n_tokens, 64)
    expected = formulas.compress(x, module, ratio, SPEC.rms_norm_eps)
    torch.testing.assert_close(module(x[None], layout(n_tokens, ratio))[0], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("ratio", RATIOS)
def test_equal_logits_give_the_mean(ratio: int) -> None:
    # invariant 14: entry 0 of CSA is the mean of its own m values, later ones of 2m
    width = 64 if ratio == 4 else 32
    values, zeros = normal(1, 26, width), torch.zeros(1, 26, width, dtype=torch.float64)
    entries = pool(values, zeros, torch.zeros(ratio, width).double(), layout(26, ratio), ratio == 4)[0]
    for p in range(26 // ratio):
        own = values[0, p * ratio : (p + 1) * ratio, -32:]
        if ratio == 4 and p > 0:
            own = torch.cat((values[0, (p - 1) * 4 : p * 4, :32], own))
        torch.testing.assert_close(entries[p], own.mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_huge_ape_selects_exactly_its_slot(ratio: int) -> None:
    # invariant 15: channel ch takes slot ch % m of its window; ape is added before the halves are split
    width = 64 if ratio == 4 else 32
    values, logits = normal(1, 24, width), normal(1, 24, width, seed=1)
    ape = torch.zeros(ratio, width).double()
    channel = torch.arange(32)
    ape[channel % ratio, width - 32 + channel] = 1e4
    entries = pool(values, logits, ape, layout(24, ratio), ratio == 4)[0]
    for p in range(24 // ratio):
        assert torch.equal(entries[p], values[0, p * ratio + channel % ratio, width - 32 + channel])


def test_a_huge_ape_in_the_previous_half_selects_the_window_before() -> None:
    # invariant 15; the first window has no previous slots, whatever their ape
    values, logits = normal(1, 24, 64), normal(1, 24, 64, seed=1)
    ape = torch.zeros(4, 64).double()
    ape[2, :32] = 1e4
    entries = pool(values, logits, ape, layout(24, 4), True)[0]
    assert torch.equal(entries[1:], values[0, 2:20:4, :32])
    weights = logits[0, :4, 32:].softmax(0)
    torch.testing.assert_close(entries[0], (weights * values[0, :4, 32:]).sum(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("ratio", RATIOS)
def test_more_tokens_leave_the_old_entries_as_they_were(ratio: int) -> None:
    # invariant 15
    module = Compressor(SPEC, SPEC.head_dim, ratio)
    randomise(module)
    x = normal(32, 64).float()[None]
    few, many = module(x[:, :17], layout(17, ratio)), module(x, layout(32, ratio))
    # the matrix product of 17 rows may round otherwise than that of 32: compare the pooling on equal products
    torch.testing.assert_close(few, many[:, : 17 // ratio], rtol=0, atol=1e-6)
    width = module.wkv.weight.shape[0]
    values, logits = normal(1, 32, width).float(), normal(1, 32, width, seed=1).float()
    old = pool(values[:, :17], logits[:, :17], module.ape, layout(17, ratio), ratio == 4)
    new = pool(values, logits, module.ape, layout(32, ratio), ratio == 4)
    assert torch.equal(old, new[:, : 17 // ratio])


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_tail_of_a_document_is_in_no_entry(ratio: int) -> None:
    # invariant 16, B10: no value and no gradient
    module = compressor(ratio)
    x = normal(1, 2 * ratio + 3, 64).requires_grad_()
    entries = module(x, layout(2 * ratio + 3, ratio))
    assert entries.shape[1] == 2
    (grad,) = torch.autograd.grad(entries.square().sum() + entries.sum(), x)
    assert bool(grad[0, 2 * ratio :].eq(0).all())
    assert bool(grad[0, : 2 * ratio].ne(0).any(-1).all())
    changed = x.detach().clone()
    changed[:, 2 * ratio :] += 1
    assert torch.equal(module(changed, layout(2 * ratio + 3, ratio)), entries)


def test_in_csa_a_token_reaches_its_own_entry_and_the_next_one_only() -> None:
    module = compressor(4)
    x = normal(1, 20, 64).requires_grad_()
    entries = module(x, layout(20, 4))
    weight = normal(32, seed=5)
    for p in range(5):
        (grad,) = torch.autograd.grad((entries[0, p] * weight).sum(), x, retain_graph=True)
        touched = grad[0].ne(0).any(-1).nonzero().flatten().tolist()
        assert touched == list(range(max(0, 4 * p - 4), 4 * p + 4))


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_document_is_compressed_on_its_own(ratio: int) -> None:
    # invariant 32
    module = compressor(ratio)
    lengths = [3, 9, 1, 18, 2]
    parts = [normal(n, 64, seed=n) for n in lengths]
    documents = [d for d, n in enumerate(lengths) for _ in range(n)]
    packed = module(torch.cat(parts)[None], layout(sum(lengths), ratio, documents))[0]
    alone = torch.cat([formulas.compress(x, module, ratio, SPEC.rms_norm_eps) for x in parts])
    torch.testing.assert_close(packed[: len(alone)], alone, rtol=0, atol=1e-13)


def test_equal_content_in_two_windows_differs_by_a_rotation_of_their_distance() -> None:
    # B05: windows 0 and 2 of a plain compressor, 16 tokens apart at ratio 8
    from dsv4c.model.rope import inverse_frequencies, rotate, tables

    module = compressor(8)
    window = normal(8, 64)
    at = layout(24, 8)
    entries = module(torch.cat((window, normal(8, 64, seed=1), window))[None], at)
    assert torch.equal(entries[0, 0], entries[0, 2])
    keys = rotate(entries, at.entry_cos, at.entry_sin)
    cos, sin = tables(torch.tensor([[16]]), inverse_frequencies(SPEC, 8))
    torch.testing.assert_close(rotate(keys[:, :1], cos, sin), keys[:, 2:], rtol=0, atol=1e-6)
    assert float((keys[:, :1] - keys[:, 2:]).detach().abs().max()) > 0.1


def test_pooling_is_fp32_up_to_the_norm_in_a_bf16_model_and_inside_autocast() -> None:
    # specification, section 0
    module = Compressor(SPEC, SPEC.head_dim, 8)
    randomise(module)
    module = module.bfloat16()
    x = normal(1, 24, 64).bfloat16()
    exact = Compressor(SPEC, SPEC.head_dim, 8)
    exact.load_state_dict({n: p.float() for n, p in module.state_dict().items()})
    at = layout(24, 8)
    pooled = pool(exact.wkv(x.float()), exact.wgate(x.float()), exact.ape, at, False)
    expected = exact.norm(pooled.bfloat16())
    assert module.ape.dtype == torch.float32
    assert torch.equal(module(x, at), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x, at), expected)
