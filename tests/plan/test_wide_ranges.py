"""Small graphs: inputs that the host has no copy of leave, ranges are wide."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planner.ablation import WITHOUT
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, VertexKind, with_memory
from disco_accel.plan.select import inputs_by_use
from disco_accel.plan.timed.search import build_timed
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.verify.static import verify
from tests.support.oracles.adversary import run_reference

GRAPHS = Path(__file__).parent.parent / "data" / "graphs"
ALL = TimedSettings()


def chain8(mib: float) -> TaskGraph:
    """A chain of eight layers, of 4 MiB each, and back."""
    graph = inputs_by_use(read_taskgraph(GRAPHS / "chain8.taskgraph.json"))
    return with_memory(graph, lambda device: int(mib * 2**20))


def planned(graph: TaskGraph, settings: TimedSettings) -> MemGraph:
    """A plan that both judges pass."""
    plan = build_timed(graph, Machine(), cyclic=True, settings=settings)
    verify(graph, plan)
    run_reference(graph, plan, 0)
    return plan


def seconds(graph: TaskGraph, settings: TimedSettings) -> float:
    """Of a simulated step."""
    return simulate(planned(graph, settings), Machine()).makespan


@pytest.mark.parametrize(
    ("move", "mib", "at_least"),
    [
        ("inputs_leave_up_to", 8, 1.05),
    ],
)
def test_a_step_takes_longer_without_the_move(move: str, mib: int, at_least: float) -> None:
    graph = chain8(mib)
    assert seconds(graph, WITHOUT[move]) > at_least * seconds(graph, ALL)


def test_an_input_without_a_copy_on_the_host_leaves_and_comes_back() -> None:
    """The batch, which the first kernel reads and the last but one."""
    plan = planned(chain8(8), ALL)
    batch = next(vertex for vertex in plan.vertices if vertex.op == "x")
    offload = next(v for v in plan.vertices if v.kind is VertexKind.OFFLOAD and v.inputs == ((batch.id, 0),))
    reload = next(v for v in plan.vertices if v.kind is VertexKind.RELOAD and v.inputs == ((offload.id, 0),))
    readers = [vertex.op for vertex in plan.vertices if (reload.id, 0) in vertex.inputs]
    assert readers == ["dw0"]
