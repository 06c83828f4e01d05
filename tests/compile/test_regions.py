"""Regions are compiled once per layer kind, without a break, and stay compiled; backend ``aot_eager`` traces like any
other and generates no code, so these tests are cheap.  What Inductor makes of it is in test_inductor.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ModelConfig, compile_model
from dsv4c.errors import ConfigError
from dsv4c.torch_compat import compile_counts, reset_compiler

REGIONS_OF_TINY = 5  # swa-hash, csa-learned, hca-learned, the MTP layer, the head


@pytest.fixture(autouse=True)
def _fresh_compiler():
    reset_compiler()
    yield
    reset_compiler()


def batch(seq_len: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 300, (1, seq_len + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def model(**changes: object) -> DeepseekV4:
    torch.manual_seed(0)
    return DeepseekV4(ModelConfig.preset("tiny", **changes))


def one_layer(**changes: object) -> DeepseekV4:
    """A CSA layer with a learned router and the head: two regions."""
    return model(num_hidden_layers=1, compress_ratios=(4,), num_hash_layers=0, num_nextn_predict_layers=0, **changes)


def backward(m: DeepseekV4, seq_len: int) -> dict[str, Tensor]:
    losses = m(*batch(seq_len)).losses
    torch.stack(list(losses.values())).sum().backward()
    return losses


def test_a_deep_model_compiles_one_region_per_kind_and_one_more_per_new_length() -> None:  # B46
    ratios = (0, 0, 4, 8, 4, 8, 4, 8, 4, 8, 4, 8, 0)
    m = compile_model(model(num_hidden_layers=12, compress_ratios=ratios), backend="aot_eager")
    backward(m, 16)
    assert compile_counts().graphs == REGIONS_OF_TINY
    backward(m, 16)
    assert compile_counts().graphs == REGIONS_OF_TINY
    backward(m, 24)
    assert compile_counts().graphs <= 2 * REGIONS_OF_TINY
    after = compile_counts().graphs
    backward(m, 40)
    assert compile_counts().graphs == after
    assert compile_counts().graph_breaks == 0


def test_a_length_below_the_ratio_and_a_top_k_that_follows_the_length_compile() -> None:  # B47, B10
    m = compile_model(one_layer(index_topk=4), backend="aot_eager", dynamic=True)
    for seq_len in (8, 20, 64, 3):
        losses = backward(m, seq_len)
        with torch.compiler.set_stance("force_eager"):
            expected = m(*batch(seq_len)).losses
        for name, value in expected.items():
            torch.testing.assert_close(losses[name], value, rtol=1e-6, atol=1e-7)
    assert compile_counts().graphs <= 3 * 2
    assert compile_counts().graph_breaks == 0


@pytest.mark.parametrize("layers", ["all", (0,)])
def test_recomputed_layers_are_still_whole_graphs_and_count_losses_once(layers: str | tuple[int, ...]) -> None:  # B26, B45
    m = one_layer()
    plain = m(*batch(32))
    torch.stack(list(plain.losses.values())).sum().backward()
    grads = {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}
    m.zero_grad()
    m.set_recompute(layers)
    compile_model(m, backend="aot_eager")
    out = m(*batch(32))
    torch.stack(list(out.losses.values())).sum().backward()
    assert compile_counts().graph_breaks == 0
    assert torch.equal(out.metrics["expert_load"], plain.metrics["expert_load"])
    for name, value in plain.losses.items():
        torch.testing.assert_close(out.losses[name], value, rtol=1e-6, atol=1e-8)
    for name, grad in grads.items():
        assert (m.get_parameter(name).grad - grad).norm() <= 1e-5 * grad.norm(), name


def test_the_whole_model_compiles_as_one_graph() -> None:
    m = one_layer()
    expected = {k: v.item() for k, v in m(*batch(16)).losses.items()}
    compile_model(m, regional=False, backend="aot_eager")
    losses = backward(m, 16)
    assert compile_counts().graphs == 1
    assert {k: v.item() for k, v in losses.items()} == pytest.approx(expected, rel=1e-6)


def test_bf16_autocast_compiles_and_keeps_the_streams_in_bf16() -> None:  # B34
    m = compile_model(one_layer(), backend="aot_eager")
    dtypes = []
    for layer in m.layers:
        layer.register_forward_hook(lambda _m, _i, out: dtypes.append(out[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        losses = m(*batch(16)).losses
    torch.stack(list(losses.values())).sum().backward()
    assert set(dtypes) == {torch.bfloat16}
    assert {v.dtype for v in losses.values()} == {torch.float32}
    assert compile_counts().graph_breaks == 0


def test_a_bias_written_between_forward_and_backward_does_not_change_the_gradient() -> None:  # B44
    m = compile_model(one_layer(), backend="aot_eager")
    backward(m, 32)
    expected = {n: p.grad.clone() for n, p in m.named_parameters()}
    m.zero_grad()
    losses = m(*batch(32)).losses
    m.layers[0].ffn.gate.bias[3] += 10
    torch.stack(list(losses.values())).sum().backward()
    assert all(torch.equal(p.grad, expected[n]) for n, p in m.named_parameters())


def test_an_option_that_would_split_a_region_is_refused() -> None:
    with pytest.raises(ConfigError, match="fullgraph"):
        compile_model(model(), fullgraph=False)


def test_the_backward_of_fp32_regions_stays_fp32_under_autocast() -> None:  # B35
    def gradients(m: DeepseekV4) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            losses = m(*batch(32)).losses
        torch.stack(list(losses.values())).sum().backward()
        return {n: p.grad for n, p in m.named_parameters()}

    expected = gradients(one_layer())
    found = gradients(compile_model(one_layer(), backend="aot_eager"))
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 1e-6 * grad.norm(), name
