"""Rules that prove a graph right. Each file holds one rule: one class of error, found by structure and never by running.

A rule is a name, the sentence that it proves, the stages of compilation at which it can be decided, and a function from a
:class:`Subject` to violations.  ``check`` yields a :class:`Checked` for every place it looked at, so that a report says on
how many places a verdict stands: a rule that found nothing to look at has proved nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from dsv4c.errors import ConfigError
from dsv4c.passes.verify import (
    fp32_islands,
    gradient_reach,
    memory_growth,
    mixing,
    no_host_sync,
    no_recompute_of_random,
    objective_reported,
    rotation,
    router_fp32,
    scales,
)
from dsv4c.passes.verify.report import Report, Violation
from dsv4c.passes.verify.rule import Rule
from dsv4c.passes.verify.subject import Objective, Parameter, Subject

RULES: dict[str, Rule] = {
    module.RULE.name: module.RULE
    for module in (
        gradient_reach,
        objective_reported,
        router_fp32,
        fp32_islands,
        rotation,
        scales,
        mixing,
        memory_growth,
        no_host_sync,
        no_recompute_of_random,
    )
}

__all__ = ["RULES", "Objective", "Parameter", "Report", "Rule", "Subject", "Violation", "chosen", "verify"]


def chosen(rules: Iterable[str] | None) -> list[Rule]:
    """The rules with these names, all of them for None.  Raises ConfigError for a name that there is not."""
    names = list(RULES) if rules is None else list(rules)
    for name in names:
        if name not in RULES:
            raise ConfigError(f"there is no rule {name!r}", allowed=", ".join(RULES), do="choose one of these")
    return [RULES[name] for name in names]


def verify(subject: Subject, rules: Iterable[str] | None = None) -> Report:
    """The verdict of these rules on a graph; those that cannot be decided at its stage are left out of the report."""
    found: list[Violation] = []
    checked: dict[str, int] = {}
    for rule in chosen(rules):
        if subject.stage in rule.stages and rule.applies(subject):
            outcomes = list(rule.check(subject))
            found += [o for o in outcomes if isinstance(o, Violation)]
            checked[rule.name] = len({id(o) if isinstance(o, Violation) else o for o in outcomes})
    return Report(subject.name, tuple(checked), tuple(found), checked)
