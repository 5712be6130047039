"""The order that a graph is planned in, and the edges that its values make."""

from __future__ import annotations

from disco_accel.graph.check import after_gate
from disco_accel.graph.memgraph import Edge
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate


def serial_order(graph: TaskGraph) -> tuple[Vertex, ...]:
    """Return the vertices in the order that is planned for: inputs first, and nothing behind the gate before an out. A
    late value arrives only after every ``out`` vertex, so memory freed behind the gate must not serve before it."""
    behind = after_gate(graph.vertices)
    inputs = [vertex for vertex in graph.vertices if vertex.kind is VertexKind.INPUT]
    rest = [vertex for vertex in graph.vertices if vertex.kind is not VertexKind.INPUT]
    last_out = max((index for index, vertex in enumerate(rest) if handed_out_at_gate(vertex)), default=-1)
    head, tail = rest[: last_out + 1], rest[last_out + 1 :]
    early = [vertex for vertex in head if vertex.id not in behind]
    return (*inputs, *early, *(vertex for vertex in head if vertex.id in behind), *tail)


def data_edges(vertices: tuple[Vertex, ...]) -> tuple[Edge, ...]:
    """Return the (producer, reader) and ``after`` pairs by reader; only late inputs need to be waited for."""
    silent = {vertex.id for vertex in vertices if vertex.kind is VertexKind.INPUT and not arrives_at_gate(vertex)}
    edges: list[Edge] = []
    for vertex in vertices:
        sources = dict.fromkeys([producer for producer, _ in vertex.inputs] + list(vertex.after))
        edges.extend((source, vertex.id) for source in sources if source not in silent)
    return tuple(edges)
