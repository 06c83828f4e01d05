"""The specification's tiny model with every parameter random, and the measures that its tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

from dsv4c import DeepseekV4, ModelConfig, ops
from dsv4c.model.moe import Gate
from dsv4c.model.transformer import ModelOutput

# Specification, section 11: layers SWA, SWA, CSA, HCA, CSA and MTP, two hash routers, top-k below P from 16 tokens on.
# Eight indexer heads, not four: where no head of a query matches an entry its score is exactly 0, two such entries tie, and
# which of them is selected is not defined.
SPEC = ModelConfig.preset("tiny", vocab_size=96, index_topk=3, index_n_heads=8, seq_balance_loss_coef=1e-2)
KINDS = {"swa": 0, "csa": 4, "hca": 8}
EXAMPLES = settings(
    max_examples=12, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def one_layer(attention: str, router: str = "learned", **changes: Any) -> ModelConfig:
    """The tiny model with one decoder layer of this kind, and its MTP layer."""
    return SPEC.replace(
        **{
            "num_hidden_layers": 1,
            "compress_ratios": (KINDS[attention], 0),
            "num_hash_layers": int(router == "hash"),
            "indexer_kl_coef": 1e-2 if attention == "csa" else 0.0,
            **changes,
        }
    )


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Every parameter and buffer random and of a size at which it matters, so that no term of a formula hides."""
    generator = torch.Generator().manual_seed(seed)

    def normal(t: Tensor, std: float, mean: float = 0.0) -> None:
        t.copy_(mean + std * torch.randn(t.shape, generator=generator, dtype=torch.float64))

    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            normal(p, 0.1, 1.0)
        elif name.endswith((".base", ".scale", "attn_sink", ".ape")):
            normal(p, 0.5)
        else:
            normal(p, 1.0 if name == "embed.weight" else p.shape[-1] ** -0.5)
    for gate in model.modules():
        if isinstance(gate, Gate) and gate.hashed:
            order = torch.rand(gate.vocab, gate.n_experts, generator=generator).argsort(1)
            gate.tid2eid.copy_(order[:, : gate.k])
        elif isinstance(gate, Gate):
            normal(gate.bias, 0.1)


def build(config: ModelConfig = SPEC, seed: int = 0) -> DeepseekV4:
    """A randomised model; the same seed gives the same values."""
    model = DeepseekV4(config)
    randomise(model, seed)
    return model


def batch(n_tokens: int, rows: int = 2, seed: int = 0, vocab: int = 96) -> tuple[Tensor, Tensor]:
    """Random ids and random targets [rows, n_tokens]."""
    generator = torch.Generator().manual_seed(1000 * n_tokens + seed)
    ids, targets = torch.randint(0, vocab, (2, rows, n_tokens), generator=generator)
    return ids, targets


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """The gradient of ``loss`` by parameter name; None where there is no path or the parameter is frozen."""
    named = dict(model.named_parameters())
    live = {n: p for n, p in named.items() if p.requires_grad}
    if not loss.requires_grad:
        return dict.fromkeys(named)
    found = torch.autograd.grad(loss, list(live.values()), retain_graph=True, allow_unused=True)
    return dict.fromkeys(named) | dict(zip(live, found, strict=True))


def reached(grads: dict[str, Tensor | None]) -> set[str]:
    """Names of the parameters with a gradient that is not zero everywhere."""
    return {n for n, g in grads.items() if g is not None and bool(g.any())}


def total(out: ModelOutput) -> Tensor:
    return torch.stack(list(out.losses.values())).sum()


def largest_difference(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> float:
    """The largest difference of two sets of gradients, each tensor relative to its largest entry; None is zero."""
    worst = 0.0
    assert a.keys() == b.keys()
    for name in a:
        one, two = a[name], b[name]
        if one is None and two is None:
            continue
        one = torch.zeros_like(two) if one is None else one
        two = torch.zeros_like(one) if two is None else two
        size = max(float(one.abs().max()), float(two.abs().max()), 1e-30)
        worst = max(worst, float((one - two).abs().max()) / max(size, 1e-6))
    return worst


def same_bits(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    """Whether two sets of gradients hold the same bits, and are missing for the same parameters."""

    def equal(one: Tensor | None, two: Tensor | None) -> bool:
        return one is two if one is None or two is None else torch.equal(one, two)

    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


def outputs(model: DeepseekV4, kind: type[nn.Module], run: Callable[[], Any]) -> list[Any]:
    """What every module of a class returned during ``run``, in the order of the calls."""
    seen: list[Any] = []
    hooks = [m.register_forward_hook(lambda _m, _i, out: seen.append(out)) for m in model.modules() if isinstance(m, kind)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@pytest.fixture(params=["operators", "references"])
def both(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test twice: on the operators, and on the formulas that they are compared with."""
    with ops.use_reference() if request.param == "references" else nullcontext():
        yield


@pytest.fixture(scope="session")
def tiny() -> DeepseekV4:
    """fp32; shared by every test, so nothing may change it."""
    return build()


@pytest.fixture(scope="session")
def tiny64(tiny: DeepseekV4) -> DeepseekV4:
    """The same values in fp64; shared by every test, so nothing may change it."""
    return copy.deepcopy(tiny).double()
