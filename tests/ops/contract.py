"""What every operator promises, whatever it computes: the checks that the tests of each operator call.

Sources: the architecture's rule 4 (functional, no alias, strides as the fake says, any strides taken); cases B49 and B50.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.ops.cases import incoming, transposed

FORWARD = {torch.float32: 1e-6, torch.float64: 1e-12}
GRADIENT = {torch.float32: 1e-5, torch.float64: 1e-10}
Operator = Callable[..., Any]


def results(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def relative_error(a: Tensor, b: Tensor, at_least: float = 0.0) -> float:
    """``|a - b| / |b|`` over what is finite, |b| taken for ``at_least`` if smaller; what is not has to be the same."""
    finite = torch.isfinite(b)
    assert torch.equal(torch.isfinite(a), finite)
    assert torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num())
    a, b = a.detach()[finite].double(), b.detach()[finite].double()
    distance = (a - b).norm()
    return float(distance / b.norm().clamp(min=at_least)) if distance > 0 else 0.0


def differentiable(args: Sequence[Any]) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor) and a.requires_grad]


def detached(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(a.detach() if isinstance(a, Tensor) else a for a in args)


def gradients(op: Operator, args: Sequence[Any], grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Gradients of the inputs for these gradients of the outputs that have one."""
    pairs = [(o, g) for o, g in zip(results(op(*args)), grads, strict=True) if o.requires_grad and g is not None]
    return torch.autograd.grad([o for o, _ in pairs], differentiable(args), [g for _, g in pairs])


def cotangents(outputs: Sequence[Tensor], seed: int = 5) -> list[Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype) if o.is_floating_point() else None
        for o in outputs
    ]


def assert_equals_formula(op: Operator, formula: Operator, args: Sequence[Any]) -> None:
    """Operator and reference agree forward and backward, to the limits of the dtype of the first argument."""
    dtype = args[0].dtype
    outputs, expected = results(op(*args)), results(formula(*args))
    for o, e in zip(outputs, expected, strict=True):
        assert (o.shape, o.dtype) == (e.shape, e.dtype)
        assert relative_error(o, e) <= FORWARD[dtype]
    grads = cotangents(expected)
    assert_same_gradients(gradients(op, args, grads), gradients(formula, args, grads), GRADIENT[dtype])


def assert_same_gradients(ours: Sequence[Tensor], theirs: Sequence[Tensor], limit: float) -> None:
    """Each within the limit; a sum that nearly cancels (a sink's) is measured against a tenth of the largest gradient."""
    floor = max(float(g.detach().nan_to_num().norm()) for g in theirs) / 10
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b, floor) <= limit


def assert_functional(op: Operator, args: Sequence[Any]) -> None:
    """Outputs are contiguous, as the fake says, share no memory with an input, and no input is changed (B49, B50)."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    before = [t.detach().clone() for t in tensors]
    outputs = results(op(*args))
    fakes = results(op(*(a.detach().to("meta") if isinstance(a, Tensor) else a for a in args)))
    taken = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
    for o, fake in zip(outputs, fakes, strict=True):
        assert o.is_contiguous()
        assert (o.shape, o.dtype, o.stride()) == (fake.shape, fake.dtype, fake.stride())
        assert not o.numel() or o.untyped_storage().data_ptr() not in taken
    assert all(torch.equal(t.nan_to_num(), b.nan_to_num()) for t, b in zip(tensors, before, strict=True))


def assert_takes_any_strides(op: Operator, args: Sequence[Any]) -> None:
    """Inputs in another order of memory give the same outputs and gradients."""
    other = [
        transposed(a.detach()).requires_grad_(a.requires_grad) if isinstance(a, Tensor) and a.numel() else a for a in args
    ]
    assert any(isinstance(a, Tensor) and not a.is_contiguous() for a in other)
    assert_functional(op, other)
    dtype, outputs = args[0].dtype, results(op(*args))
    for a, b in zip(results(op(*other)), outputs, strict=True):
        assert relative_error(a, b) <= FORWARD[dtype]
    if differentiable(args):
        grads = cotangents(outputs)
        assert_same_gradients(gradients(op, other, grads), gradients(op, args, grads), GRADIENT[dtype])


def assert_takes_any_gradient(op: Operator, args: Sequence[Any]) -> None:
    """Incoming gradients of stride 0, expanded and transposed give what their contiguous copies give."""
    dtype, outputs = args[0].dtype, results(op(*args))
    for i, output in enumerate(outputs):
        if not output.requires_grad:
            continue
        for grad in incoming(output.shape, output.dtype).values():
            loose, tight = [None] * len(outputs), [None] * len(outputs)
            loose[i], tight[i] = grad, grad.contiguous()
            assert_same_gradients(gradients(op, args, loose), gradients(op, args, tight), FORWARD[dtype])


def assert_deterministic(op: Operator, args: Sequence[Any]) -> None:
    """Twice the same bits, forward and backward."""
    first, second = results(op(*args)), results(op(*args))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    if differentiable(args):
        grads = cotangents(first)
        pairs = zip(gradients(op, args, grads), gradients(op, args, grads), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def assert_rows_stay_apart(op: Operator, args: Sequence[Any], poisoned: int, value: float) -> None:
    """NaN or Inf in row 0 of argument ``poisoned`` leaves the other rows of outputs and gradients as they were.

    Gradients of arguments that have no batch axis (shared parameters) are not looked at.
    """
    batch = len(args[0])
    bad = args[poisoned].detach().clone()
    bad[0] = value
    spoilt = [*args[:poisoned], bad.requires_grad_(args[poisoned].requires_grad), *args[poisoned + 1 :]]
    before, after = results(op(*args)), results(op(*spoilt))
    for a, b in zip(after, before, strict=True):
        assert torch.equal(a[1:], b[1:])
    if not differentiable(args):
        return
    grads = cotangents(before)
    for x, a, b in zip(differentiable(args), gradients(op, spoilt, grads), gradients(op, args, grads), strict=True):
        if x.shape[0] == batch:
            assert torch.equal(a[1:], b[1:])
