"""What the gradient of an objective may reach: the policy that passes check and that the model declares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Reach:
    """Glob patterns over parameter names.

    ``may``: what the objective's gradient is allowed to reach; ``must``: patterns of which every parameter has to be
    reached; ``never``: exceptions from ``may``.  ``exempt``: parameters that a ``must`` pattern matches and that need not
    be reached (a hash router has no balance loss).
    """

    may: tuple[str, ...] = ("*",)
    must: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()

    def allows(self, name: str) -> bool:
        return matches(name, self.may) and not matches(name, self.never)

    def required(self, names: Iterable[str]) -> list[str]:
        """Of these parameters, those that have to be reached."""
        return [n for n in names if matches(n, self.must) and not matches(n, self.exempt)]

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The ``must`` patterns that match no parameter at all."""
        names = list(names)
        return [p for p in self.must if not any(fnmatchcase(n, p) for n in names)]


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)
