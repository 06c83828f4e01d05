"""How a batch is split never changes a gradient: 1 x 4 sequences = 4 x 1 accumulated, objective by objective."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ModelConfig
from dsv4c.model.layout import rows
from dsv4c.model.objectives import IGNORED, Counts, count
from tests.parity.models import Batch, distance, tiny

OBJECTIVES = ("lm", "mtp", "seq_balance", "indexer_kl")
SPLITS = {"4 x 1": (1, 1, 1, 1), "2 x 2": (2, 2), "1 and 3": (1, 3)}
N_TOKENS = 29
LIMIT = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Four sequences that differ in everything that is counted: targets, padding on either side, documents."""
    text = torch.randint(0, 96, (4, N_TOKENS + 1), generator=torch.Generator().manual_seed(2))
    targets = text[:, 1:].clone()
    targets[0, 3:20] = IGNORED
    targets[2, :] = IGNORED
    targets[2, 11:13] = text[2, 12:14]
    documents, real = torch.zeros(4, N_TOKENS, dtype=torch.int64), torch.ones(4, N_TOKENS, dtype=torch.bool)
    documents[1, 9:], documents[1, 10:], documents[3, 13:] = 1, 2, 1
    real[0, 24:], real[3, :6] = False, False
    return Batch(text[:, :-1].contiguous(), targets, documents, real)


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["fp64", "fp32"])
def model(request: pytest.FixtureRequest) -> DeepseekV4:
    """fp64 with random everything, where the split is exact; fp32 as training begins, where rounding is below 1e-6."""
    changes = {"indexer_kl_coef": 1e-2, "seq_balance_loss_coef": 1e-2}
    if request.param == torch.float64:
        return tiny(**changes).double()
    torch.manual_seed(0)
    return DeepseekV4(ModelConfig.preset("tiny", vocab_size=96, index_topk=3, **changes))


def split(batch: Batch, sizes: tuple[int, ...]) -> list[Batch]:
    pieces = zip(*(x.split(sizes) for x in batch if x is not None), strict=True)
    return [Batch(*piece) for piece in pieces]


def counted(batch: Batch) -> Counts:
    return count(batch.targets, rows(batch.input_ids, batch.document_ids, batch.padding_mask, None))


def flat_gradient(model: DeepseekV4, loss: Tensor) -> Tensor:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)])


def gradients(model: DeepseekV4, batch: Batch, counts: Counts | None) -> dict[str, Tensor]:
    losses = model(*batch, counts=counts).losses
    assert tuple(losses) == OBJECTIVES
    return {name: flat_gradient(model, loss) for name, loss in losses.items()}


@pytest.fixture(scope="module")
def whole(model: DeepseekV4, batch: Batch) -> dict[str, Tensor]:
    """Gradients of the four sequences as one batch, which counts for itself."""
    return gradients(model, batch, None)


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=list(SPLITS))
def test_the_gradient_of_every_objective_is_that_of_the_whole_batch(model, batch, whole, sizes):
    pieces = split(batch, sizes)
    counts = functools.reduce(operator.add, map(counted, pieces))
    parts = [gradients(model, piece, counts) for piece in pieces]
    for name in OBJECTIVES:
        error = distance(sum(part[name] for part in parts), whole[name])
        print(f"{model.embed.weight.dtype} {len(sizes)} micro-batches {name:12} {error:.1e}")
        assert whole[name].any() and error <= LIMIT[model.embed.weight.dtype], name


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=list(SPLITS))
def test_losses_add_up_to_those_of_the_whole_batch(model, batch, sizes):
    pieces = split(batch, sizes)
    counts = functools.reduce(operator.add, map(counted, pieces))
    expected = model(*batch).losses
    parts = [model(*piece, counts=counts).losses for piece in pieces]
    for name in OBJECTIVES:
        assert distance(sum(part[name] for part in parts), expected[name]) <= LIMIT[model.embed.weight.dtype]


def test_counts_are_those_of_the_tokens_and_documents_that_are_there(batch):
    """By hand: 7 + 29 + 2 + 23 targets; 1 + 3 + 1 + 2 documents, one of them of a single token; 11 padded tokens."""
    assert [float(c) for c in counted(batch)] == [61, 6 + 26 + 2 + 21, 7, 6, 4 * N_TOKENS - 11]


def test_counts_add_up_to_those_of_the_whole_batch(batch):
    counts = functools.reduce(operator.add, map(counted, split(batch, (1, 1, 1, 1))))
    assert [float(c) for c in counts] == [float(c) for c in counted(batch)]
    assert len({float(counted(piece).lm) for piece in split(batch, (1, 1, 1, 1))}) == 4


def test_the_mean_of_micro_batch_means_is_another_gradient(model, batch, whole):
    """What every micro-batch counting for itself would give: wrong for each objective, because the sequences differ."""
    parts = [gradients(model, piece, None) for piece in split(batch, (1, 1, 1, 1))]
    for name in OBJECTIVES:
        assert distance(sum(part[name] for part in parts) / 4, whole[name]) > 1e-3, name
