"""Other orders of a graph: every dependency kept, fewer bytes alive, plans that hold for the graph as it was."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.check import dependencies
from disco_accel.graph.order import live_peak, serial_order
from disco_accel.graph.passes import run_passes
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN
from disco_accel.graph.values import overwrites
from disco_accel.plan import make_plan
from disco_accel.plan.common.serial_orders import (
    hoist,
    lower_order,
    sink,
    start_order,
    unlimited_run,
)
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.select import planned_with
from disco_accel.plan.timed.search import build_timed
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets
from tests.support.graphs.tensor_parallel import PrefillShape, tensor_parallel_prefill
from tests.support.oracles.adversary import run_reference


def _kernel(id: int, *inputs: int, size: int = 256) -> Vertex:
    return Vertex(id, VertexKind.KERNEL, 0, "op", tuple((i, 0) for i in inputs), (size,), 1e-6)


def _graph(*vertices: Vertex) -> TaskGraph:
    source = Vertex(0, VertexKind.INPUT, 0, "x", (), (256,), traits=FOREIGN)
    return TaskGraph("g", (Space(0, 1 << 20),), (source, *vertices))


def started_order(graph: TaskGraph) -> TaskGraph:
    return start_order(unlimited_run(graph, Machine()).starts).run(graph)


@pytest.mark.parametrize("seed", range(40))
def test_every_order_keeps_dependencies_and_who_reads_before_it_is_overwritten(seed: int) -> None:
    graph = random_taskgraph(random.Random(seed), Shape(vertices=40))
    order = serial_order(graph)
    started = started_order(graph).vertices
    for other in (sink(order), hoist(order), hoist(sink(order)), sink(hoist(order)), started):
        place = {vertex.id: v for v, vertex in enumerate(other)}
        assert sorted(place) == sorted(vertex.id for vertex in order)
        for vertex in order:
            assert all(place[source] < place[vertex.id] for source in dependencies(vertex))
            for _, over in overwrites(vertex):
                # Who reads it later still needs a copy in any order.
                readers = [reader.id for reader in order[: order.index(vertex)] if over in reader.inputs]
                assert all(place[reader] < place[vertex.id] for reader in readers)


def test_what_only_takes_memory_sinks_to_its_first_reader() -> None:
    """2 makes a value that 4 alone reads: behind 3 it does not lie beside the large value of 1."""
    graph = _graph(_kernel(1, 0, size=4096), _kernel(2, 0, size=2048), _kernel(3, 1), _kernel(4, 2, 3))
    assert [vertex.id for vertex in sink(serial_order(graph))] == [0, 1, 3, 2, 4]
    lower = lower_order(graph)
    assert lower is not None and live_peak(lower.vertices) < live_peak(graph.vertices)


def test_what_frees_memory_rises_to_what_it_waits_for() -> None:
    graph = _graph(_kernel(1, 0, size=4096), _kernel(2, 0, size=2048), _kernel(3, 1), _kernel(4, 2, 3))
    assert [vertex.id for vertex in hoist(serial_order(graph))] == [0, 1, 3, 2, 4]


def test_a_graph_without_a_lower_order_stays_as_it_is() -> None:
    assert lower_order(_graph(_kernel(1, 0), _kernel(2, 1), _kernel(3, 2))) is None


def test_plans_in_another_order_hold_for_the_graph_as_it_was() -> None:
    planned = 0
    for seed in range(80):
        rng = random.Random(seed)
        graph = with_working_sets(random_taskgraph(rng, Shape(vertices=30)), rng.choice((1.2, 1.5, 2.0)))
        lower = lower_order(graph)
        if lower is None:
            continue
        try:
            plan = build_timed(lower, Machine(), cyclic=True)
        except Infeasible:
            continue
        planned += 1
        verify(graph, plan)
        run_reference(graph, plan, seed)
    assert planned > 7, "hardly any graph has another order, so nothing was judged"


def test_who_writes_in_place_starts_behind_readers_that_wait_for_another_device() -> None:
    """4 could start at once; 3, which reads what 4 overwrites, waits for the slow 5 of another device."""
    slow = replace(_kernel(5), space=1, duration=1.0)
    moved = Vertex(6, VertexKind.COPY, 0, "send", ((5, 0),), (256,), source=1)
    graph = _graph(_kernel(1, 0), slow, moved, _kernel(3, 1, 6), replace(_kernel(4, 1), inplace=((0, 0),)))
    graph = replace(graph, spaces=(Space(0, 1 << 20), Space(1, 1 << 20)))
    order = [vertex.id for vertex in started_order(graph).vertices]
    assert order.index(3) < order.index(4)
    plan = make_plan(graph, planner="timed", cyclic=True)
    verify(graph, plan)
    run_reference(graph, plan, 0)


@pytest.mark.parametrize(("memory", "limit"), [(1 << 36, 1.0), (400 << 20, 1.02)])
def test_devices_side_by_side_seldom_wait_for_memory(memory: int, limit: float) -> None:
    """Chunks overlap with transfers as they would without a plan; outputs placed for one serial order would not."""
    graph = tensor_parallel_prefill(PrefillShape(layers=3), memory)
    free = unlimited_run(graph, Machine()).makespan
    plan = make_plan(graph, planner="timed", cyclic=True)
    verify(graph, plan)
    run_reference(graph, plan, 0)
    assert simulate(plan).makespan <= limit * free * (1 + 1e-9)
    if memory == 1 << 36:
        assert not plan.memory_edges


def test_the_passes_that_a_planner_names_give_its_plan_s_order() -> None:
    """Run again on the graph, they end in the order of the plan's kernels, whatever the search took."""
    orders = Counter[tuple[str, ...]]()
    for seed in range(60):
        rng = random.Random(seed)
        graph = random_taskgraph(rng, Shape(vertices=30))
        graph = with_working_sets(graph, rng.choice((1.2, 1.5, 2.0)))
        with suppress(BudgetTooSmall):
            plan, passes = planned_with(graph, (), planner="timed", cyclic=True)
            again = run_passes(graph, passes)
            own = {vertex.id for vertex in graph.vertices}
            order = [vertex.id for vertex in plan.vertices if vertex.id in own]
            assert order == [vertex.id for vertex in serial_order(again)]
            orders[tuple(each.name for each in passes[1:])] += 1
    assert {(), ("start order",), ("justified order",), ("low-peak order",)} <= orders.keys(), (
        f"not every order has been met: {orders}"
    )
