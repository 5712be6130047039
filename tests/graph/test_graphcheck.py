"""What a vertex needs by itself, and what its traits may say; files of version 2 say the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disco_accel.errors import BudgetTooSmall, GraphFileError
from disco_accel.graph.check import check_taskgraph, largest_need
from disco_accel.graph.files import (
    fingerprint,
    read_memgraph,
    read_taskgraph,
    version_needed,
    write_memgraph,
    write_taskgraph,
)
from disco_accel.graph.schema2_files import graph_from_json
from disco_accel.graph.taskgraph import Device, TaskGraph, Vertex, VertexKind, with_at_least
from disco_accel.graph.traits import BROUGHT, FOREIGN, FROZEN, LATE_FOREIGN, MADE_FOREIGN, RENEWED_STATE, STATE
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
        Vertex(5, VertexKind.TRANSFER, 1, "copy", ((3, 0),), (700,)),
    )
    graph = TaskGraph("needs", (Device(0, 1 << 20, 256), Device(1, 1 << 20, 512)), vertices)
    need, vertex = largest_need(graph, 0)
    # Two values of 1000 bytes, each 1024 long in the arena; the external one is elsewhere, the unread one on the host.
    assert (need, vertex.id if vertex else None) == (2048, 3)
    need, vertex = largest_need(graph, 1)
    assert (need, vertex.id if vertex else None) == (1024, 5)
    assert largest_need(TaskGraph("none", (Device(0, 1, 1),), ()), 0) == (0, None)


HOST = Device(1, 1 << 20, host=True)
WEIGHT = Vertex(0, VertexKind.INPUT, 0, "w", sizes=(512,), traits=RENEWED_STATE)
TANGENT = Vertex(1, VertexKind.INPUT, 0, "t", sizes=(256,), traits=LATE_FOREIGN)
GRADIENT = Vertex(2, VertexKind.KERNEL, 0, "mm", ((0, 0), (1, 0)), (512,))
LEAVES = Vertex(3, VertexKind.TRANSFER, 1, "out", ((2, 0),), (512,), traits=MADE_FOREIGN)
CHANGED = Vertex(4, VertexKind.KERNEL, 0, "sgd", ((0, 0), (2, 0)), (512,), inplace=((0, 0),))


def step(*vertices: Vertex) -> TaskGraph:
    """A gradient that a transfer takes to the user's memory, and a state that the host changes too; ``vertices`` in the
    place of those of the same id."""
    own = {vertex.id: vertex for vertex in (WEIGHT, TANGENT, GRADIENT, LEAVES, CHANGED, *vertices)}
    return TaskGraph("leaving", (Device(0, 2048, 256), HOST), tuple(own[number] for number in sorted(own)))


REFUSED = {
    r"vertex 3 \(out\): device: 0 is not the host's": replace(LEAVES, device=0),
    r"vertex 3 \(out\): inputs\[0\]: from the user's memory to the user's": replace(
        LEAVES, inputs=((1, 0),), sizes=(256,)
    ),
    r"vertex 3 \(out\): size: a transfer cannot be larger": replace(LEAVES, sizes=(513,)),
    r"vertex 2 \(mm\): traits: only an input can have any": replace(GRADIENT, traits=MADE_FOREIGN),
    r"vertex 3 \(out\): traits: .* a transfer to the user's memory": replace(LEAVES, traits=FOREIGN),
    r"vertex 1 \(t\): traits: an input is brought": replace(TANGENT, traits=MADE_FOREIGN),
    r"vertex 5 \(scale\): inplace: vertex 3 is external": Vertex(
        5, VertexKind.KERNEL, 1, "scale", ((3, 0),), (512,), inplace=((0, 0),)
    ),
    r"vertex 0 \(w\): renewed: only a value that lives over steps, that is not foreign": replace(
        WEIGHT, traits=replace(FOREIGN, renewed=True)
    ),
    r"vertex 0 \(w\): renewed: .* that may leave": replace(WEIGHT, traits=replace(RENEWED_STATE, stays=True)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_traits_that_make_no_sense_are_named(message: str) -> None:
    check_taskgraph(step())
    with pytest.raises(GraphFileError, match=message):
        check_taskgraph(step(REFUSED[message]))


def test_both_traits_survive_files_of_version_2_alone(tmp_path: Path) -> None:
    """Of graphs and of plans, to the same bytes; version 1 says what to do, and other traits are another graph."""
    graph = step()
    plan = make_plan(graph, cyclic=True, planner="timed")
    verify(graph, plan)
    assert version_needed(graph) == version_needed(plan) == 2
    for traits in (MADE_FOREIGN, RENEWED_STATE):
        (vertex,) = (vertex for vertex in graph.vertices if vertex.traits == traits)
        other = step(replace(vertex, traits=BROUGHT if traits == MADE_FOREIGN else STATE))
        assert fingerprint(other) != fingerprint(graph)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write_taskgraph(graph, one, version=2)
    assert read_taskgraph(one) == graph
    write_taskgraph(read_taskgraph(one), two, version=2)
    assert one.read_bytes() == two.read_bytes()
    write_memgraph(plan, one, version=2)
    again = read_memgraph(one)
    verify(graph, again)
    assert [v.traits for v in again.vertices] == [v.traits for v in plan.vertices] and again.slots == plan.slots
    write_memgraph(again, two, version=2)
    assert one.read_bytes() == two.read_bytes()
    for vertex, why in ((LEAVES, "foreign but written by a transfer"), (WEIGHT, "read-write but renewed by the host")):
        alone = TaskGraph("one", (Device(0, 2048, 256), Device(1, 2048)), (vertex,))
        with pytest.raises(GraphFileError, match=rf"version 1 has no word for .* {why}: write version 2 .*--schema 2"):
            write_taskgraph(alone, one, version=1)


IN_VALUES: dict[str, Any] = {
    "format": "taskgraph",
    "version": 2,
    "spaces": [
        {"id": 0, "kind": "device", "bytes": 4096},
        {"id": 1, "kind": "host"},
        {"id": 2, "kind": "host", "bytes": 4096, "kernels": True},
    ],
    "values": [
        {"id": 0, "name": "x", "bytes": 256, "space": 0, "lifetime": "steps", "access": "foreign", "arrival": "start"},
        {"id": 1, "bytes": 256, "space": 0},
        {"id": 2, "name": "g", "bytes": 256, "space": 2, "access": "foreign"},
    ],
    "vertices": [
        {"id": 3, "kind": "kernel", "space": 0, "op": "mm", "reads": [0], "writes": [1]},
        {"id": 4, "kind": "copy", "space": 2, "op": "out", "reads": [1], "writes": [2]},
    ],
}
ONLY_A_COPY = r"value 2 \(g\): access: foreign, but made: only a copy to a space of the host with kernels"
IN_VALUES_REFUSED: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    (ONLY_A_COPY, lambda top: top["vertices"][1].update(kind="kernel", reads=[])),
    (ONLY_A_COPY, lambda top: (top["values"][2].update(space=0), top["vertices"][1].update(space=0))),
    (r"value 2 \(g\): access: foreign, and copied from foreign", lambda top: top["vertices"][1].update(reads=[0])),
    (r"vertex 4 \(out\): reads: there is no version \[9, 0\]", lambda top: top["vertices"][1].update(reads=[9])),
    (r"vertex 4 \(out\): writes: a copy reads one version", lambda top: top["vertices"][1].update(reads=[])),
    (r"value 2 \(g\): arrival: made, but no vertex", lambda top: top["vertices"].pop()),
    (r"value 2 \(g\): home: a value of one step has none", lambda top: top["values"][2].update(home=1)),
    (
        r"value 2 is foreign: no vertex may change",
        lambda top: top["vertices"].append(
            {"id": 5, "kind": "kernel", "space": 2, "op": "scale", "reads": [2], "writes": [[2, 1]]}
        ),
    ),
]


@pytest.mark.parametrize(("message", "change"), IN_VALUES_REFUSED)
def test_what_files_of_version_2_say_wrongly_of_the_users_memory_is_named(
    message: str, change: Callable[[dict[str, Any]], object]
) -> None:
    graph_from_json(json.loads(json.dumps(IN_VALUES)))
    top = json.loads(json.dumps(IN_VALUES))
    change(top)
    with pytest.raises(GraphFileError, match=message):
        graph_from_json(top)
