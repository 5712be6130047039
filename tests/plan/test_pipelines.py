"""Layers in a row on several devices, the batch in parts: plans come to the ideal, or near what the link allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disco_accel.graph.copies import swaps_in
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.order import serial_order
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.plan import make_plan
from disco_accel.plan.bound.lane_bound import lane_bound
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.candidates import order_choices
from disco_accel.plan.common.streamed_run import streamed_starts
from disco_accel.plan.summary import swapped_bytes
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.verify.static import verify
from tests.support.graphs.pipeline_graph import PipelineShape, pipeline_graph
from tests.support.graphs.tensor_parallel import PrefillShape, tensor_parallel_prefill
from tests.support.oracles.adversary import run_reference

SHAPES = [(2, 4), (4, 8), (4, 16), (8, 16)]


def memory(shape: PipelineShape, share: float) -> int:
    """Bytes for that share of a stage's weights, for all that its forwards keep and for what one backward makes."""
    weights = shape.layers * shape.weight
    return int(shape.held - (1 - share) * weights) + 6 * shape.activation + 4 * shape.layers * shape.gradient


def planned(graph: TaskGraph) -> MemGraph:
    plan = make_plan(graph, planner="timed", cyclic=True)
    verify(graph, plan)
    run_reference(graph, plan, 0)
    return plan


@pytest.mark.parametrize(("stages", "parts"), SHAPES)
def test_with_memory_for_all_weights_a_pipeline_comes_to_its_ideal(stages: int, parts: int) -> None:
    """In a serial order part by part memory edges would hold each part back until the one before has left."""
    shape = PipelineShape(stages, parts)
    graph = pipeline_graph(shape, memory(shape, 1.0))
    plan = planned(graph)
    assert simulate(plan).makespan <= 1.005 * shape.ideal
    assert simulate(plan, steps=3).makespan <= 3 * 1.005 * shape.ideal
    assert not swapped_bytes(plan, swaps_in)
    assert bound_of(graph).bound == pytest.approx(shape.ideal, rel=1e-3), "and nothing is faster"


@pytest.mark.parametrize(("stages", "parts"), SHAPES)
def test_with_memory_for_half_of_them_a_fast_link_hides_the_loads(stages: int, parts: int) -> None:
    shape = PipelineShape(stages, parts)
    graph = pipeline_graph(shape, memory(shape, 0.5))
    plan = planned(graph)
    assert swapped_bytes(plan, swaps_in)
    assert simulate(plan).makespan <= 1.05 * shape.ideal


def test_where_the_link_is_slow_a_load_serves_several_parts() -> None:
    """A layer takes 27 ms to load and 2 ms to compute forward for a part: loaded for each part, the step takes 5.2
    times its ideal."""
    shape = PipelineShape(2, 16, weight=512 << 20)
    graph = pipeline_graph(shape, memory(shape, 0.5))
    plan = planned(graph)
    assert simulate(plan).makespan <= 2.0 * shape.ideal
    loads = swapped_bytes(plan, swaps_in) / (shape.stages * shape.layers * shape.weight)
    assert loads <= 8, "of every weight; one for each part and pass would be 32"


def test_weights_that_fit_need_no_order_of_their_own() -> None:
    shape = PipelineShape(2, 4)
    graph = pipeline_graph(shape, 2 * memory(shape, 1.0))
    assert streamed_starts(graph, Machine()) is None
    tight = pipeline_graph(shape, memory(shape, 0.5))
    starts = streamed_starts(tight, Machine())
    assert starts is not None and starts.keys() == {v.id for v in tight.vertices if v.kind is not VertexKind.INPUT}
    for vertex in tight.vertices:
        before = [v for v in (*(ref[0] for ref in vertex.inputs), *vertex.after) if v in starts]
        assert all(starts[each] <= starts[vertex.id] for each in before)


def test_orders_are_named_and_keep_the_gate() -> None:
    shape = PipelineShape(2, 4)
    graph = pipeline_graph(shape, memory(shape, 0.5))
    orders, fastest = order_choices(graph, Machine())
    assert [each.name for each in orders] == ["start order", "streamed order"]
    assert fastest == pytest.approx(shape.ideal, rel=1e-3)
    behind = [v.id for v in serial_order(graph) if v.op == "backward"]
    for order in orders:
        ordered = [vertex.id for vertex in serial_order(order.run(graph))]
        loss = next(v.id for v in graph.vertices if v.out)
        assert all(ordered.index(each) > ordered.index(loss) for each in behind)
    one = pipeline_graph(replace(shape, stages=1), memory(shape, 0.5))
    assert order_choices(one, Machine())[0] == ()


@pytest.mark.parametrize(("chunks", "limit"), [(1, 1.001), (4, 1.05)])
def test_exchanges_overlap_as_far_as_the_graph_allows(chunks: int, limit: float) -> None:
    """Whole, all devices compute and then all exchange: the bound knows. In chunks a result that others wait for goes
    before kernels that nobody waits for; in the order of the graph it takes 1.11 times the bound."""
    graph = tensor_parallel_prefill(PrefillShape(layers=3, chunks=chunks), 400 << 20)
    plan = planned(graph)
    least = lane_bound(graph, Machine())
    assert least <= simulate(plan).makespan * (1 + 1e-9) <= limit * least
    assert bound_of(graph).critical_path == least
