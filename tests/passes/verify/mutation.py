"""Wrong variants of the model, made in memory: the source of a function is changed and compiled at its own file and lines.

What a rule then names as the place of a defect is a line that a reader can open.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

from dsv4c import DeepseekV4, ModelConfig
from dsv4c.compile.capture import capture_model
from dsv4c.passes.verify import Report, Subject, verify

SEQ_LEN = 24


def one_layer(ratio: int, *, hashed: bool = False, **changes: Any) -> ModelConfig:
    """The tiny model with one decoder layer of this compress ratio and no MTP layer: what one capture costs least with."""
    kind = {"num_hidden_layers": 1, "compress_ratios": (ratio,), "num_nextn_predict_layers": 0}
    options = {"num_hash_layers": int(hashed), "index_topk": 3, "indexer_kl_coef": 1e-2 if ratio == 4 else 0.0}
    return ModelConfig.preset("tiny", **{**kind, **options, **changes})


CONFIGS: dict[str, ModelConfig] = {
    "swa": one_layer(0),
    "csa": one_layer(4),
    "hca": one_layer(8),
    "swa-hash": one_layer(0, hashed=True),
    "csa-hash": one_layer(4, hashed=True),
    "hca-hash": one_layer(8, hashed=True),
    "mtp": one_layer(0, compress_ratios=(0, 0), num_nextn_predict_layers=1),
    "two": one_layer(0, num_hidden_layers=2, compress_ratios=(0, 4), indexer_kl_coef=1e-2),  # a CSA layer above another
}


@dataclass(frozen=True)
class Mutant:
    """A changed source, and what the rules have to say about it.

    ``target`` is a function, a method or a property; ``changes`` are replacements (old, new) in its source that keep the
    number of lines.  ``rule`` has to report it, None for a right variant, on which every rule has to be silent.
    ``line_of`` is a part of the source line (of the file as it is) that the violation has to name, ``says`` a part of its
    message.  ``config`` is a key of CONFIGS or a config.  ``dtype`` is that of the parameters; ``autocast`` captures
    under bf16 autocast on the CPU (the meta device has none).  ``around`` is a context in which the graph is captured;
    ``also`` are further targets with their changes.  ``symbolic``: with symbolic sizes of batch and sequence;
    ``recompute``: with activation checkpointing of every layer.
    """

    name: str
    target: Any
    changes: tuple[tuple[str, str], ...]
    rule: str | None = None
    line_of: str = ""
    says: str = ""
    config: str | ModelConfig = "csa"
    stage: str = "sparse"
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    also: tuple[tuple[Any, tuple[tuple[str, str], ...]], ...] = ()
    seq_len: int = SEQ_LEN
    symbolic: bool = False
    recompute: bool = False


def function_of(target: Any) -> FunctionType:
    return inspect.unwrap(target.fget if isinstance(target, property) else target)


def mutated_code(function: FunctionType, changes: tuple[tuple[str, str], ...]) -> CodeType:
    """The function's code with its source changed, at its own file and line numbers; decorators stay as they are."""
    first = function.__code__.co_firstlineno
    source = textwrap.dedent(inspect.getsource(function))
    for i, (old, _) in enumerate(changes):
        assert old in source, f"{old!r} is not in {function.__qualname__}: the mutant has to follow the code"
        source = source.replace(old, f"__mark_{i}__")
    for i, (_, new) in enumerate(changes):
        source = source.replace(f"__mark_{i}__", new)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    ast.increment_lineno(definition, first - 1)
    free = function.__code__.co_freevars  # super() has one; it has to have the same after the change
    around = ast.parse(f"def around({', '.join(free)}): pass").body[0]
    assert isinstance(around, ast.FunctionDef)
    around.body = [definition]
    flags = __future__.annotations.compiler_flag
    module = compile(ast.Module([around], []), function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    (outer,) = (c for c in module.co_consts if isinstance(c, CodeType))
    return next(c for c in outer.co_consts if isinstance(c, CodeType) and c.co_name == definition.name)


@contextmanager
def mutated(target: Any, *changes: tuple[str, str]) -> Iterator[None]:
    """The function changed inside this block; nothing is done where there is no change."""
    if not changes:
        yield
        return
    function = function_of(target)
    before = function.__code__
    function.__code__ = mutated_code(function, changes)
    try:
        yield
    finally:
        function.__code__ = before


def subject(
    config: str | ModelConfig = "csa", *, stage: str = "sparse", dtype: torch.dtype = torch.bfloat16,
    autocast: bool = False, seq_len: int = SEQ_LEN, symbolic: bool = False, recompute: bool = False,
) -> Subject:  # fmt: skip
    """The captured model: parameters in ``dtype`` less those that stay in fp32, or in fp32 under bf16 autocast."""
    with torch.device("cpu" if autocast else "meta"):
        model = DeepseekV4(CONFIGS[config] if isinstance(config, str) else config)
    model.set_stage(stage)
    model.set_recompute("all" if recompute else "off")
    sizes = {"seq_len": seq_len, "batch_size": 2 if symbolic else 1, "symbolic": symbolic}
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            return capture_model(model, **sizes)
    return capture_model(model.to(dtype), **sizes)


def verdict(mutant: Mutant, rules: tuple[str, ...] | None = None) -> Report:
    """What the rules (all by default) say about the mutant."""
    with ExitStack() as stack:
        for target, changes in ((mutant.target, mutant.changes), *mutant.also):
            stack.enter_context(mutated(target, *changes))
        stack.enter_context(mutant.around())
        names = ("stage", "dtype", "autocast", "seq_len", "symbolic", "recompute")
        return verify(subject(mutant.config, **{name: getattr(mutant, name) for name in names}), rules)


def source_line(source: str) -> str:
    """The text of the line that ``file:line`` names, as the file has it."""
    file, _, number = source.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdigit() else ""
