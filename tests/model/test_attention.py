"""Attention of every layer kind: one softmax over window, entries and sink, and the way back from the rotation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c import ops
from dsv4c.config import LayerKind
from dsv4c.model.attention import Attention, GroupedLinear
from dsv4c.model.layout import LayerLayout, layer_layout, rows
from dsv4c.model.norms import rms
from tests.model import formulas
from tests.model.conftest import KINDS, SPEC, batch, build, one_layer, randomise


def attention(kind: str, **changes: Any) -> Attention:
    module = Attention(SPEC.replace(**changes), LayerKind(kind, "learned", KINDS[kind]))  # type: ignore[arg-type]
    randomise(module)
    return module.double()


def layout(n_tokens: int, ratio: int) -> LayerLayout:
    return layer_layout(rows(torch.zeros(1, n_tokens, dtype=torch.long), None, None, None), SPEC, ratio)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 10, 29])
@pytest.mark.parametrize("dense", [False, True])
def test_the_output_is_that_of_the_formula(kind: str, n_tokens: int, dense: bool) -> None:
    # B10: fewer tokens than a window, and a remainder
    module, x = attention(kind), normal(n_tokens, 64)
    expected, kl = formulas.attention(x, module, SPEC, KINDS[kind], dense)
    y, facts = module(x[None], layout(n_tokens, KINDS[kind]), dense, True)
    torch.testing.assert_close(y[0], expected, rtol=0, atol=1e-12)
    if kind == "csa":
        torch.testing.assert_close(facts.indexer_kl, kl, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_without_an_entry_a_compressed_layer_is_its_window_and_sink(kind: str) -> None:
    # B10: the same weights and the compress table
    module, n = attention(kind), 3
    window = attention("swa")
    window.load_state_dict({k: v for k, v in module.state_dict().items() if k in window.state_dict()})
    x, at = normal(1, n, 64), layout(n, KINDS[kind])
    assert torch.equal(module(x, at, False, True)[0], window(x, at, False, True)[0])


def test_one_key_and_no_sink_return_the_unrotated_latent() -> None:
    # invariant 8, B06: W=1; tests de-rotation and the sharing of key and value
    module, x = attention("swa", sliding_window=1), normal(1, 12, 64)
    torch.nn.init.constant_(module.attn_sink, -1e30)
    seen: list[Tensor] = []
    module.wo_a.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    module(x, layout(12, 0), False, False)
    expected = module.kv_norm(module.wkv(x))
    per_head = seen[0].reshape(1, 12, 4, 32)
    torch.testing.assert_close(per_head, expected[:, :, None].expand_as(per_head), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_rotates_its_output_back(kind: str) -> None:
    # B06: at the first token, with no sink, the only key is the token itself
    module, x = attention(kind), normal(1, 9, 64)
    torch.nn.init.constant_(module.attn_sink, -1e30)
    seen: list[Tensor] = []
    module.wo_a.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    at = layer_layout(rows(torch.zeros(1, 9).long(), None, None, torch.arange(50, 59)[None]), SPEC, KINDS[kind])
    module(x, at, False, False)
    expected = module.kv_norm(module.wkv(x))[:, 0]
    torch.testing.assert_close(seen[0].reshape(1, 9, 4, 32)[:, 0], expected[:, None].expand(1, 4, 32), rtol=0, atol=1e-5)


def operands(n_tokens: int = 11, n_entries: int = 2) -> list[Tensor]:
    q, kv, entries, sink = normal(1, n_tokens, 3, 8), normal(1, n_tokens, 8, seed=1), normal(1, n_entries, 8), normal(3)
    return [t.requires_grad_() for t in (q, kv, entries, sink)]


def attend(q: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, window: int = 4) -> tuple[Tensor, Tensor]:
    ends = 5 * torch.arange(entries.shape[1])[None] + 4
    start = torch.zeros(1, q.shape[1]).long()
    return ops.sparse_attention(q, kv, entries, sink, start, ends, None, 0.4, window, 5)


def test_the_sink_takes_its_share_and_has_no_value() -> None:
    # invariant 9: with all values 1 the output is the sum of the weights
    q, kv, entries, sink = operands()
    ones, entry_ones = torch.ones_like(kv), torch.ones_like(entries)
    out, lse = attend(q, ones, entry_ones, sink)
    torch.testing.assert_close(out[..., 0], 1 - torch.exp(sink - lse), rtol=1e-12, atol=0)
    assert float(out.detach().max()) < 1
    out, lse = attend(q, kv, entries, torch.full_like(sink, -1e30))
    z = 0.4 * torch.einsum("hc,sc->hs", q[0, 10], torch.cat((kv[0, 7:], entries[0])))
    plain = z.softmax(-1) @ torch.cat((kv[0, 7:], entries[0]))
    torch.testing.assert_close(out[0, 10], plain, rtol=1e-12, atol=1e-14)


def test_gradients_are_those_of_the_formula_and_of_finite_differences() -> None:
    # invariant 9 (the gradient of the sink), B51
    tensors = operands()
    assert torch.autograd.gradcheck(attend, tensors, atol=1e-7)
    out, lse = attend(*tensors)
    grad = normal(*out.shape, seed=9)
    dsink = torch.autograd.grad(out, tensors[3], grad)[0]
    delta = (grad * out).sum(-1)
    expected = -(torch.exp(tensors[3] - lse) * delta).sum((0, 1)).detach()
    torch.testing.assert_close(dsink, expected, rtol=1e-11, atol=1e-13)


def test_the_inputs_of_attention_are_neither_changed_nor_aliased() -> None:
    # B50, B51: also where there is nothing to select
    for n_entries in (0, 2):
        tensors = [t.detach() for t in operands(11, n_entries)]
        before = copy.deepcopy(tensors)
        out, _ = attend(*tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        assert out.data_ptr() not in {t.data_ptr() for t in tensors}


def test_all_choices_selected_equal_no_selection() -> None:
    # B50: K >= P
    q, kv, entries, sink = operands()
    start, ends = torch.zeros(1, 11).long(), torch.tensor([[4, 9]])
    everything = torch.arange(2).expand(1, 11, 2)
    one = ops.sparse_attention(q, kv, entries, sink, start, ends, everything, 0.4, 4, 5)
    two = ops.sparse_attention(q, kv, entries, sink, start, ends, None, 0.4, 4, 5)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_query_depends_on_a_token_outside_its_window_through_an_entry() -> None:
    # B11: window 4, ratio 4, query 15, token 0
    model = build(one_layer("csa", sliding_window=4, index_topk=None))
    ids, _ = batch(16, rows=1)
    embedded: list[Tensor] = []
    model.embed.register_forward_hook(lambda _m, _i, out: (out.retain_grad(), embedded.append(out))[0])
    (grad,) = torch.autograd.grad(model(ids).logits[0, 15].square().sum(), embedded[0])
    assert bool(grad[0, 0].any())
    (early,) = torch.autograd.grad(model(ids).logits[0, 2].square().sum(), embedded[1])
    assert not bool(early[0, 3:].any())


def test_the_last_tokens_of_a_ragged_length_are_window_keys_only() -> None:
    # B10: S=10, m=4: token 9 changes output 9 and nothing else
    module = attention("csa", index_topk=None)
    x = normal(1, 10, 64)
    changed = x.clone()
    changed[:, 9] += 1.0
    one, two = (module(v, layout(10, 4), False, False)[0][0] for v in (x, changed))
    assert one.shape == (10, 64)
    assert (one - two).detach().abs().amax(-1).gt(0).nonzero().flatten().tolist() == [9]


def test_groups_of_neighbouring_heads_are_projected_apart() -> None:
    module = GroupedLinear(2, 6, 5).double()
    x = normal(1, 3, 2, 6)
    y = module(x)
    assert module.weight.shape == (10, 6)
    for a in range(2):
        torch.testing.assert_close(y[..., a * 5 : a * 5 + 5], x[:, :, a] @ module.weight[a * 5 : a * 5 + 5].T)
    attn = attention("swa")
    heads = normal(1, 3, 4, 32)
    at = layout(3, 0)
    seen: list[Tensor] = []
    attn.wo_a.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    attn.project(heads, at)
    assert torch.equal(seen[0][0, 0, 1], heads[0, 0, 2:].flatten())  # position 0: no rotation; group 1 = heads 2, 3


def test_queries_are_normed_per_head_without_a_weight() -> None:
    module, x = attention("swa"), normal(1, 3, 64)
    seen: list[Tensor] = []
    original = ops.sparse_attention
    try:
        ops.sparse_attention = lambda q, *rest: (seen.append(q), original(q, *rest))[1]  # type: ignore[assignment]
        module(x, layout(3, 0), False, False)
    finally:
        ops.sparse_attention = original  # type: ignore[assignment]
    q = module.wq_b(module.q_norm(module.wq_a(x))).unflatten(-1, (4, 32))
    torch.testing.assert_close(seen[0][:, 0], rms(q, 1e-6)[:, 0], rtol=0, atol=1e-13)
    torch.testing.assert_close(seen[0].square().mean(-1), torch.ones(1, 3, 4).double(), rtol=0, atol=1e-5)


def test_the_shapes_are_those_of_the_specification() -> None:
    # section 8
    shapes = {n: tuple(p.shape) for n, p in attention("csa").named_parameters()}
    assert shapes == {
        "wq_a.weight": (32, 64), "q_norm.weight": (32,), "wq_b.weight": (128, 32), "wkv.weight": (32, 64),
        "kv_norm.weight": (32,), "attn_sink": (4,), "wo_a.weight": (32, 64), "wo_b.weight": (64, 32),
        "compressor.wkv.weight": (64, 64), "compressor.wgate.weight": (64, 64), "compressor.ape": (4, 64),
        "compressor.norm.weight": (32,), "indexer.wq_b.weight": (256, 32), "indexer.weights_proj.weight": (8, 64),
        "indexer.compressor.wkv.weight": (64, 64), "indexer.compressor.wgate.weight": (64, 64),
        "indexer.compressor.ape": (4, 64), "indexer.compressor.norm.weight": (32,),
    }  # fmt: skip
    hca = {n: tuple(p.shape) for n, p in attention("hca").named_parameters()}
    assert hca["compressor.ape"] == (8, 32) and hca["compressor.wkv.weight"] == (32, 64)
    assert not any("indexer" in n for n in hca)
    assert not any("compressor" in n for n, _ in attention("swa").named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_operators_and_references_agree_in_a_layer(kind: str) -> None:
    # B51: the gradient of every parameter, fused against plain torch
    module, x = attention(kind), normal(1, 21, 64)
    grad = normal(1, 21, 64, seed=4)

    def run() -> list[Tensor]:
        y, facts = module(x, layout(21, KINDS[kind]), False, True)
        loss = (y * grad).sum() + (0.0 if facts.indexer_kl is None else facts.indexer_kl)
        return list(torch.autograd.grad(loss, list(module.parameters())))

    fused = run()
    with ops.use_reference():
        plain = run()
    for name, a, b in zip(dict(module.named_parameters()), fused, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=name)


def test_attention_is_fp32_inside_for_bf16_inputs() -> None:
    # B31: logits, maximum, exponentials, sums and sink; the output is rounded once
    q, kv, entries, sink = (t.detach() for t in operands(40, 4))
    low = [t.bfloat16() for t in (q, kv, entries)]
    out, lse = attend(*low, sink.float())
    exact, exact_lse = attend(*(t.double() for t in low), sink)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)
    assert float((out != exact.bfloat16()).float().mean()) < 1e-2
