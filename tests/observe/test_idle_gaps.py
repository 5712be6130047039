"""Idle time of a lane adds up to the step, and each gap is blamed on what ended last."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest

from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.taskgraph import Vertex, VertexKind
from disco_accel.graph.traits import LATE
from disco_accel.observe.idle_gaps import _Cause, by_lane, gate_second, idle_gaps
from disco_accel.plan import make_plan
from disco_accel.simulate.simulator import simulate
from tests.observe import traced_step as small
from tests.observe.traced_step import simulated

MIB = 1 << 20


def causes(plan, events):
    return {(g.lane[1], g.start, g.end): (g.cause, g.waited_for) for g in idle_gaps(plan, events)}


def test_a_lane_waits_for_the_last_of_those_that_a_vertex_needs():
    found = causes(small.plan(), small.events())
    assert found["compute0", 2, 3] == (_Cause.DATA, small.L), "b reads what is loaded"
    assert found["compute0", 5, 6] == (_Cause.DATA, small.BACK), "c reads b, too, which was there before"
    assert found["d2h", 0, 2] == (_Cause.DATA, small.A)
    assert found["d2h", 4, 8] == found["h2d", 6, 8] == (_Cause.DONE, -1)


def test_a_copy_that_waits_for_room_waits_for_the_last_user_of_its_place():
    plan = dataclasses.replace(small.plan(), memory_edges=((small.SAVE, small.BACK), (small.A, small.BACK)))
    found = causes(plan, small.events())
    assert found["h2d", 3, 4] == (_Cause.DATA, small.SAVE), "its own bytes come first"
    plan = dataclasses.replace(small.plan(), memory_edges=((small.SAVE, small.L),))
    late = [dataclasses.replace(e, start=4, end=5) if e.vertex == small.L else e for e in small.events()]
    assert causes(plan, late)["h2d", 0, 4] == (_Cause.MEMORY, small.SAVE)


def test_time_after_the_last_predecessor_is_nobody_s():
    """Split at its end: the rest is the engine's."""
    later = [
        dataclasses.replace(e, start=e.start + 2, end=e.end + 2) if e.vertex == small.LOSS else e
        for e in small.events()
    ]
    assert causes(small.plan(), later)["compute0", 7, 9] == (_Cause.START, -1)
    b = [dataclasses.replace(e, start=3.5) if e.vertex == small.B else e for e in small.events()]
    found = causes(small.plan(), b)
    assert found["compute0", 2, 3] == (_Cause.DATA, small.L)
    assert found["compute0", 3, 3.5] == (_Cause.START, -1)


def test_the_caller_s_time_at_the_gate_is_the_caller_s():
    plan = small.plan()
    tangent, last = small.LOSS + 1, small.LOSS + 2
    more = (
        Vertex(tangent, VertexKind.INPUT, 0, op="tangent", sizes=(0,), traits=LATE),
        Vertex(last, VertexKind.KERNEL, 0, op="aten::neg", inputs=((tangent, 0),), sizes=(0,)),
    )
    plan = dataclasses.replace(plan, vertices=(*plan.vertices, *more))
    events = [*small.events(), small.Event(last, "compute0", 11, 11, 12)]
    assert gate_second(plan, events) == 8
    assert causes(plan, events)["compute0", 8, 11] == (_Cause.GATE, tangent)
    assert gate_second(small.plan(), small.events()) is None


@pytest.fixture(scope="module")
def run(request):
    graph = read_taskgraph(request.config.rootpath / "tests/data/graphs/lora_small.taskgraph.json")
    plan = make_plan(graph, memory=64 * MIB, cyclic=True)
    return plan, simulated(plan)


def test_busy_and_idle_time_of_each_lane_are_the_step(run):
    plan, events = run
    finish = max(e.end for e in events)
    idle = defaultdict(float)
    for gap in idle_gaps(plan, events):
        idle[gap.lane] += gap.end - gap.start
    for lane, ran in by_lane(plan, events).items():
        assert sum(e.end - e.start for e in ran) + idle[lane] == pytest.approx(finish, rel=1e-6)


def test_a_simulated_lane_never_idles_without_a_reason(run):
    """The simulator starts a vertex when its predecessors have ended and its lane is free."""
    plan, events = run
    assert simulate(plan).makespan == pytest.approx(max(e.end for e in events))
    gaps = idle_gaps(plan, events)
    assert {g.cause for g in gaps} <= {_Cause.DATA, _Cause.MEMORY, _Cause.GATE, _Cause.DONE}
    assert any(g.cause is _Cause.MEMORY for g in gaps), "copies wait for room in a plan that has little"
