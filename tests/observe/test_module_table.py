"""Rows of modules add up to the plan's own figures, and phases to the step."""

from __future__ import annotations

import pytest

from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.taskgraph import Vertex, VertexKind
from disco_accel.graph.traits import LATE, STATE
from disco_accel.observe.module_table import _Phase, module_rows, phases
from disco_accel.observe.step_facts import _StepFacts
from disco_accel.observe.timeline import stays
from disco_accel.plan import make_plan
from disco_accel.plan.summary import staying_bytes, swapped_bytes
from tests.observe import traced_step as small
from tests.observe.traced_step import simulated

MIB = 1 << 20


def rows_of(plan, events, facts):
    return {row.module: row for row in module_rows(plan, events, stays(plan, events), facts, phases(plan))}


def test_bytes_belong_to_the_module_that_reads_them_first():
    facts = _StepFacts(modules={small.A: "first", small.B: "second", small.C: "second"}, repeats={small.C: small.B})
    rows = rows_of(small.plan(), small.events(), facts)
    assert list(rows) == ["second", "first", ""], "of the most seconds first"
    assert rows["first"].weights == 256 and rows["first"].saved == 256 and rows["first"].loaded == 0
    assert rows["second"].loaded == 512 + 256, "its weight, and the activation that comes back"
    assert rows["second"].seconds == [3, 0, 0] and rows["second"].again == 1 and rows["second"].kernels == 2
    assert sum(rows[""].seconds) == 1


def test_kernels_that_write_over_what_lives_on_are_the_update():
    k = VertexKind
    vertices = (
        Vertex(0, k.INPUT, 0, sizes=(256,), traits=STATE),
        Vertex(1, k.KERNEL, 0, inputs=((0, 0),), sizes=(256,), out=True),
        Vertex(2, k.INPUT, 0, sizes=(4,), traits=LATE),
        Vertex(3, k.KERNEL, 0, inputs=((2, 0), (1, 0)), sizes=(256,)),
        Vertex(4, k.KERNEL, 0, inputs=((0, 0), (3, 0)), sizes=(256,), inplace=((0, 0),)),
    )
    plan = make_plan(small.graph_of(vertices, 4096), memory=4096, planner="timed", cyclic=True)
    found = phases(plan)
    assert [found[v] for v in (1, 3, 4)] == [_Phase.FORWARD, _Phase.BACKWARD, _Phase.UPDATE]
    assert set(phases(small.plan()).values()) == {_Phase.FORWARD}


@pytest.mark.parametrize("memory", [28 * MIB, 64 * MIB])
def test_sums_over_modules_are_the_plan_s_figures(request, memory):
    graph = read_taskgraph(request.config.rootpath / "tests/data/graphs/lora_small.taskgraph.json")
    plan = make_plan(graph, memory=memory, cyclic=True)
    events = simulated(plan)
    modules = {v.id: ".".join(v.op.split(".")[:2]) for v in plan.vertices if v.kind is VertexKind.KERNEL}
    rows = rows_of(plan, events, _StepFacts(modules=modules)).values()
    assert len(rows) > 20
    assert sum(row.loaded for row in rows) == swapped_bytes(plan, swaps_in) > 0
    assert sum(row.saved for row in rows) == swapped_bytes(plan, swaps_out)
    assert sum(row.weights for row in rows) == staying_bytes(plan)
    durations = sum(v.duration or 0.0 for v in plan.vertices)
    assert sum(sum(row.seconds) for row in rows) == pytest.approx(durations)
