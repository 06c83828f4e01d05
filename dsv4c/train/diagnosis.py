"""Where a NaN or infinity came from.

Runs only after a step has gone wrong: repeats the step's forward and backward without compilation and names the first
parameter, activation or gradient that is not finite.  Changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dsv4c.errors import NonFiniteError
from dsv4c.model.objectives import Counts
from dsv4c.model.transformer import DeepseekV4

Autocast = Callable[[torch.device], AbstractContextManager[Any]]
NOT_FOUND = "not found when the step was repeated without compilation: suspect the compiled code or the machine"
DO = "nothing was updated: resume from the last checkpoint, with a lower learning rate if this repeats"


def nonfinite(
    model: DeepseekV4, batches: Sequence[Mapping[str, Tensor]], counts: Counts, autocast: Autocast,
    result: Mapping[str, float], *, step: int,
) -> NonFiniteError:  # fmt: skip
    """The error for this step: which objective, which layer, which tensor."""
    wrong = [name for name, value in result.items() if name in model.config.objectives and not math.isfinite(value)]
    what = f"step {step}: " + (f"the loss {', '.join(wrong)} is not finite" if wrong else "a gradient is not finite")
    tensor = first_nonfinite_tensor(model) or _first_activation(model, batches, counts, autocast)
    if tensor is None:
        objective, tensor = _first_gradient(model, batches, counts, autocast)
        what += f" (objective {objective})" if objective else ""
    where = tensor or _largest_gradient(model) or NOT_FOUND
    return NonFiniteError(what, where=where, allowed="finite numbers", do=DO)


def _bad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())


def first_nonfinite_tensor(model: nn.Module) -> str | None:
    """The first parameter or buffer that is not finite, in the order of the layers."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, value in named:
            if _bad(value):
                n = int((~torch.isfinite(value)).sum())
                return f"{kind} {name}: {n} of {value.numel()} elements"
    return None


def _largest_gradient(model: nn.Module) -> str | None:
    """A gradient whose elements are finite while the sum of their squares is not."""
    sizes = {n: float(p.grad.abs().max()) for n, p in model.named_parameters() if p.grad is not None and p.grad.numel()}
    name = max(sizes, key=lambda n: sizes[n], default=None)
    if name is None or not 1e18 < sizes[name] < math.inf:
        return None
    return f"gradient of {name}: finite, but as large as {sizes[name]:.3g}: its norm overflows"


@contextmanager
def _uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _first_activation(
    model: DeepseekV4, batches: Sequence[Mapping[str, Tensor]], counts: Counts, autocast: Autocast
) -> str | None:
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # An indexer's score of "no entry" is -inf on purpose.
            if not found and not name.endswith("indexer") and any(_bad(t) for t in _tensors(output)):
                found.append(name)

        return hook

    handles = [m.register_forward_hook(watch(name)) for name, m in model.named_modules() if name]
    try:
        with torch.no_grad(), _uncompiled():
            for i, batch in enumerate(batches):
                with autocast(batch["input_ids"].device):
                    model(**batch, counts=counts)
                if found:
                    return f"output of {found[0]}, micro-batch {i}"
    finally:
        for handle in handles:
            handle.remove()
    return None


def _first_gradient(
    model: DeepseekV4, batches: Sequence[Mapping[str, Tensor]], counts: Counts, autocast: Autocast
) -> tuple[str | None, str | None]:
    """The objective, and the parameter nearest to it whose gradient is not finite."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    with _uncompiled():
        for i, batch in enumerate(batches):
            with autocast(batch["input_ids"].device):
                losses = model(**batch, counts=counts).losses
            for objective, loss in losses.items():
                if not loss.requires_grad:
                    continue
                grads = torch.autograd.grad(loss, [p for _, p in named], retain_graph=True, allow_unused=True)
                for (name, _), grad in reversed(list(zip(named, grads, strict=True))):
                    if _bad(grad):
                        return objective, f"gradient of {name}, micro-batch {i}"
    return None, None
