"""The rule ``scales``: right models of every layer kind are proved, each wrong constant of a small graph is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4c import ops
from dsv4c.passes.verify import verify
from tests.passes.verify.mutation import CONFIGS
from tests.passes.verify.traced import RATIO, B, C, H, K, P, R, S, messages, model, numbers, report, whole

TEMPERATURE = H**-0.5 * C**-0.5


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_right_model_is_proved(kind: str) -> None:
    found = verify(model(kind), ["scales"])
    assert found.ok, str(found)
    assert found.checked["scales"] >= 7


def core(
    change: Callable[[Tensor], Tensor] = lambda q: q, scale: float = C**-0.5, factor: float = 1.0
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A normed query through a rotation into an attention core; ``factor``: of its cosines."""

    def forward(x: Tensor, kv: Tensor, entries: Tensor, sink: Tensor, start: Tensor, end: Tensor, angle: Tensor) -> Tensor:
        q = change(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
        q = ops.rope(q, angle.cos() * factor, angle.sin(), False)
        return ops.sparse_attention(q, kv, entries, sink, start, end, None, scale, 4, RATIO)[0]

    q, latent = numbers(B, S, H, C), numbers(B, S, C)
    return forward, (q, latent, numbers(B, P, C), numbers(H), whole(B, S), whole(B, P), numbers(B, S, R // 2))


@pytest.mark.parametrize("change", [lambda q: q, lambda q: (q * 1.0).to(torch.float64).float(), lambda q: q + 0])
def test_a_right_scale_is_proved(change: Callable[[Tensor], Tensor]) -> None:
    forward, args = core(change)
    found = report("scales", forward, *args)
    assert found.ok and found.checked["scales"] == 5


def test_a_factor_before_the_norm_is_divided_out_and_not_reported() -> None:
    forward, args = core()
    assert report("scales", lambda x, *rest: forward(3.0 * x, *rest), *args).ok


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: core(scale=1.0), "the scale of sparse_attention is 1"),
        (lambda: core(scale=1 / C), "times 8^-0.5"),
        (lambda: core(lambda q: q * 1.3), "q of sparse_attention is multiplied by 1.3 after its norm"),
        (lambda: core(lambda q: q / 2), "is multiplied by 0.5"),
        (lambda: core(lambda q: q * torch.tensor(1.3)), "is multiplied by 1.3"),
        (lambda: core(lambda q: -q), "is multiplied by -1"),
        (lambda: core(lambda q: torch.cat((q[..., :4], q[..., 4:] * 1.3), -1)), "is multiplied by 1.3"),
        (lambda: core(factor=1.2773), "cos of rope is multiplied by 1.2773"),
    ],
)  # fmt: skip
def test_a_wrong_scale_is_reported(build: Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]], says: str) -> None:
    forward, args = build()
    found = report("scales", forward, *args)
    assert any(says in m for m in messages(found)), str(found)


def indexer(
    q: float = 1.0, k: float = 1.0, w: float = 1.0, scores: float = 1.0
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """An indexer with these constants on its operands, and on its scores before the loss."""

    def forward(
        x: Tensor, keys: Tensor, weights: Tensor, start: Tensor, end: Tensor, target: Tensor, real: Tensor
    ) -> Tensor:
        _, best = ops.indexer_topk(ops.hadamard(x * q), keys * k, weights * w, start, end, K, RATIO)
        return ops.indexer_kl(target, best * scores, real)[0]

    x, keys, weights = numbers(B, S, H, C), numbers(B, P, C), numbers(B, S, H)
    return forward, (x, keys, weights, whole(B, S), whole(B, P), numbers(B, S, K), numbers(B, S, dtype=torch.bool))


@pytest.mark.parametrize(
    "where",
    [{"w": TEMPERATURE}, {"q": TEMPERATURE}, {"q": C**-0.5, "w": H**-0.5}, {"q": C**-0.25, "k": C**-0.25, "w": H**-0.5}],
)
def test_the_temperature_may_be_anywhere_once(where: dict[str, float]) -> None:
    forward, args = indexer(**where)
    assert report("scales", forward, *args).ok


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ({}, "they have none"),
        ({"w": TEMPERATURE, "q": TEMPERATURE}, "it is applied twice"),
        ({"w": H**-0.5}, "the factor 8^-0.5 is missing"),
        ({"w": C**-0.5}, "the factor 3^-0.5 is missing"),
        ({"w": TEMPERATURE, "scores": 90.5}, "into the loss are multiplied by"),
    ],
)  # fmt: skip
def test_a_wrong_temperature_is_reported(where: dict[str, float], says: str) -> None:
    forward, args = indexer(**where)
    assert says in messages(report("scales", forward, *args))[0]


@pytest.mark.parametrize(("factor", "n"), [(1.0, 0), (1.5, 1)])
def test_routing_weights_are_scaled_by_the_operator_only(factor: float, n: int) -> None:
    def forward(logits: Tensor, bias: Tensor, rows: Tensor) -> Tensor:
        weights, _, _, _ = ops.route(logits, bias, None, None, 2, 2.5)
        return ops.swiglu_clamp(rows, weights.flatten() * factor, 10.0)

    found = report("scales", forward, numbers(6, 4), numbers(4), numbers(12, 8))
    assert len(found.violations) == n and found.checked["scales"] == 1
