"""The table of seconds that plans say and steps take: a row of it, measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.step import predicted


@pytest.mark.long
def test_a_row_has_the_plans_seconds_and_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert predicted.main(["--families", "gpt2", "--budgets", "0.8", "--rounds", "2", "-o", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (
        row["family"] == "gpt2"
        and 0 < row["low"] <= row["took"] <= row["high"]
        and row["said"] > 0
        and row["again"] > 0
    )
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"| gpt2 | {row['budget'] / 2**20:.0f} MiB |")
