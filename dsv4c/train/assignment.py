"""Which optimizer a parameter belongs to, by its name, and where a tensor holds several independent matrices.

The tables behind `dsv4c.train.optim`.  Source: paper, sections 2.4 and 4.2.2; specification, section 7.

AdamW has the embedding, the head, RMSNorm weights, bases and scales of the hyper-connections, and whatever else has
fewer than two dimensions (attention sinks); Muon has the rest.

**Weight decay.** The paper states 0.1 for both optimizers and names no exception, so by default it falls on every
parameter.  `OptimConfig.decay_vectors` = False excludes norms, sinks, bases and scales, as is usual elsewhere: decay pulls
those towards a value that means nothing in particular.

**Independent matrices.** Muon orthogonalises each logically independent weight.  Several of them share a tensor here
for the sake of one matrix product (gate and up projection; the two halves of an overlapping compressor; the three
maps of a hyper-connection; the groups of the output projection), and `MATRIX_ROWS` says where to cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Rule:
    """Parameters whose name matches ``pattern`` (glob) go to ``algorithm``; ``decay``: weight decay falls on them."""

    pattern: str
    algorithm: str
    decay: bool


RULES: tuple[Rule, ...] = (
    Rule("embed.weight", "adamw", True),
    Rule("head.weight", "adamw", True),
    Rule("*norm.weight", "adamw", False),
    Rule("*hc_*.base", "adamw", False),
    Rule("*hc_*.scale", "adamw", False),
)
"""First match wins; then fewer than two dimensions: AdamW without decay, two or three: Muon."""


def _equal_rows(rows: int, size: int) -> tuple[int, ...]:
    return (size,) * (rows // size)


def _hyper_connection_rows(name: str, rows: int, _: Parameters) -> tuple[int, ...]:
    n = math.isqrt(rows + 1) - 1  # rows = n + n + n^2: the maps pre, post and comb of n streams
    return (n, n, n * n) if rows == n * (n + 2) else (rows,)


def _compressor_rows(name: str, rows: int, params: Parameters) -> tuple[int, ...]:
    norm = params.get(name.rsplit(".", 2)[0] + ".norm.weight")
    return (rows,) if norm is None else _equal_rows(rows, norm.numel())


def _output_group_rows(name: str, rows: int, params: Parameters) -> tuple[int, ...]:
    queries = params.get(name.removesuffix(".weight").rsplit(".", 1)[0] + ".wq_b.weight")
    if queries is None:
        return (rows,)
    groups = queries.shape[0] // params[name].shape[-1]  # wo_a is [G g, Hc/G], wq_b [Hc, q]
    return _equal_rows(rows, rows // max(1, groups))


MATRIX_ROWS: tuple[tuple[str, Callable[[str, int, Parameters], tuple[int, ...]]], ...] = (
    ("*.w13", lambda name, rows, params: _equal_rows(rows, rows // 2)),
    ("*.w13.weight", lambda name, rows, params: _equal_rows(rows, rows // 2)),
    ("*hc_*.fn", _hyper_connection_rows),
    ("*.compressor.wkv.weight", _compressor_rows),
    ("*.compressor.wgate.weight", _compressor_rows),
    ("*.attn.wo_a*", _output_group_rows),
)
"""Name pattern -> rows of the independent matrices stacked in a [rows,cols] (or [E,rows,cols]) weight."""


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their name in the model as written, whatever wrappers `torch.compile` put around its parts."""
    return {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}


def matrix_rows(name: str, params: Parameters) -> tuple[int, ...] | None:
    """Rows of each independent matrix in a Muon weight; None when it is one matrix, or a stack of whole ones."""
    if name.endswith("wo_a") and params[name].ndim == 3:
        return None
    rows = params[name].shape[-2]
    for pattern, cut in MATRIX_ROWS:
        if fnmatchcase(name, pattern):
            blocks = cut(name, rows, params)
            return blocks if len(blocks) > 1 and sum(blocks) == rows else None
    return None


def rule_for(name: str, param: Tensor) -> Rule:
    for rule in RULES:
        if fnmatchcase(name, rule.pattern):
            return rule
    return Rule(name, "adamw", False) if param.ndim < 2 else Rule(name, "muon", True)
