"""Ranges of bytes: a plan may have a value on its device in several, one behind the other.

A RELOAD copies the bytes from ``begin`` on, as many as its size. A *resident range* is an INPUT that the plan adds:
bytes from ``begin`` on of an input that never changes, which are on the device when a step starts. A kernel reads a
value in ranges by naming the first in place of the value, and the others behind the inputs that it has in the graph;
they lie side by side and are all of the value, so that its call finds the value at the address of the first.
"""

from __future__ import annotations

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind


def is_resident_range(vertex: Vertex) -> bool:
    """Whether ``vertex`` is an INPUT of the plan alone: bytes of another that are on the device from the start."""
    return vertex.kind is VertexKind.INPUT and bool(vertex.inputs)


def copies_bytes(vertex: Vertex) -> bool:
    """Whether ``vertex`` is the plan's own and holds the bytes of what it names: an offload, a reload, a resident
    range."""
    return vertex.kind in (VertexKind.OFFLOAD, VertexKind.RELOAD) or is_resident_range(vertex)


def ranged_values(plan: MemGraph) -> dict[Ref, Ref]:
    """Return by copy that does not have all bytes of its value what the host's copy of that value is: an input, or an
    offload."""
    sizes = {vertex.id: vertex.sizes for vertex in plan.vertices}
    return {
        (vertex.id, 0): vertex.inputs[0]
        for vertex in plan.vertices
        if (vertex.kind is VertexKind.RELOAD or is_resident_range(vertex))
        and vertex.sizes[0] < sizes[vertex.inputs[0][0]][vertex.inputs[0][1]]
    }
