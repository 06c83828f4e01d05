"""What verification found: violations, as data and as text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from torch.fx import Node

from dsv4c.passes.graph import describe, module_of, source_of


@dataclass(frozen=True)
class Violation:
    """One defect.

    ``node`` is the name of the node in the graph, ``module`` the path of the module it belongs to, ``source`` the
    ``file:line`` in the user's code, ``path`` the nodes (one line each) that show how the defect comes about, ``hint`` what
    to write instead.
    """

    rule: str
    message: str
    node: str = ""
    module: str = ""
    source: str = ""
    path: tuple[str, ...] = ()
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"{self.rule}: {self.message}"]
        if self.source or self.module:
            lines.append(f"  where:   {self.source or '(no source line)'}{f'  in {self.module}' if self.module else ''}")
        lines += [f"  path:    {line}" if i == 0 else f"           {line}" for i, line in enumerate(self.path)]
        if self.hint:
            lines.append(f"  do:      {self.hint}")
        return "\n".join(lines)


def violation(
    rule: str, message: str, at: Node | None, *, path: Iterable[Node | str] = (), hint: str = "", source: str = ""
) -> Violation:  # fmt: skip
    """A violation at a node, its module and source line filled in; ``source``: a line that says more than the node's own."""
    lines = tuple(describe(step) if isinstance(step, Node) else step for step in path)
    if at is None:
        return Violation(rule, message, source=source, path=lines, hint=hint)
    return Violation(rule, message, at.name, module_of(at), source or source_of(at), lines, hint)


@dataclass(frozen=True)
class Report:
    """The verdict on one graph, or on several: what was proved, and what was not.

    ``notes`` say what the verdict stands on: which layers were looked at for which, how large the largest tensors are.
    """

    subject: str
    rules: tuple[str, ...]  # the rules that were applied
    violations: tuple[Violation, ...] = ()
    checked: dict[str, int] = field(default_factory=dict)  # rule -> how many places it looked at
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.violations

    def __add__(self, other: Report) -> Report:
        """Both verdicts in one."""
        checked = {r: self.checked.get(r, 0) + other.checked.get(r, 0) for r in {**self.checked, **other.checked}}
        rules = tuple(dict.fromkeys(self.rules + other.rules))
        notes = tuple(dict.fromkeys(self.notes + other.notes))
        return Report(self.subject, rules, self.violations + other.violations, checked, notes)

    def to_json(self) -> str:
        return json.dumps({"ok": self.ok, **asdict(self)})

    def __str__(self) -> str:
        head = f"{self.subject}: {'proved' if self.ok else f'{len(self.violations)} violation(s)'} ({', '.join(self.rules)})"
        return "\n".join([head, *map(str, self.violations)])
