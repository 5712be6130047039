"""Steps that choose their recomputation, beside those that repeat the script's: one line for both, and never slower."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import pages as report
from benchmarks.simulated import recompute
from benchmarks.simulated.lora import Cell, rows


@pytest.fixture(scope="module")
def made() -> list[dict[str, Any]]:
    ways = [(checkpointed, way) for checkpointed in (True, False) for way in ("as-written", "auto")]
    cells = [
        Cell("tiny", 2, 32, budget, checkpointed=checkpointed, recompute=way)
        for checkpointed, way in ways
        for budget in ("64KiB", "1GiB")
    ]
    return [asdict(row) | {"device": "H200"} for row in rows(cells)]


def test_with_memory_for_all_only_the_way_as_written_recomputes(made: list[dict[str, Any]]) -> None:
    seconds = {(row["checkpointed"], row["recompute"]): row["period"] for row in made if row["budget"] == 1 << 30}
    assert seconds[True, "auto"] == pytest.approx(seconds[False, "auto"])
    # Without checkpoints a script repeats a cast here and there.
    assert seconds[False, "auto"] <= seconds[False, "as-written"] < 0.9 * seconds[True, "as-written"]


def test_each_step_is_a_line_that_says_that_it_is_simulated(made: list[dict[str, Any]], tmp_path: Path) -> None:
    recompute.write(tmp_path / "a.json", made, [])
    result = json.loads((tmp_path / "a.json").read_text())
    lines = recompute.table(result).splitlines()
    assert [line.split(" | ")[2] for line in lines[2:]] == ["yes", "yes", "no", "no"]
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert "1.000" in lines[3] and "100%" in lines[3] and "needs" in lines[2]
    assert "no device ran it" in report.section(tmp_path) and result["simulated"]
