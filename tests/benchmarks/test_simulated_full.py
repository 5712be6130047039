"""Simulated training of all weights: where time and memory go adds up, and it is labelled as simulated."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.report import pages as report
from benchmarks.simulated.full import DESKTOP, LEAST, Cell, Mode, Row, rows, table, write


@pytest.fixture(scope="module")
def made() -> list[Row]:
    return list(rows([Cell("tiny", 4, 64, "desktop", budget) for budget in (None, LEAST)]))


def modes(made: list[Row]) -> list[tuple[Row, Mode]]:
    return [(row, mode) for row in made for mode in (row.step, row.deferred, row.auto)]


@pytest.mark.long
def test_a_step_is_its_parts_and_no_shorter_than_its_bound(made: list[Row]) -> None:
    for row, mode in modes(made):
        assert mode.seconds == pytest.approx(mode.plan + mode.leave + mode.update)
        assert mode.plan + mode.update >= mode.bound * (1 - 1e-9)
        assert mode.busy is not None and mode.busy["kernels"] == pytest.approx(row.resident)
        assert mode.busy[mode.limit] == max(mode.busy.values()) <= mode.seconds


def test_every_weight_comes_and_every_gradient_goes(made: list[Row]) -> None:
    for row, mode in modes(made):
        assert mode.loaded >= row.host["weights"] and mode.saved >= row.host["gradients"]
        assert row.host["moments"] == 2 * row.host["gradients"] == 4 * row.parameters
        seconds = row.parameters / DESKTOP.host.update
        # Seconds of kernels are whole nanoseconds.
        assert mode.busy is not None and (mode.on_device or mode.busy["processors"] >= seconds * (1 - 1e-3))


def test_what_lies_on_the_device_fits_what_the_plan_uses(made: list[Row]) -> None:
    for row, mode in modes(made):
        assert mode.device is not None and mode.fullest
        assert 0 < sum(mode.device.values()) <= mode.used <= row.budget


def test_little_memory_saves_on_the_host_and_loads_weights_again(made: list[Row]) -> None:
    roomy, least = made
    assert roomy.host["offloaded"] == 0 < least.host["offloaded"]
    assert least.budget < roomy.peak and least.step.loaded > roomy.step.loaded


def test_pages_say_that_it_is_simulated_and_where_rates_come_from(made: list[Row], tmp_path: Path) -> None:
    none = Mode(needed=made[1].budget)
    refused = replace(made[1], budget=1, step=none, deferred=none, auto=none)
    write(tmp_path / "a.json", [asdict(row) for row in (*made, refused)], [])
    result = json.loads((tmp_path / "a.json").read_text())
    shown = report.section(tmp_path)
    assert table(result) in shown and "no device ran it" in shown and result["simulated"]
    assert "GB/s" in result["machine"] and "assumed" in result["speeds"]["desktop"]["host"]["why"]
    lines = table(result).splitlines()
    assert len(lines) == 2 + 3 * (len(made) + 1) and len({line.count("|") for line in lines}) == 1
    assert sum("needs " in line for line in lines) == 3
