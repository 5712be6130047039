"""The benchmark of planners: both side by side in every budget, and how well an arena is filled where all fits."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.planner.table import live_peak
from disco_accel.cli.main import main
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN
from disco_accel.plan.timed.search_settings import TimedSettings

GRAPH = Path(__file__).parent.parent / "data" / "graphs" / "chain8.taskgraph.json"


def test_what_is_live_is_counted_where_most_is() -> None:
    """Two weights and at most two values at once, the second reader's output over its input."""
    weights = [Vertex(i, VertexKind.INPUT, 0, "w", sizes=(1000,), traits=FROZEN) for i in (0, 1)]
    first = Vertex(2, VertexKind.KERNEL, 0, "a", ((0, 0),), (512,))
    second = Vertex(3, VertexKind.KERNEL, 0, "b", ((2, 0), (1, 0)), (256,))
    third = Vertex(4, VertexKind.KERNEL, 0, "c", ((3, 0),), (256,), inplace=((0, 0),), keep=True)
    assert live_peak(TaskGraph("chain", (Space(0, 1 << 20),), (*weights, first, second, third))) == (2048, 768)


def test_an_arena_that_holds_everything_has_little_to_spare(tmp_path: Path) -> None:
    output = tmp_path / "planner.json"
    options = ["--graph", str(GRAPH), "--memory", "16MiB", "64MiB", "--bandwidth", "2e10", "--output", str(output)]
    assert main(["bench", "planner", *options]) == 0
    *tight, ample, build = json.loads(output.read_text())
    assert [ample["planner"], build["planner"]] == ["timed", "build"]
    assert 1 <= ample["arena"] <= ample["rest"] <= 1.02
    assert len(tight) == 2 and all(row["arena"] is None and row["loads"] >= 1 - 1e-9 for row in tight)
    assert all(row["ratio"] >= 1 - 1e-9 for row in (*tight, ample, build))


@pytest.mark.long
def test_every_move_of_the_search_is_left_out_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that come later: each setting has to say what it is worth."""
    output = tmp_path / "planner.json"
    options = ["--graph", str(GRAPH), "--memory", "8MiB", "--bandwidth", "2e10", "--output", str(output)]
    assert main(["bench", "planner", "--ablate", *options]) == 0
    moves = [field.name for field in fields(TimedSettings)]
    full, *without = json.loads(output.read_text())
    assert [row["move"] for row in without] == moves and full["move"] == ""
    summary = capsys.readouterr().out.splitlines()[-len(moves) :]
    assert [line.split()[0] for line in summary] == moves
    ratios = {row["move"]: row["ratio"] for row in without}
    assert ratios["min_gap_ratios"] is None, "without offloads there is no plan in so little memory"
    assert all(ratio is None or ratio >= 1 - 1e-9 for ratio in ratios.values())
