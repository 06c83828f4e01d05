"""Oracles in fp64: torch.func through the references against autograd through the operators, and derivatives on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vjp

from dsv4c import DeepseekV4, ops
from dsv4c.model.layout import LayerLayout, layer_layout, rows
from dsv4c.model.norms import rms
from dsv4c.ops import reference
from tests.parity.models import Batch, distance, tiny

OBJECTIVES = ("lm", "mtp", "seq_balance", "indexer_kl")
EXACT = 1e-12
both = pytest.mark.parametrize("which", [reference, ops], ids=["reference", "operator"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    return tiny(indexer_kl_coef=1e-2).double()


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Two rows: documents of 14 and 17 tokens that no ratio divides, and 5 padded tokens behind 26 real ones."""
    text = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(3))
    documents, real = torch.zeros(2, 31, dtype=torch.int64), torch.ones(2, 31, dtype=torch.bool)
    documents[0, 14:], real[1, 26:] = 1, False
    return Batch(text[:, :-1], text[:, 1:], documents, real)


@pytest.fixture(scope="module")
def pulled_back(model: DeepseekV4, batch: Batch) -> Callable[[str], dict[str, Tensor]]:
    """The gradients of one objective by torch.func, through the references."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def losses(p: dict[str, Tensor]) -> dict[str, Tensor]:
        return functional_call(model, p, tuple(batch)).losses

    with ops.use_reference():
        values, pull = vjp(losses, parameters)

    def one(objective: str) -> dict[str, Tensor]:
        (found,) = pull({name: torch.full_like(v, float(name == objective)) for name, v in values.items()})
        return found

    return one


@pytest.fixture(scope="module")
def propagated(model: DeepseekV4, batch: Batch) -> Callable[[str], dict[str, Tensor | None]]:
    """The gradients of one objective by autograd, through the operators; None where there is no path."""
    losses = model(*batch).losses
    names, parameters = zip(*model.named_parameters(), strict=True)
    assert set(losses) == set(OBJECTIVES)

    def one(objective: str) -> dict[str, Tensor | None]:
        found = torch.autograd.grad(losses[objective], parameters, retain_graph=True, allow_unused=True)
        return dict(zip(names, found, strict=True))

    return one


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_gradient_through_the_operators_is_that_of_torch_func_through_the_references(
    pulled_back, propagated, objective
):
    expected, found = pulled_back(objective), propagated(objective)
    assert expected.keys() == found.keys()
    assert any(g is not None for g in found.values())
    for name, gradient in found.items():
        if gradient is None:
            assert not expected[name].any(), name
        else:
            assert distance(gradient, expected[name]) <= 1e-9, name


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_reaches_what_it_trains_and_nothing_else(pulled_back, objective):
    """Section 9, by torch.func: the indexer's loss reaches the indexer, and no other loss does."""
    reached = {name for name, gradient in pulled_back(objective).items() if gradient.any()}
    indexer = {name for name in pulled_back("lm") if ".indexer." in name}
    assert indexer and (reached == indexer if objective == "indexer_kl" else reached and not reached & indexer)


# ---- small formulas: jacrev against the derivative that the specification writes out -------------------------------------


def jacobian(which: Any, formula: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """By torch.func through a reference; an operator is differentiated by autograd only."""
    return jacrev(formula)(x) if which is reference else torch.autograd.functional.jacobian(formula, x)


def value_and_pull(which: Any, formula: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Callable[..., Any]]:
    """``torch.func.vjp``, by autograd where it is an operator."""
    if which is reference:
        return vjp(formula, *inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    value = formula(*leaves)
    return value.detach(), lambda upstream: torch.autograd.grad(value, leaves, upstream)


def test_rms_has_its_written_derivative():
    """``dy_i/dx_j = r delta_ij - r^3 x_i x_j / D``, r = 1/sqrt(mean(x^2) + eps)."""
    x, eps = random(7), 1e-6
    r = (x.square().mean() + eps).rsqrt()
    assert distance(jacrev(lambda v: rms(v, eps))(x), r * torch.eye(7).double() - r**3 * x.outer(x) / 7) < EXACT


@both
def test_sqrt_softplus_has_its_written_derivative(which):
    """``ds/dl = sigmoid(l) / (2 s)``, and e^(l/2)/2 where softplus underflows (section 6)."""
    logits = torch.tensor([-700.0, -103.5, -30.0, -20.5, -19.5, -3.0, 0.0, 2.0, 25.0], dtype=torch.float64)
    slope = jacobian(which, lambda x: which.route(x[None], None, None, None, 1, 1.5)[2][0], logits).diagonal()
    # log1p(e^l) in place of softplus, whose linear branch above 20 is 2e-9 off.
    written = logits.sigmoid() / (2 * torch.log1p(logits.exp()).sqrt())
    assert torch.allclose(slope[2:], written[2:], rtol=1e-8, atol=0)
    assert torch.allclose(slope[:2], (logits[:2] / 2).exp() / 2, rtol=1e-12, atol=0)


@both
def test_clamped_swiglu_has_its_written_derivative(which):
    """``dg = u sigma(g) (1 + g (1 - sigma(g)))`` up to the limit, ``du = silu(g)`` inside it, 0 beyond (invariant 27)."""
    limit = 2.0
    g = torch.tensor([-9.0, -1.0, 0.5, 1.9, 2.1, 8.0], dtype=torch.float64)
    u = torch.tensor([0.3, -1.5, -2.5, 2.5, 1.0, -1.0], dtype=torch.float64)
    found = jacobian(which, lambda v: which.swiglu_clamp(v[None], None, limit)[0], torch.cat((g, u)))
    gate, up = g.clamp(max=limit), u.clamp(-limit, limit)
    dg = up * gate.sigmoid() * (1 + gate * (1 - gate.sigmoid())) * (g <= limit)
    du = gate * gate.sigmoid() * (u.abs() <= limit)
    assert distance(found, torch.cat((dg.diag(), du.diag()), 1)) < EXACT


@pytest.mark.parametrize("inverse", [False, True])
def test_a_rotation_has_its_own_matrix_as_derivative(inverse):
    """Blocks ``[[cos, -sin], [sin, cos]]``, transposed for the inverse, and the identity on the plain channels."""
    angle = random(1, 1, 2)
    jacobian = jacrev(lambda v: reference.rope(v.view(1, 1, 7), angle.cos(), angle.sin(), inverse).flatten())(random(7))
    blocks = [torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]], dtype=torch.float64) for a in angle.flatten()]
    written = torch.block_diag(torch.eye(3, dtype=torch.float64), *(b.T if inverse else b for b in blocks))
    assert distance(jacobian, written) < EXACT


