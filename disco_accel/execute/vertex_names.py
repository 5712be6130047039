"""What messages call the vertices of a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import OpCall, Ref, Vertex, VertexKind
from disco_accel.native.op_encoding import label

_VERTEX = re.compile(r"\b(\d+) \((?:input|kernel|transfer|offload|reload)\)")


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

    def what(self, vertex: Vertex) -> str:
        """What the vertex does, without its id."""
        if vertex.kind is VertexKind.KERNEL:
            call = self._calls.get(vertex.id)
            return label(call) if call else vertex.op or "kernel"
        if vertex.kind is VertexKind.INPUT:
            return f"input {self._names.get(vertex.id, vertex.op)}".strip()
        return f"{vertex.kind.name.lower()} of {self._value(vertex.inputs[0])}"

    def account(self, message: str) -> str:
        """The engine's own account of a step that hangs or of a device that fails: vertices by name, not position.

        Not for the message of an op, whose numbers are its own.
        """
        return _VERTEX.sub(lambda m: self.at(int(m[1])) if int(m[1]) < len(self._order) else m[0], message)

    def _value(self, ref: Ref) -> str:
        """The value that a chain of copies carries, by who made it."""
        vertex = self._vertices[ref[0]]
        while vertex.kind in (VertexKind.OFFLOAD, VertexKind.RELOAD):
            ref = vertex.inputs[0]
            vertex = self._vertices[ref[0]]
        if vertex.kind is VertexKind.INPUT:
            return self._names.get(vertex.id) or f"input {vertex.id}"
        output = f"output {ref[1]} of " if len(vertex.sizes) > 1 else ""
        return f"{output}vertex {vertex.id} ({self.what(vertex)})"
