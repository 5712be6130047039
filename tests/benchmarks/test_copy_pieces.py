"""Two copies handed to a link at once, in simulation."""

from __future__ import annotations

import pytest

from benchmarks.planner import copy_pieces
from benchmarks.planner.why_cases import why_cases
from disco_accel.plan import make_plan
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.sizes import parse_size


def test_pieces_are_as_fast_as_one_copy_at_a_time_where_whole_copies_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pieces, "GPU_COPY_PIECE", 64 << 10)
    machine = Machine()
    graph = next(graph for graph, _ in why_cases(["chain8"]))
    plan = make_plan(graph, memory=parse_size("24MiB"), planner="build", cyclic=True, machine=machine)
    ((name, one, two, pieces),) = copy_pieces.rows(iter([("chain8", plan)]), machine)
    assert name == "chain8"
    assert one == simulate(plan, machine).makespan
    assert two > 1.02, "a copy that is wanted at once waits for two whole ones"
    assert pieces < 1.005