def test_sinkhorn_has_the_product_of_its_steps_as_derivative():
    """``C' = C/(s+eps)`` has ``dC' = dC/(s+eps) - C' ds/(s+eps)``; before the steps, that of a softmax (section 1.4)."""
    n, iters, eps = 3, 20, 1e-6
    logits = random(n, n)
    y = logits.softmax(-1)
    written = torch.block_diag(*(row.diag() - row.outer(row) for row in y))
    same_column, same_row = torch.eye(n).double().repeat(n, n), torch.block_diag(*(torch.ones(n, n).double(),) * n)
    c = (y + eps).flatten()
    for same in (same_column, *(same_row, same_column) * (iters - 1)):
        s = same @ c + eps
        c = c / s
        written = (torch.eye(n * n) - c[:, None] * same) / s[:, None] @ written
    for formula in (reference.sinkhorn, ops.sinkhorn):
        found = torch.autograd.functional.jacobian(lambda m, f=formula: f(m, iters, eps), logits).reshape(n * n, n * n)
        assert distance(found, written) < 1e-10
    assert distance(jacrev(lambda m: reference.sinkhorn(m, iters, eps))(logits).reshape(n * n, n * n), written) < 1e-10
    assert distance(ops.sinkhorn(logits, iters, eps).flatten(), c) < EXACT


# ---- the compressor (section 4) ------------------------------------------------------------------------------------------


def slots(at: LayerLayout, ratio: int, overlap: bool) -> Iterator[tuple[int, int, list[tuple[int, int, bool]]]]:
    """Row, entry and the entry's slots: (token, place in the window, whether it is the previous half)."""
    for b, ends in enumerate(at.entry_end.tolist()):
        for p, end in enumerate(ends):
            if end >= at.start.shape[1]:
                continue
            found = [(end - ratio + 1 + j, j, False) for j in range(ratio)]
            if overlap and end - ratio >= at.start[b, end]:
                found = [(t - ratio, j, True) for t, j, _ in found] + found
            yield b, p, found


@both
@pytest.mark.parametrize("overlap", [True, False])
def test_the_compressor_has_its_closed_form_and_derivative(model, batch, overlap, which):
    """``da_j = s_j G``, ``de_j = s_j (a_j - entry) G``, dape their sum over windows, half by half."""
    ratio, c = (4, 5) if overlap else (8, 5)
    at = layer_layout(rows(batch.input_ids, batch.document_ids, batch.padding_mask, None), model.config, ratio)
    width = 2 * c if overlap else c
    a, e, ape = random(2, 31, width, seed=1), random(2, 31, width, seed=2), random(ratio, width, seed=3)
    places = at.entry_end, at.entry_has_previous
    entries, pull = value_and_pull(which, lambda *x: which.compress(*x, *places, overlap), a, e, ape)
    upstream = random(*entries.shape, seed=4)
    upstream[at.entry_end == 31] = 0.0  # what no document has is nobody's entry
    da, de, dape = torch.zeros_like(a), torch.zeros_like(e), torch.zeros_like(ape)
    for b, p, of_entry in slots(at, ratio, overlap):
        t, j = [s[0] for s in of_entry], [s[1] for s in of_entry]
        half = torch.stack([torch.arange(c) + (0 if previous or not overlap else c) for *_, previous in of_entry])
        rows_, slot = torch.tensor(t)[:, None], torch.tensor(j)[:, None]
        values = a[b][rows_, half]
        weights = (e[b][rows_, half] + ape[slot, half]).softmax(0)
        entry = (weights * values).sum(0)
        assert distance(entries[b, p], entry) < EXACT
        da[b].index_put_((rows_, half), weights * upstream[b, p], accumulate=True)
        slope = weights * (values - entry) * upstream[b, p]
        de[b].index_put_((rows_, half), slope, accumulate=True)
        dape.index_put_((slot, half), slope, accumulate=True)
    for found, written in zip(pull(upstream), (da, de, dape), strict=True):
        assert written.any() and distance(found, written) < EXACT


