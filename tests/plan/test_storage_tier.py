"""Frozen weights whose home is storage: planned, judged, run on tokens, simulated over a link of their own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from disco_accel.errors import ExecutionError, GraphFileError, PlanError, VerifyError
from disco_accel.execute.addresses import Memory
from disco_accel.execute.program import lower
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.files import read_memgraph, read_taskgraph, write_memgraph, write_taskgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import HOST, ROUTE_OF, TO_DEVICE, Space, SpaceKind
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN, STATE
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan import make_plan
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.simulate.machine import Link, Machine
from disco_accel.simulate.simulator import simulate
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.oracles.adversary import run_reference

DISK = -2
WEIGHT, ACTIVATION = 1 << 20, 1 << 16
LAYERS = 8
FROM_DISK = ROUTE_OF["s2d"]
MACHINE = Machine(links={FROM_DISK: Link(1e9, 1e-4)})
"""A load from storage takes as long as kernels of one layer and more."""


def chain(home: tuple[int, ...] = (HOST, DISK)) -> TaskGraph:
    """A forward and a backward pass over weights that have their homes in the spaces of ``home`` in turn, on a device
    with room for half of them."""
    vertices = [Vertex(0, VertexKind.INPUT, 0, "x", sizes=(ACTIVATION,), traits=FOREIGN)]
    for k in range(LAYERS):
        source = home[k % len(home)]
        vertices.append(Vertex(1 + k, VertexKind.INPUT, 0, f"w{k}", sizes=(WEIGHT,), traits=FROZEN, source=source))
    value = 0
    for k, weight in enumerate((*range(1, LAYERS + 1), *range(LAYERS, 0, -1))):
        number = LAYERS + 1 + k
        kept = k == 2 * LAYERS - 1
        inputs = ((value, 0), (weight, 0))
        vertices.append(Vertex(number, VertexKind.KERNEL, 0, "mm", inputs, (ACTIVATION,), 5e-4, keep=kept))
        value = number
    spaces = (Space(0, (LAYERS // 2) * WEIGHT + 4 * ACTIVATION), Space(DISK, kind=SpaceKind.STORAGE))
    return check_taskgraph(TaskGraph("stored", spaces, tuple(vertices)))


def plan_of(planner: str, graph: TaskGraph) -> MemGraph:
    return make_plan(graph, planner=planner, cyclic=True, machine=MACHINE)


def loads(plan: MemGraph, source: int) -> list[Vertex]:
    return [v for v in plan.vertices if swaps_in(v) and v.source == source]


@pytest.fixture(params=["build", "timed"])
def planned(request: pytest.FixtureRequest) -> tuple[TaskGraph, MemGraph]:
    return chain(), plan_of(request.param, chain())


def test_plans_load_each_weight_from_its_home(planned: tuple[TaskGraph, MemGraph], tmp_path: Path) -> None:
    """All judges accept them, also when they come back from files."""
    graph, plan = planned
    home = {v.id: v.source for v in graph.vertices if v.traits == FROZEN}
    assert loads(plan, DISK) and loads(plan, HOST)
    assert all(home[v.inputs[0][0]] == v.source for v in plan.vertices if swaps_in(v))
    write_taskgraph(graph, tmp_path / "task.json")
    write_memgraph(plan, tmp_path / "plan.json")
    assert read_taskgraph(tmp_path / "task.json") == graph
    assert read_memgraph(tmp_path / "plan.json") == plan
    verify(graph, plan)
    for seed in range(10):
        run_reference(graph, plan, seed)


def test_loads_from_storage_take_the_time_of_its_link(planned: tuple[TaskGraph, MemGraph]) -> None:
    _, plan = planned
    lanes = MACHINE.lanes(plan.spaces)
    stored = loads(plan, DISK)
    assert {lanes.name(v) for v in stored} == {"s2d0"} and {lanes.name(v) for v in loads(plan, HOST)} == {"h2d0"}
    assert sum(map(lanes.seconds, stored)) == pytest.approx(sum(1e-4 + v.sizes[0] / 1e9 for v in stored))
    run = simulate(plan, MACHINE, steps=3)
    assert run.busy["s2d0"] == pytest.approx(3 * sum(map(lanes.seconds, stored)))
    slower = simulate(plan, MACHINE.with_links({FROM_DISK: Link(1e8, 1e-4)}), steps=3)
    assert slower.makespan > 2 * run.makespan
    assert slower.busy["h2d0"] == run.busy["h2d0"]


@pytest.mark.parametrize("home", [(HOST, DISK), (DISK,)])
@pytest.mark.parametrize("bandwidths", [(1e8, 1e8), (1e8, 1e10), (1e10, 1e8)], ids=str)
def test_no_step_is_shorter_than_the_bound(home: tuple[int, ...], bandwidths: tuple[float, float]) -> None:
    """Also where both links load at once, or storage is the faster of the two."""
    host, disk = bandwidths
    machine = Machine(links={TO_DEVICE: Link(host, 1e-5), FROM_DISK: Link(disk, 1e-5)})
    graph = chain(home)
    plan = make_plan(graph, cyclic=True, machine=machine)
    often, once = simulate(plan, machine, steps=9).makespan, simulate(plan, machine).makespan
    assert bound_of(graph, machine).bound <= (often - once) / 8 * (1 + 1e-9)


def test_a_load_of_a_stored_weight_from_the_host_is_refused(planned: tuple[TaskGraph, MemGraph]) -> None:
    """And one of the host's from storage, which has only its own."""
    graph, plan = planned
    for source, other in ((DISK, HOST), (HOST, DISK)):
        victim = loads(plan, source)[0]
        spoilt = replace(victim, source=other)
        bad = replace(plan, vertices=tuple(spoilt if v == victim else v for v in plan.vertices))
        with pytest.raises(VerifyError, match=rf"vertex {victim.id} .* from space {other}, where it is not"):
            verify(graph, bad)


