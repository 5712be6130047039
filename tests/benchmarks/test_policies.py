"""The benchmark of policies: a row for each graph and budget with figures of every policy, and a plan for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_accel.cli.main import main
from disco_accel.plan import POLICIES

GRAPH = Path(__file__).parent.parent / "data" / "graphs" / "chain8.taskgraph.json"


def test_every_policy_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "policies.json"
    assert main(["bench", "policies", "--graph", str(GRAPH), "--shares", "0.5", "1.5", "--output", str(output)]) == 0
    tight, ample = json.loads(output.read_text())
    for row in (tight, ample):
        assert set(row["ratios"]) == set(row["loads"]) == set(POLICIES)
        assert all(ratio >= 1 - 1e-9 for ratio in row["ratios"].values())
    assert all(loads >= 1 - 1e-9 for loads in tight["loads"].values())
    assert all(loads is None for loads in ample["loads"].values()), "all fits, nothing has to be loaded"
    printed = capsys.readouterr().out
    assert all(name in printed for name in POLICIES) and "geometric mean" in printed
