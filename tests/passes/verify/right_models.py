"""The model as it is, one layer of every kind in every stage: on these no rule may say anything."""

from __future__ import annotations

from functools import cache

import pytest

from dsv4c.passes.verify import Subject, verify
from tests.passes.verify.mutation import subject

RIGHT: dict[str, tuple[str, str, bool]] = {
    "swa": ("swa", "sparse", False),
    "swa-hash": ("swa-hash", "sparse", False),
    "csa": ("csa", "sparse", False),
    "csa-hash": ("csa-hash", "sparse", False),
    "hca": ("hca", "sparse", False),
    "hca-hash": ("hca-hash", "sparse", False),
    "mtp": ("mtp", "sparse", False),
    "csa dense": ("csa", "dense", False),
    "csa warm-up": ("csa", "indexer_warmup", False),
    "csa autocast": ("csa", "sparse", True),
    "mtp autocast": ("mtp", "sparse", True),
}  # config, stage, bf16 by autocast instead of by bf16 parameters

every_right_model = pytest.mark.parametrize("name", RIGHT)


@cache
def right(name: str) -> Subject:
    """Captured once in a process."""
    config, stage, autocast = RIGHT[name]
    return subject(config, stage=stage, autocast=autocast)


def is_proved(name: str, rule: str) -> int:
    """At how many places the rule was found kept; fails where it is not."""
    report = verify(right(name), (rule,))
    assert report.ok, f"a right model is reported:\n{report}"
    return report.checked[rule]
