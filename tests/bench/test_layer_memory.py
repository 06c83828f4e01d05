"""Memory of a layer against the length of the row."""

from __future__ import annotations

import pytest

from dsv4c.bench.memory import memory_growth


def test_the_peak_of_a_csa_layer_is_a_straight_line_in_the_length() -> None:
    found = memory_growth("tiny", lengths=(256, 512, 1024, 2048))
    assert found["deviation"] <= 0.02
    assert abs(found["square"]) <= 0.02
    assert found["peak_bytes"][-1] == pytest.approx(8 * found["peak_bytes"][0], rel=0.1)


def test_a_square_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4c.bench.memory.peak_bytes", lambda step: step.__defaults__[0].shape[1] ** 2)
    found = memory_growth("tiny", lengths=(256, 512, 1024, 2048))
    assert found["square"] == pytest.approx(1.0)
    assert found["deviation"] > 0.2
