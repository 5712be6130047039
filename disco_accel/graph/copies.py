"""The copies that a plan adds, and ranges of bytes: a plan may have a value on its device in several ranges.

A plan *swaps in* a value from a backing space and *swaps out* to one. A swap-in copies the bytes from ``begin`` on, as
many as its size. A *resident range* is an INPUT that the plan adds: bytes from ``begin`` on of an input that never
changes, which are on the device when a step starts. A kernel reads a value in ranges by naming the first in place of
the value, the others behind its inputs. They lie side by side and are all of the value, which begins at the offset of
the first.
"""

from __future__ import annotations

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import is_backing
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind


def swaps_in(vertex: Vertex) -> bool:
    """Whether ``vertex`` copies from a backing space."""
    return vertex.kind is VertexKind.COPY and is_backing(vertex.source)


def swaps_out(vertex: Vertex) -> bool:
    """Whether ``vertex`` copies to a backing space."""
    return vertex.kind is VertexKind.COPY and is_backing(vertex.space)


def swaps(vertex: Vertex) -> bool:
    """Whether ``vertex`` copies from or to a backing space."""
    return swaps_in(vertex) or swaps_out(vertex)


def is_transfer(vertex: Vertex) -> bool:
    """Whether ``vertex`` copies from a device to another: a copy of the task graph's."""
    return vertex.kind is VertexKind.COPY and not is_backing(vertex.source) and not is_backing(vertex.space)


def kind_name(vertex: Vertex) -> str:
    """``input``, ``kernel``, ``reload`` and ``offload`` from and to a backing space, ``transfer`` between devices."""
    if vertex.kind is VertexKind.COPY:
        return "reload" if swaps_in(vertex) else "offload" if swaps_out(vertex) else "transfer"
    return vertex.kind.name.lower()


def is_resident_range(vertex: Vertex) -> bool:
    """Whether ``vertex`` is an INPUT of the plan alone: bytes of another that are on the device from the start."""
    return vertex.kind is VertexKind.INPUT and bool(vertex.inputs)


def copies_bytes(vertex: Vertex) -> bool:
    """Whether ``vertex`` is the plan's own and holds the bytes of its input: a swap, or a resident range."""
    return swaps(vertex) or is_resident_range(vertex)


def ranged_values(plan: MemGraph) -> dict[Ref, Ref]:
    """Return by copy that does not have all bytes of its value its source: an input, or a swap-out."""
    sizes = {vertex.id: vertex.sizes for vertex in plan.vertices}
    return {
        (vertex.id, 0): vertex.inputs[0]
        for vertex in plan.vertices
        if (swaps_in(vertex) or is_resident_range(vertex))
        and vertex.sizes[0] < sizes[vertex.inputs[0][0]][vertex.inputs[0][1]]
    }
