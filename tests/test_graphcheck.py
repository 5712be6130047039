"""What a vertex needs by itself is never more than what some plan gets by with."""

from __future__ import annotations

import random

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.check import largest_need
from disco_accel.graph.taskgraph import Device, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN
from disco_accel.plan import make_plan
from disco_accel.testing.strategies import Shape, random_taskgraph, with_working_sets


def test_where_a_plan_fits_every_vertex_does() -> None:
    rng = random.Random(11)
    planned = 0
    for _ in range(150):
        graph = with_working_sets(random_taskgraph(rng, Shape(vertices=10)), rng.choice((0.6, 0.8, 1.0, 1.0)))
        try:
            make_plan(graph)
        except BudgetTooSmall as error:
            assert all(largest_need(graph, device.id)[0] <= error.needed for device in graph.devices)
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
