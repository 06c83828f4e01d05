"""The ordered list of passes, and running it.

verify, then fuse, then verify again in the joint graph, because fusing may not change what reaches what; and once more on
the two graphs that go to code generation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from dsv4c.errors import ConfigError, FusionError, VerifyError
from dsv4c.passes import in_place
from dsv4c.passes.base import Did, Make, Pass, Record, changes, operators
from dsv4c.passes.fuse import FUSIONS, Fusion, fuse
from dsv4c.passes.fuse.expand import expanded
from dsv4c.passes.graph import reach
from dsv4c.passes.verify import RULES, verify
from dsv4c.passes.verify.subject import Subject

log = logging.getLogger("dsv4c.passes")


def _verify(make: Make) -> Did:
    """Every rule on the graph with its fused operators written out: a rule need not know what a fusion makes."""
    subject = make(expanded)
    report = verify(subject)
    if not report.ok:
        first = report.violations[0]
        raise VerifyError(
            f"the compiled graph of {subject.name} is not right ({len(report.violations)} violation(s))\n{report}",
            where=first.source, do=first.hint,
        )  # fmt: skip
    return Did({rule: n for rule, n in report.checked.items() if n})


def _fuse(fusion: Fusion) -> Pass:
    def run(make: Make) -> Did:
        subject = make()
        before = _reached(subject)
        fired = fuse(fusion, subject.graph)
        after = _reached(make())
        if before != after:
            lost = {o: sorted(before[o] ^ after[o])[:3] for o in before if before[o] != after[o]}
            raise FusionError(f"fusion {fusion.name!r} changed what objectives train: {lost}", where=subject.name)
        return Did(fired.matches, tuple(fired.excused))

    return Pass(fusion.name, "fuse", fusion.promises, ("joint",), run)


def _reached(subject: Subject) -> dict[str, set[str]]:
    reached = {name: reach([o.tangent]) for name, o in subject.objectives.items() if o.tangent is not None}
    return {name: {n for n, p in subject.parameters.items() if p.gradient in nodes} for name, nodes in reached.items()}


PIPELINE: tuple[Pass, ...] = (
    Pass("verify", "verify", "the captured graph keeps every rule", ("joint",), _verify),
    *(_fuse(fusion) for fusion in FUSIONS.values()),
    Pass("verify-fused", "verify", "the fused graph keeps every rule", ("joint",), _verify),
    Pass("verify-generated", "verify", "the graphs that code is generated from keep every rule that can be decided there",
         ("forward", "backward"), _verify),
    in_place.PASS,
)  # fmt: skip


@dataclass(frozen=True)
class Passes:
    """Which passes run: all, ``only`` these, all but ``skip``, or up to and including ``until``."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    until: str = ""

    def chosen(self) -> tuple[Pass, ...]:
        """In order. Raises ConfigError for a name that there is not."""
        names = [p.name for p in PIPELINE]
        for name in (*self.only, *self.skip, *([self.until] if self.until else [])):
            if name not in names:
                raise ConfigError(f"there is no pass {name!r}", allowed=", ".join(names), do="choose one of these")
        last = names.index(self.until) if self.until else len(names)
        return tuple(
            p for i, p in enumerate(PIPELINE)
            if i <= last and p.name not in self.skip and (not self.only or p.name in self.only)
        )  # fmt: skip

    @property
    def verifies(self) -> bool:
        return any(p.kind == "verify" for p in self.chosen())


DEFAULT = Passes()


def run(passes: Passes, make: Make, numbers: Iterator[int]) -> list[Record]:
    """Run the chosen passes of a graph's stage on it, in place; ``make`` reads the graph as it is.

    Raises VerifyError or FusionError.
    """
    subject, records = make(), []
    for p in passes.chosen():
        if subject.stage not in p.stages:
            continue
        before, began = operators(subject.graph.graph), time.perf_counter()
        did = p.run(make)
        record = Record(
            next(numbers), subject.name, subject.stage, p.name, p.kind, time.perf_counter() - began, did.matches,
            changes(before, subject.graph), did.remarks,
        )  # fmt: skip
        log.info("%s", record)
        records.append(record)
    return records


def rule_names() -> tuple[str, ...]:
    return tuple(RULES)
