"""``DSV4_OPS=reference`` and ``ops.use_reference()``: on the references the model computes what it does on the operators."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4c import DeepseekV4, ModelConfig, ops
from tests.parity.models import distance, tiny

# All but sinkhorn, which is inside hc_pre.
CALLED = {
    "compress", "grouped_mm", "hadamard", "hc_post", "hc_pre", "indexer_kl", "indexer_kl_target", "indexer_topk", "rope",
    "route", "sparse_attention", "swiglu_clamp",
}  # fmt: skip


class _Seen(TorchDispatchMode):
    """Which of our operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dsv4":
            self.names.add(func._opname.removesuffix("_backward"))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    """The preset as training begins, but that the indexer prunes."""
    torch.manual_seed(0)
    return DeepseekV4(ModelConfig.preset("tiny", index_topk=3))


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor, Tensor]:
    """ids, targets and documents of lengths that no ratio divides."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 320, (2, 42), generator=g)
    documents = torch.stack((torch.arange(42) // 19, torch.arange(42) // 23))
    return ids[:, :41], ids[:, 1:], documents[:, :41]


def losses_and_gradients(model: DeepseekV4, batch: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    losses, parameters = model(*batch).losses, list(model.parameters())
    found = {n: torch.autograd.grad(x, parameters, retain_graph=True, materialize_grads=True) for n, x in losses.items()}
    return losses, {name: list(gradients) for name, gradients in found.items()}


def test_fp32_model_on_the_references_has_the_losses_and_gradients_of_the_operators(model, batch):
    losses, gradients = losses_and_gradients(model, batch)
    with ops.use_reference():
        expected_losses, expected = losses_and_gradients(model, batch)
    assert set(losses) == {"lm", "mtp", "seq_balance", "indexer_kl"}
    for name, loss in losses.items():
        assert distance(loss, expected_losses[name]) <= 1e-5
        ours, theirs = (torch.cat([g.flatten() for g in which[name]]) for which in (gradients, expected))
        assert theirs.any() and distance(ours, theirs) <= 1e-5


def test_every_parameter_of_an_fp64_model_has_the_gradient_of_the_operators(batch):
    """With random everything, where no gradient is small because of how training begins."""
    model = tiny(vocab_size=320, indexer_kl_coef=1e-2).double()
    _, gradients = losses_and_gradients(model, batch)
    with ops.use_reference():
        _, expected = losses_and_gradients(model, batch)
    for name in gradients:
        assert all(distance(a, b) <= 1e-9 for a, b in zip(gradients[name], expected[name], strict=True))


def test_model_calls_every_operator_unless_it_runs_on_the_references(model, batch):
    with _Seen() as seen:
        model(*batch)
    assert seen.names == CALLED
    with ops.use_reference(), _Seen() as seen:
        model(*batch)
    assert not seen.names


def test_the_block_ends_where_it_ends_also_after_an_error():
    with pytest.raises(ZeroDivisionError), ops.use_reference():
        1 / 0  # noqa: B018
    with _Seen() as seen:
        ops.sinkhorn(torch.zeros(4, 4), 20, 1e-6)
    assert seen.names == {"sinkhorn"}


@pytest.mark.parametrize(("value", "node"), [("reference", "DivBackward0"), ("", "GeneratedBackwardFor_dsv4_sinkhorn")])
def test_the_environment_chooses_for_a_whole_process(value, node):
    program = (
        "import torch; from dsv4c import ops; "
        "print(ops.sinkhorn(torch.zeros(4, 4, requires_grad=True), 20, 1e-6).grad_fn.name())"
    )
    environment = os.environ | {"DSV4_OPS": value, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(node)
