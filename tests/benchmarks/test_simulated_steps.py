"""Steps of large shapes in simulation: nothing beats a bound, and a budget that is too small says what would do."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.simulated.lora import H200, Cell, Row, line, rows
from disco_accel.graph.spaces import TO_DEVICE


@pytest.fixture(scope="module")
def made() -> list[Row]:
    return list(rows([Cell("tiny", 2, 32, 0.6), Cell("tiny", 2, 32, 4.0), Cell("tiny", 2, 32, "64KiB")]))


def test_no_step_is_faster_than_its_bounds(made: list[Row]) -> None:
    tight, roomy, _ = made
    for row in (tight, roomy):
        assert row.period is not None and row.bound is not None and row.busy is not None
        assert row.period >= row.bound * (1 - 1e-9)
        # Less recomputation than the script asks for.
        assert row.bound <= sum(s for lane, s in row.busy.items() if lane.startswith("compute")) * (1 + 1e-9)
        assert row.period < row.resident
    assert tight.budget < tight.peak < roomy.budget and tight.weights < tight.peak


def test_what_fits_copies_nothing_and_what_does_not_takes_the_link_its_time(made: list[Row]) -> None:
    tight, roomy, _ = made
    assert roomy.reload == 0 and roomy.period == pytest.approx(roomy.bound)
    assert tight.reload and tight.period and tight.period >= tight.reload / H200.machine.link(TO_DEVICE).bandwidth


def test_a_budget_that_is_too_small_names_the_one_that_would_do(made: list[Row]) -> None:
    refused = made[2]
    assert refused.period is None and refused.needed is not None
    assert refused.budget < refused.needed < refused.peak
    assert "needs" in line(dataclasses.asdict(refused))
