"""Names of a plan's vertices in messages."""

from __future__ import annotations

from collections.abc import Mapping

from disco_accel.graph.copies import kind_name, swaps
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import OpCall, Ref, Vertex, VertexKind
from disco_accel.native.op_encoding import label


class Describer:
    """Names vertices by id, op and module, copies by the value that they move. ``names`` of INPUT vertices, such as the
    parameter that one holds; without one it is called by its ``op``."""

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
        """The user's memory of a vertex: ``external input 3 (input_ids)``, or the target of a transfer."""
        if self._vertices[vertex].kind is VertexKind.INPUT:
            return f"external {self.input(vertex)}"
        return f"the memory that vertex {vertex} ({self.what(self._vertices[vertex])}) writes to"

    def what(self, vertex: Vertex) -> str:
        """The work of the vertex, without its id."""
        if vertex.kind is VertexKind.KERNEL:
            call = self._calls.get(vertex.id)
            return label(call) if call else vertex.op or "kernel"
        if vertex.kind is VertexKind.INPUT:
            return f"input {self._names.get(vertex.id, vertex.op)}".strip()
        return f"{kind_name(vertex)} of {self._value(vertex.inputs[0])}"

    def _value(self, ref: Ref) -> str:
        """The value that a chain of copies carries, by its maker."""
        vertex = self._vertices[ref[0]]
        while swaps(vertex):
            ref = vertex.inputs[0]
            vertex = self._vertices[ref[0]]
        if vertex.kind is VertexKind.INPUT:
            return self._names.get(vertex.id) or f"input {vertex.id}"
        output = f"output {ref[1]} of " if len(vertex.sizes) > 1 else ""
        return f"{output}vertex {vertex.id} ({self.what(vertex)})"
