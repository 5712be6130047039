"""What a vertex needs by itself, and what its traits may say."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from disco_accel.errors import BudgetTooSmall, GraphFileError
from disco_accel.graph.check import check_taskgraph, largest_need
from disco_accel.graph.files import (
    fingerprint,
    read_memgraph,
    read_taskgraph,
    write_memgraph,
    write_taskgraph,
)
from disco_accel.graph.spaces import Space, SpaceKind
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind, with_at_least
from disco_accel.graph.traits import FOREIGN, FROZEN, HOST_UPDATED_STATE, LATE_FOREIGN, MADE_FOREIGN, PER_STEP, STATE
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets


def test_where_a_plan_fits_every_vertex_does() -> None:
    rng = random.Random(11)
    planned = 0
    for _ in range(150):
        graph = with_working_sets(random_taskgraph(rng, Shape(vertices=10)), rng.choice((0.6, 0.8, 1.0, 1.0)))
        try:
            make_plan(graph)
        except BudgetTooSmall as error:
            graph = with_at_least(graph, error.needed)
            assert all(largest_need(graph, device.id)[0] <= device.memory for device in graph.devices)
        else:
            planned += 1
            assert all(largest_need(graph, device.id)[0] <= device.memory for device in graph.devices)
    assert planned > 20


def test_the_vertex_that_needs_most_is_found_with_what_it_shares() -> None:
    vertices = (
        Vertex(0, VertexKind.INPUT, 0, sizes=(1000,), traits=FROZEN),
        Vertex(1, VertexKind.INPUT, 0, sizes=(9000,), traits=FOREIGN),
        Vertex(2, VertexKind.INPUT, 0, sizes=(5000,), traits=FROZEN),
        Vertex(3, VertexKind.KERNEL, 0, "add", ((0, 0), (0, 0), (1, 0)), (1000,)),
        Vertex(4, VertexKind.KERNEL, 0, "relu", ((3, 0),), (1000,), may_inplace=(0,)),
        Vertex(5, VertexKind.COPY, 1, "copy", ((3, 0),), (700,), source=0),
    )
    graph = TaskGraph("needs", (Space(0, 1 << 20, 256), Space(1, 1 << 20, 512)), vertices)
    need, vertex = largest_need(graph, 0)
    # Two values of 1000 bytes, each 1024 long in the arena; the external one is elsewhere, the unread one on the host.
    assert (need, vertex.id if vertex else None) == (2048, 3)
    need, vertex = largest_need(graph, 1)
    assert (need, vertex.id if vertex else None) == (1024, 5)
    assert largest_need(TaskGraph("none", (Space(0, 1, 1),), ()), 0) == (0, None)


HOST_DEVICE = Space(1, 1 << 20, kind=SpaceKind.HOST)
WEIGHT = Vertex(0, VertexKind.INPUT, 0, "w", sizes=(512,), traits=HOST_UPDATED_STATE)
TANGENT = Vertex(1, VertexKind.INPUT, 0, "t", sizes=(256,), traits=LATE_FOREIGN)
GRADIENT = Vertex(2, VertexKind.KERNEL, 0, "mm", ((0, 0), (1, 0)), (512,))
LEAVES = Vertex(3, VertexKind.COPY, 1, "out", ((2, 0),), (512,), traits=MADE_FOREIGN, source=0)
CHANGED = Vertex(4, VertexKind.KERNEL, 0, "sgd", ((0, 0), (2, 0)), (512,), inplace=((0, 0),))


def step(*vertices: Vertex) -> TaskGraph:
    """A gradient that a copy takes to the user's memory, and a state that the host changes too; ``vertices`` in the
    place of those of the same id."""
    own = {vertex.id: vertex for vertex in (WEIGHT, TANGENT, GRADIENT, LEAVES, CHANGED, *vertices)}
    return TaskGraph("leaving", (Space(0, 2048, 256), HOST_DEVICE), tuple(own[number] for number in sorted(own)))


REFUSED = {
    r"vertex 3 \(out\): space: 0 is not the host's": replace(LEAVES, space=0),
    r"vertex 3 \(out\): inputs\[0\]: from the user's memory to the user's": replace(
        LEAVES, inputs=((1, 0),), sizes=(256,)
    ),
    r"vertex 3 \(out\): size: a copy cannot be larger": replace(LEAVES, sizes=(513,)),
    r"vertex 2 \(mm\): traits: only an input can have any": replace(GRADIENT, traits=MADE_FOREIGN),
    r"vertex 3 \(out\): traits: .* a copy to the user's memory": replace(LEAVES, traits=FOREIGN),
    r"vertex 1 \(t\): traits: an input is brought": replace(TANGENT, traits=MADE_FOREIGN),
    r"vertex 5 \(scale\): inplace: vertex 3 is external": Vertex(
        5, VertexKind.KERNEL, 1, "scale", ((3, 0),), (512,), inplace=((0, 0),)
    ),
    r"vertex 0 \(w\): host_updated: only a value that lives over steps, that is not foreign": replace(
        WEIGHT, traits=replace(FOREIGN, host_updated=True)
    ),
    r"vertex 0 \(w\): host_updated: .* that may leave": replace(WEIGHT, traits=replace(HOST_UPDATED_STATE, stays=True)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_traits_that_make_no_sense_are_named(message: str) -> None:
    check_taskgraph(step())
    with pytest.raises(GraphFileError, match=message):
        check_taskgraph(step(REFUSED[message]))


def test_both_traits_survive_files(tmp_path: Path) -> None:
    """Of graphs and of plans, to the same bytes; other traits are another graph."""
    graph = step()
    plan = make_plan(graph, cyclic=True, planner="timed")
    verify(graph, plan)
    for traits in (MADE_FOREIGN, HOST_UPDATED_STATE):
        (vertex,) = (vertex for vertex in graph.vertices if vertex.traits == traits)
        other = step(replace(vertex, traits=PER_STEP if traits == MADE_FOREIGN else STATE))
        assert fingerprint(other) != fingerprint(graph)
    task, mem, again = tmp_path / "task.json", tmp_path / "mem.json", tmp_path / "again.json"
    write_taskgraph(graph, task)
    assert read_taskgraph(task) == graph
    write_taskgraph(read_taskgraph(task), again)
    assert task.read_bytes() == again.read_bytes()
    write_memgraph(plan, mem)
    assert read_memgraph(mem) == plan
    write_memgraph(read_memgraph(mem), again)
    assert mem.read_bytes() == again.read_bytes()