# ---- attention and the indexer's loss (sections 3 and 5.1) ---------------------------------------------------------------


def attention_inputs() -> tuple[list[Tensor], list[Any]]:
    at = torch.zeros(2, 13, dtype=torch.int64)
    ends = torch.tensor([[3, 7, 11]] * 2)
    q, kv, entries, sink = random(2, 13, 3, 6), random(2, 13, 6, seed=1), random(2, 3, 6, seed=2), random(3, seed=3)
    return [q, kv, entries, sink], [at, ends, None, 6**-0.5, 5, 4]


def test_the_sink_has_its_written_derivative():
    """``dsink_h = -sum_{b,t} e^(sink_h - lse) <dO, O>``."""
    inputs, rest = attention_inputs()
    (out, lse), pull = vjp(lambda *x: reference.sparse_attention(*x, *rest), *inputs)
    upstream = random(*out.shape, seed=5)
    written = -(torch.exp(inputs[3] - lse) * (upstream * out).sum(-1)).sum((0, 1))
    assert distance(pull((upstream, torch.zeros_like(lse)))[3], written) < EXACT


def test_attention_has_its_written_derivative():
    """``dz = w (<dO,KV> - delta)``, ``dq = scale dz KV``, ``dKV = scale dz^T q + w^T dO``: as a key and as a value."""
    (q, kv, entries, sink), rest = attention_inputs()
    scale = rest[3]
    (out, lse), pull = vjp(lambda *x: reference.sparse_attention(*x, *rest), q, kv, entries, sink)
    upstream = random(*out.shape, seed=5)
    keys, t = torch.cat((kv, entries), 1), torch.arange(13)[:, None]
    stands = torch.cat((torch.arange(13), rest[1][0]))
    seen = (stands <= t) & (torch.cat((torch.arange(13) + 5, torch.full((3,), 99))) > t)
    w = torch.exp(scale * torch.einsum("bthc,bnc->bthn", q, keys) - lse[..., None]) * seen[:, None]
    delta = (upstream * out).sum(-1, keepdim=True)
    dz = w * (torch.einsum("bthc,bnc->bthn", upstream, keys) - delta)
    dkeys = scale * torch.einsum("bthn,bthc->bnc", dz, q) + torch.einsum("bthn,bthc->bnc", w, upstream)
    written = scale * torch.einsum("bthn,bnc->bthc", dz, keys), dkeys[:, :13], dkeys[:, 13:]
    for found, expected in zip(pull((upstream, torch.zeros_like(lse))), written, strict=False):
        assert distance(found, expected) < EXACT


@both
def test_the_indexer_loss_has_the_gradient_student_minus_teacher(which):
    """``dL/dI = (Y - T)/(B S)``; rows sum to 0, a row without entries and a padded one get nothing (invariant 22)."""
    batch, n_tokens, k = 2, 6, 4
    ids = torch.arange(k).expand(batch, n_tokens, k).clone()
    ids[:, 0], ids[:, 1, 2:] = -1, -1
    scores = random(batch, n_tokens, k).masked_fill(ids < 0, float("-inf"))
    teacher = random(batch, n_tokens, k, seed=1).masked_fill(ids < 0, float("-inf")).softmax(-1).nan_to_num()
    real = torch.ones(batch, n_tokens, dtype=torch.bool)
    real[1, 5] = False
    slope = jacobian(which, lambda x: which.indexer_kl(teacher, x, real)[0] / (batch * n_tokens), scores)
    written = (scores.softmax(-1).nan_to_num() - teacher) / (batch * n_tokens) * real[..., None]
    assert slope.isfinite().all() and not slope[ids < 0].any() and not slope[1, 5].any()
    assert distance(slope, written) < 1e-8  # the guards of 1e-10 inside the logarithms
    assert slope.sum(-1).abs().max() < 1e-10


@both
def test_a_student_equal_to_its_teacher_up_to_a_constant_has_learned_all(which):
    """Invariant 22: KL = 0 for I = log T + const."""
    teacher = random(1, 5, 4).softmax(-1)
    real = torch.ones(1, 5, dtype=torch.bool)
    loss, _ = which.indexer_kl(teacher, teacher.log() + 3.0, real)
    slope = jacobian(which, lambda x: which.indexer_kl(teacher, x, real)[0], teacher.log() + 3.0)
    assert abs(float(loss)) < 1e-14 and slope.abs().max() < 1e-9
    assert which.indexer_kl(teacher, random(1, 5, 4, seed=2), real)[0] > 0
