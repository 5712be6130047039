"""What messages call the vertices of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disco_accel.graph.copies import kind_name, swaps
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import OpCall, Ref, Vertex, VertexKind
from disco_accel.native.op_encoding import label


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Vertices that had not finished when a step ended early, by position in serial order.

    ``in_flight``: the first of ``in_flight_count``. ``waiting``: the first of ``waiting_count`` that were not launched,
    each with a predecessor that had not finished, -1 for none.
    """

    in_flight: Sequence[int]
    in_flight_count: int
    waiting: Sequence[tuple[int, int]]
    waiting_count: int


class Describer:
    """Names vertices by id, op and module, copies by the value that they move.

    ``names`` of INPUT vertices, such as the parameter that one holds; without one it is called by its ``op``.
    """

    def __init__(self, graph: MemGraph, calls: Mapping[int, OpCall], names: Mapping[int, str]) -> None:
        self._order = graph.vertices
        self._vertices = {v.id: v for v in graph.vertices}
        self._calls, self._names = calls, names

    def at(self, position: int) -> str:
        """The vertex at ``position`` of the serial order: ``vertex 7 (reload of layers.0.up_proj.weight)``."""
        vertex = self._order[position]
        return f"vertex {vertex.id} ({self.what(vertex)})"

    def input(self, vertex: int) -> str:
        """An INPUT by id and name: ``input 3 (input_ids)``."""
        return f"input {vertex} ({self._names[vertex]})" if vertex in self._names else f"input {vertex}"

    def external(self, vertex: int) -> str:
        """What is bound to a vertex in each step: ``external input 3 (input_ids)``, or the memory that a transfer
        writes to."""
        if self._vertices[vertex].kind is VertexKind.INPUT:
            return f"external {self.input(vertex)}"
        return f"the memory that vertex {vertex} ({self.what(self._vertices[vertex])}) writes to"

    def what(self, vertex: Vertex) -> str:
        """What the vertex does, without its id."""
        if vertex.kind is VertexKind.KERNEL:
            call = self._calls.get(vertex.id)
            return label(call) if call else vertex.op or "kernel"
        if vertex.kind is VertexKind.INPUT:
            return f"input {self._names.get(vertex.id, vertex.op)}".strip()
        return f"{kind_name(vertex)} of {self._value(vertex.inputs[0])}"

    def stall(self, left: Unfinished) -> str:
        """Why a step makes no progress: ``in flight 1: vertex 7 (..); waiting 2: vertex 8 (..) for vertex 7 (..)``."""
        waiting = (self.at(v) + (f" for {self.at(on)}" if on >= 0 else "") for v, on in left.waiting)
        return (
            f"in flight {left.in_flight_count}: {self.in_flight(left) or 'none'}; "
            f"waiting {left.waiting_count}: {', '.join(waiting) or 'none'}"
        )

    def in_flight(self, left: Unfinished) -> str:
        """The vertices in flight, one after the other; empty if there were none."""
        return ", ".join(map(self.at, left.in_flight))

    def _value(self, ref: Ref) -> str:
        """The value that a chain of copies carries, by who made it."""
        vertex = self._vertices[ref[0]]
        while swaps(vertex):
            ref = vertex.inputs[0]
            vertex = self._vertices[ref[0]]
        if vertex.kind is VertexKind.INPUT:
            return self._names.get(vertex.id) or f"input {vertex.id}"
        output = f"output {ref[1]} of " if len(vertex.sizes) > 1 else ""
        return f"{output}vertex {vertex.id} ({self.what(vertex)})"
