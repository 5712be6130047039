"""What a plan in buffers must say to be one in vertices at all; whether it is right is for ``verify`` to say.

In vertices a copy is named by the vertex that makes it, here by its buffer. Where two buffers would get one name, or a
buffer the name of what it does not hold, a wrong plan of this form could become a right one of the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from disco_accel.errors import GraphFileError
from disco_accel.graph.schema2 import Buffer, Plan, SpaceKind, Version, Vertex
from disco_accel.graph.traits import Access, Arrival


def check_names(plan: Plan) -> None:
    """Raise GraphFileError, naming the buffer, unless each buffer of ``plan`` has a name of its own in vertices."""
    if sum(space.kind is SpaceKind.HOST and not space.kernels for space in plan.graph.spaces) > 1:
        raise GraphFileError("spaces: planners and the engine know one memory of the host")
    buffers = {buffer.id: buffer for buffer in plan.buffers}
    vertices = {vertex.id: vertex for vertex in plan.graph.vertices}
    written: set[int] = set()
    for planned in plan.order:
        vertex = vertices.get(planned.id)
        made = vertex.writes if vertex else tuple(buffers[number].version for number in planned.reads)
        if tuple(buffers[number].version for number in planned.writes) != made:
            raise GraphFileError(f"vertex {planned.id}: writes: expected buffers of {_listed(made)}")
        written.update(planned.writes)
    arriving: set[tuple[Version, bool, int]] = set()
    unwritten = {number: buffer for number, buffer in buffers.items() if number not in written}
    for buffer in unwritten.values():
        value = plan.graph.value[buffer.version[0]]
        if buffer.version[1] or value.traits.arrival is Arrival.MADE:
            raise GraphFileError(f"buffer {buffer.id}: version: nothing writes {list(buffer.version)}")
        if value.traits.access is Access.FOREIGN:
            if buffer.space != value.space:
                raise GraphFileError(f"buffer {buffer.id}: space: value {value.id} is in space {value.space}")
        elif value.bytes:
            place = (buffer.version, buffer.offset is None, buffer.begin)
            if place in arriving:
                raise GraphFileError(f"buffer {buffer.id}: version: {list(buffer.version)} arrives in another one too")
            arriving.add(place)
    for planned in plan.order:
        at_home = [number for number in planned.reads if number in unwritten and _is_home(plan, unwritten[number])]
        vertex = vertices.get(planned.id)
        if vertex is not None and plan.graph.space[vertex.space].kernels:
            _check_on_host(plan, vertex, (*planned.reads, *planned.writes), buffers)
        elif vertex is not None and at_home:
            raise GraphFileError(f"vertex {planned.id}: reads: buffer {at_home[0]} is a home, which only copies read")


def _check_on_host(plan: Plan, vertex: Vertex, numbers: tuple[int, ...], buffers: Mapping[int, Buffer]) -> None:
    """In vertices a kernel on the host uses homes whatever copy its inputs name."""
    for buffer in (buffers[number] for number in numbers):
        value = plan.graph.value[buffer.version[0]]
        home = (buffer.space, buffer.offset) == (value.home, None)
        if plan.graph.at_home(vertex, value) and value.bytes and not home:
            raise GraphFileError(f"vertex {vertex.id}: buffer {buffer.id} is not the home of value {value.id}")


def _is_home(plan: Plan, buffer: Buffer) -> bool:
    value = plan.graph.value[buffer.version[0]]
    return buffer.offset is None and value.traits.host_has_it and value.bytes > 0


def _listed(versions: tuple[Version, ...]) -> str:
    return ", ".join(map(str, map(list, versions[:8]))) or "nothing"
