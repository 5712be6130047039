"""Simulated steps with packed weights: less to hold and to load, labelled as simulated wherever they are shown."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import pages as report
from benchmarks.simulated import quant as simulated_quant
from benchmarks.simulated.lora import Cell, rows
from benchmarks.simulated.quant import BUDGETS, CARD, line, short_table, write


@pytest.fixture(scope="module")
def made() -> list[dict[str, Any]]:
    budgets = ["400KiB", "11GiB", "22GiB"]
    return [asdict(row) for row in rows([Cell("tiny", 1, 32, b, q) for q in ("nf4", "none") for b in budgets], CARD)]


def test_packed_weights_take_less_host_and_less_device_memory(made: list[dict[str, Any]]) -> None:
    """What all takes at once, and what the host holds; dequantising takes time of the kernels."""
    packed, plain = made[1], made[4]
    assert (packed["quant"], plain["quant"]) == ("nf4", "none")
    assert packed["weights"] < plain["weights"] and packed["peak"] < plain["peak"]
    assert packed["host"] == packed["weights"] and packed["reload"] == 0
    assert packed["resident"] > plain["resident"]
    # With memory for all nothing is recomputed, which both rows of the table count.
    assert packed["period"] == pytest.approx(packed["bound"]) and packed["period"] < 0.8 * packed["resident"]


def test_a_budget_that_is_too_small_is_a_row_that_says_what_it_needs(made: list[dict[str, Any]]) -> None:
    for row in (made[0], made[3]):
        assert row["period"] is None and row["needed"] > row["budget"]
        assert "needs " in line(row)
    assert made[0]["needed"] < made[3]["needed"]


def test_the_readme_has_a_line_for_each_step_and_says_that_it_is_simulated(
    made: list[dict[str, Any]], tmp_path: Path
) -> None:
    write(tmp_path / "a.json", made, [])
    result = json.loads((tmp_path / "a.json").read_text())
    lines = short_table(result).splitlines()
    assert [text.split(" | ")[0] for text in lines[2:]] == ["| tiny NF4, 1 x 32", "| tiny bf16, 1 x 32"]
    assert all(text.count("|") == lines[0].count("|") == 4 + len(BUDGETS) for text in lines)
    share = made[1]["period"] / made[1]["resident"]
    assert lines[2].endswith(f"| {share:.2f}, 0B | — | {share:.2f}, 0B |")
    shown = report.summary(tmp_path)
    assert "**Simulated**, no device ran it" in shown and short_table(result) in shown
    assert "no device ran them" in report.section(tmp_path)
    assert result["simulated"] and result["commit"] and result["machine"].startswith("simulated")


def test_every_cell_names_a_card_s_budget() -> None:
    assert {cell.budget for cell in simulated_quant.CELLS} == set(BUDGETS.values())
