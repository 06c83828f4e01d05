"""The form of a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsv4c.passes.verify.report import Violation
from dsv4c.passes.verify.subject import Subject


@dataclass(frozen=True)
class Checked:
    """A place that a rule looked at and found right."""

    place: str


@dataclass(frozen=True)
class Rule:
    """``proves`` is one sentence; ``check`` yields a Checked or a Violation for each place that it looks at.

    ``stages`` and ``applies`` say on which graphs it can be decided.
    """

    name: str
    proves: str
    check: Callable[[Subject], Iterator[Checked | Violation]]
    stages: tuple[str, ...] = ("joint",)
    applies: Callable[[Subject], bool] = lambda _: True
