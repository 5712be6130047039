"""The table of fused kernels of ten families: a row of it, measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.step import fused_families


@pytest.mark.long
def test_a_row_is_measured_and_joins_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With kernels that are compiled: fewer of them, and eager's bits in every loss and gradient."""
    path = tmp_path / "rows.json"
    other = {"family": "llama", "form": "fp32", "before": 9, "after": 8, "fused": 1, "refused": 0, "equal": True}
    path.write_text(json.dumps({"rows": [other]}))
    assert fused_families.main(["--families", "gpt2", "--forms", "bf16", "-o", str(path)]) == 0
    kept, row = json.loads(path.read_text())["rows"]
    assert kept == other
    assert (row["family"], row["form"], row["equal"]) == ("gpt2", "bf16", True)
    assert row["fused"] > 0 and row["after"] < row["before"] and row["tensors"] > 5 * 4
    assert capsys.readouterr().out.rstrip().splitlines()[-2:] == [
        "| llama | 9 → 8; 1, 0 | — | yes |",
        f"| gpt2 | — | {row['before']} → {row['after']}; {row['fused']}, {row['refused']} | yes |",
    ]
