"""Verification of a model, of any module, and of a user's graph."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from dsv4c.compile.capture import capture_model, capture_module
from dsv4c.compile.kinds import stands_for, with_kinds
from dsv4c.config import ModelConfig
from dsv4c.errors import ConfigError
from dsv4c.model.transformer import DeepseekV4
from dsv4c.passes.graph import module_of
from dsv4c.passes.verify import Report, Subject, chosen, memory_growth, verify
from dsv4c.reach import Reach


def verify_model(
    model_or_config: DeepseekV4 | ModelConfig, *, seq_len: int, batch_size: int = 1, rules: Iterable[str] | None = None,
    dtype: torch.dtype = torch.bfloat16, whole: bool | None = None, kinds: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:  # fmt: skip
    """The verdict on a model of any size.

    A config is built on the meta device, where it takes no memory, with parameters in ``dtype`` less those that stay in
    fp32: in a model that is fp32 throughout nothing is there for the rules of precision to find.  A model is verified as it
    is, in its own dtype and under the autocast around the call.  Raises ConfigError for a rule or a kind that there is not.

    ``whole``: capture every layer, instead of the first of each kind (:mod:`dsv4c.compile.kinds`; the report says which
    layer stands for which).  By default a model is captured whole and a config by its kinds, because layers that a config
    describes cannot differ within a kind.  ``kinds``: these kinds only.  Growth is a matter of symbolic sizes, which cost
    four times as much: it is decided on the kinds, and a graph of kinds is captured symbolically where its rule is asked
    for.  ``progress`` is told what is being done.
    """
    wanted = [rule.name for rule in chosen(rules)]
    model, given = model_or_config, isinstance(model_or_config, DeepseekV4)
    if isinstance(model, ModelConfig):
        with torch.device("meta"):
            model = DeepseekV4(model).to(dtype)
    grows = memory_growth.NAME in wanted
    if kinds is not None or not (given if whole is None else whole):
        return _on_kinds(model, wanted, kinds, seq_len, batch_size, grows, progress)
    others = [name for name in wanted if name != memory_growth.NAME]
    report = _on_kinds(model, [memory_growth.NAME], None, seq_len, batch_size, True, progress) if grows else None
    if others:
        progress(f"capturing {len(model.blocks)} layers at S={seq_len}")
        subject = capture_model(model, seq_len=seq_len, batch_size=batch_size)
        progress(f"checking {len(subject.nodes):,} nodes")
        found = verify(subject, others)
        report = found + report if report else replace(found, notes=(f"all {len(model.blocks)} layers are looked at",))
    return report if report is not None else Report("DeepseekV4", ())


def _on_kinds(
    model: DeepseekV4, rules: list[str], kinds: Sequence[str] | None, seq_len: int, batch_size: int, symbolic: bool,
    progress: Callable[[str], None],
) -> Report:  # fmt: skip
    """The verdict on the first layer of each kind; symbolic sizes need a batch of two to be told from a size that is 1."""
    small = with_kinds(model, kinds)
    sizes = "symbolic B and S" if symbolic else f"S={seq_len}"
    progress(f"capturing {len(small.blocks)} of {len(model.blocks)} layers, one of each kind, with {sizes}")
    batch_size = max(batch_size, 2) if symbolic else batch_size
    subject = capture_model(small, seq_len=seq_len, batch_size=batch_size, symbolic=symbolic)
    progress(f"checking {len(subject.nodes):,} nodes")
    notes = stands_for(model.config, kinds)
    if symbolic:
        notes += tuple(f"largest at S={seq_len}: {line}" for line in memory_growth.largest(subject, seq_len))
    return replace(verify(subject, rules), notes=notes)


def verify_module(
    module: nn.Module, args: tuple[Any, ...], policy: Mapping[str, Reach], *, rules: Iterable[str] | None = None,
    router: tuple[str, ...] = (),
) -> Report:  # fmt: skip
    """The verdict on any module whose forward returns a dict of scalar losses.

    ``policy``: for each objective what its gradient may and must reach, as glob patterns over parameter names; ``router``:
    glob patterns over the names of router weights.  Raises ConfigError for a router that there is not.
    """
    _check_routers(router, [name for name, _ in (*module.named_parameters(), *module.named_modules())])
    return verify(capture_module(module, args, policy, routers=router), rules)


def verify_graph(gm: GraphModule, *, rules: Iterable[str] | None = None, router: tuple[str, ...] = ()) -> Report:
    """The verdict on a user's own graph whose nodes carry ``meta["val"]``: the rules that need no tangents.

    ``router``: names of the placeholders, or module paths, that are router weights.  Raises ConfigError for one that there
    is not.
    """
    _check_routers(router, [name for n in gm.graph.nodes for name in (n.name, str(n.target), module_of(n)) if name])
    return verify(Subject("graph", gm, routers=router), rules)


def _check_routers(patterns: tuple[str, ...], names: list[str]) -> None:
    """A pattern that matches nothing would prove nothing."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            raise ConfigError(
                f"no parameter, placeholder or module is called {pattern!r}", where="router",
                allowed="glob patterns over the names of router weights or router modules",
                do=f"did you mean {near[0]!r}?" if near else "correct the name",
            )  # fmt: skip
