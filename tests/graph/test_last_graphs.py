"""Results that are kept of the last graphs."""

from __future__ import annotations

from dataclasses import replace

from disco_accel.graph.last_graphs import _KEPT, kept_for_last_graphs
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import OpCall, TaskGraph, Vertex, VertexKind


def test_graphs_with_the_same_vertices_and_calls_share_a_result() -> None:
    """Whatever their memory; not those with equal ones, which may be others later; the last ones are kept."""
    asked: list[TaskGraph] = []

    @kept_for_last_graphs
    def number(graph: TaskGraph) -> int:
        asked.append(graph)
        return len(asked)

    def graph() -> TaskGraph:
        vertices = Vertex(0, VertexKind.INPUT, 0, (4,)), Vertex(1, VertexKind.KERNEL, 0, (4,), ((0, 0),))
        return TaskGraph("g", (Space(0, 64, 16),), vertices, {1: OpCall("aten::neg", "default", (), ())})

    first = graph()
    assert number(first) == number(replace(first, spaces=(Space(0, 4096, 16),))) == 1
    assert number(replace(first, ops=dict(first.ops))) == 2
    assert number(graph()) == 3
    assert number(first) == 1
    others = [graph() for _ in range(_KEPT)]
    assert [number(other) for other in others] == [number(other) for other in others]
    assert number(first) == len(asked) == 4 + _KEPT
