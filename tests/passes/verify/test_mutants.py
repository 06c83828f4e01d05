"""Each known defect, put into the model, is reported by its rule at its line; right variants are not reported.

``pytest -s`` prints what each mutant was reported as.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from dsv4c.passes.verify import RULES, Report
from tests.passes.verify.mutants_gradients import MUTANTS as GRADIENTS
from tests.passes.verify.mutants_numerics import MUTANTS as NUMERICS
from tests.passes.verify.mutation import Mutant, source_line, verdict

MUTANTS = (*GRADIENTS, *NUMERICS)
ROWS: list[tuple[str, str, str, str]] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    shown = Table("mutant", "rule", "line named", "message", title="what each wrong variant is reported as", show_lines=True)
    for row in ROWS:
        shown.add_row(*row)
    Console(width=200).print(shown, markup=False)


def _record(mutant: Mutant, report: Report) -> None:
    found = [v for v in report.violations if v.rule == mutant.rule] or list(report.violations)
    if not found:
        ROWS.append((mutant.name, "(clean)", "", ""))
    for v in found[:1]:
        file, _, number = v.source.rpartition(":")
        ROWS.append((mutant.name, v.rule, f"{Path(file).name}:{number}  {source_line(v.source)}", v.message))


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])
def test_a_mutant_is_reported_by_its_rule_at_its_line(mutant: Mutant) -> None:
    report = verdict(mutant)
    _record(mutant, report)
    if mutant.rule is None:
        assert report.ok, f"a right variant is reported:\n{report}"
        return
    assert mutant.rule in RULES, f"there is no rule {mutant.rule}"
    found = [v for v in report.violations if v.rule == mutant.rule and mutant.says in v.message]
    assert found, f"not reported by {mutant.rule}:\n{report}"
    named = [(v.source, source_line(v.source)) for v in found]
    assert any(mutant.line_of in text for _, text in named), f"no violation names {mutant.line_of!r}, but {named}\n{report}"


def test_names_of_mutants_are_unique() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
