"""The order that a graph is planned in, and the edges that its values make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from disco_accel.graph.check import after_gate
from disco_accel.graph.last_graphs import kept_for_last_graphs
from disco_accel.graph.memgraph import Edge
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate, is_handed_out


@kept_for_last_graphs
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


def last_readers(order: Sequence[Vertex]) -> Mapping[Ref, int]:
    """Return, for each value that is read, the position of its last reader."""
    return {ref: v for v, vertex in enumerate(order) for ref in vertex.inputs}


def live_peak(order: Sequence[Vertex]) -> int:
    """Return the largest sum over devices, at any vertex, of the bytes of made values that are still to be read."""
    last = last_readers(order)
    change = [0] * (len(order) + 1)
    for v, vertex in enumerate(order):
        if vertex.kind is VertexKind.INPUT:
            continue
        for k, size in enumerate(vertex.sizes):
            change[v] += size
            if not is_handed_out(vertex):
                change[last.get((vertex.id, k), v) + 1] -= size
    return max(accumulate(change), default=0)


def working_bytes(graph: TaskGraph) -> int:
    """Return the bytes that a step of ``graph`` goes through again and again: inputs, and the peak of made values."""
    inputs = sum(sum(vertex.sizes) for vertex in graph.vertices if vertex.kind is VertexKind.INPUT)
    return inputs + live_peak(graph.vertices)