def test_the_engine_refuses_it_by_name(planned: tuple[TaskGraph, MemGraph]) -> None:
    _, plan = planned
    load = loads(plan, DISK)[0]
    frozen = tuple(v for v in plan.vertices if v.traits == FROZEN)
    part = replace(plan, vertices=(*frozen, load), data_edges=(), memory_edges=())
    clean = {v.id: torch.zeros(v.sizes[0], dtype=torch.uint8) for v in frozen}
    arena = torch.zeros(plan.devices[0].memory, dtype=torch.uint8)
    memory = Memory({0: arena}, torch.zeros(0, dtype=torch.uint8), clean, {})
    message = (
        f"vertex {load.id} copies from space {DISK} to space 0: the engine copies between devices and the host alone"
    )
    with pytest.raises(ExecutionError, match=message):
        lower(part, {}, {}, memory, cast(Any, None), {})


def test_a_kernel_on_the_host_uses_no_value_in_storage() -> None:
    """The processors read memory."""
    host = Space(1, 1 << 20, kind=SpaceKind.HOST)
    stored = Vertex(0, VertexKind.INPUT, 0, "w", sizes=(WEIGHT,), traits=STATE, source=DISK)
    update = Vertex(1, VertexKind.KERNEL, 1, "update", ((0, 0),), (WEIGHT,), inplace=((0, 0),))
    spaces = (*chain().spaces, host)
    message = r"vertex 1 \(update\): inputs\[0\]: vertex 0 has its home in storage"
    with pytest.raises(GraphFileError, match=message):
        check_taskgraph(TaskGraph("stored", spaces, (stored, update)))
    check_taskgraph(TaskGraph("kept", spaces, (replace(stored, source=HOST), update)))


@pytest.mark.parametrize("planner", ["build", "timed"])
def test_random_graphs_with_homes_in_storage_are_planned(planner: str) -> None:
    """Also values that change over steps: they are written back to where they were loaded from."""
    shape = Shape(vertices=30, inputs=12, inplace=0.0)
    if planner == "timed":
        shape = replace(shape, states=0.4, host_updated=0.2)
    both = written = 0
    for seed in range(60):
        rng = random.Random(seed)
        graph = with_room(random_taskgraph(rng, shape), 1.1)
        moved = [replace(v, source=DISK) if host_copy_exists(v) and rng.random() < 0.6 else v for v in graph.vertices]
        spaces = (*graph.spaces, Space(DISK, kind=SpaceKind.STORAGE))
        graph = check_taskgraph(replace(graph, spaces=spaces, vertices=tuple(moved)))
        try:
            plan = make_plan(graph, planner=planner, cyclic=True, machine=MACHINE)
        except PlanError:
            continue
        verify(graph, plan)
        run_reference(graph, plan, seed)
        once, often = simulate(plan, MACHINE).makespan, simulate(plan, MACHINE, steps=5).makespan
        assert bound_of(graph, MACHINE).bound <= (often - once) / 4 * (1 + 1e-9)
        both += bool(loads(plan, DISK)) and bool(loads(plan, HOST))
        written += any(v.space == DISK for v in plan.vertices)
    assert both > 5 and (written > 5 or planner == "build"), (both, written)
