"""Between the two forms of graphs and plans, where both can say it. Raises GraphFileError where not.

In *vertices*, whose inputs name the vertex and output that wrote them: what planners and the engine work on, and
version 1 of the files. In *values* with versions, spaces and *buffers*: version 2 of the files, and one judge.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from disco_accel.errors import GraphFileError
from disco_accel.graph import schema2
from disco_accel.graph.byte_ranges import is_resident_range
from disco_accel.graph.carried_values import carried_values, taskgraph_of
from disco_accel.graph.check import called
from disco_accel.graph.convert_graphs import GraphInValues, GraphInVertices, has_homes, host_id
from disco_accel.graph.memgraph import Edge, MemGraph, Slot
from disco_accel.graph.schema2 import GATE, Space, SpaceKind, Value, Version
from disco_accel.graph.schema2_plan_check import check_names
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.graph.values import arrives_at_gate, is_foreign

_COPIES = (VertexKind.OFFLOAD, VertexKind.RELOAD)


def plan_in_buffers(plan: MemGraph) -> schema2.Plan:
    """Return ``plan`` in buffers. Raises GraphFileError also for an offload without a place in the host's memory."""
    host = Space(host_id(plan.devices), SpaceKind.HOST, plan.host_memory, plan.host_alignment)
    names = GraphInValues(taskgraph_of(plan))
    graph = names.graph(host)
    carried = carried_values(plan)
    buffers = _Buffers(graph)
    external = {vertex.id for vertex in plan.vertices if is_foreign(vertex)}
    held: dict[Ref, int] = {}
    for vertex in plan.vertices:
        buffers.of_range(vertex)
        for k, size in enumerate(vertex.sizes):
            ref = (vertex.id, k)
            slot = plan.slots.get(ref)
            version = names.version[carried[ref]]
            if vertex.kind is VertexKind.OFFLOAD:
                offset = plan.host_offsets.get(vertex.id)
                value = graph.value[version[0]]
                if _is_state(value):
                    if offset is not None:
                        raise GraphFileError(f"{called(vertex)}: host_offset: it goes to the home of value {value.id}")
                    held[ref] = buffers.add(version, host.id, None)
                    continue
                if offset is None and size:
                    raise GraphFileError(f"{called(vertex)}: host_offset: missing, so its place is not the plan's")
                held[ref] = buffers.add(version, host.id, offset)
            elif slot is not None:
                held[ref] = buffers.add(version, slot.device, slot.addr)
            elif version in graph.written_at_home:
                held[ref] = buffers.add(version, host.id, None)
            elif not size or vertex.id in external:
                held[ref] = buffers.add(version, vertex.device, None)
    order = []
    buffers.all_bytes()
    by_id = {vertex.id: vertex for vertex in plan.vertices}
    for vertex in plan.vertices:
        if vertex.kind is VertexKind.INPUT:
            continue
        reads = []
        for ref in vertex.inputs:
            source = by_id[ref[0]]
            from_home = (
                source.kind is VertexKind.INPUT
                and not is_resident_range(source)
                and (vertex.kind is VertexKind.RELOAD or _uses_home(graph, vertex, names.version[ref]))
            )
            reads.append(buffers.home(names.version[ref]) if from_home else held[ref])
        writes = tuple(held[vertex.id, k] for k in range(len(vertex.sizes)))
        order.append(schema2.Planned(vertex.id, tuple(reads), writes))
    data, memory = (_edges_of_values(edges, by_id) for edges in (plan.data_edges, plan.memory_edges))
    return schema2.Plan(graph, tuple(buffers.all), tuple(order), data, memory, plan.cyclic)


def plan_in_vertices(plan: schema2.Plan) -> MemGraph:
    """Return ``plan`` in vertices. Raises GraphFileError as ``graph_in_vertices`` does, and for buffers that would
    share a name."""
    check_names(plan)
    names = GraphInVertices(plan.graph)
    graph = names.graph()
    arenas = {space.id for space in plan.graph.spaces if space.is_arena}
    buffers = {buffer.id: buffer for buffer in plan.buffers}
    written = {number for planned in plan.order for number in planned.writes}
    slots: dict[Ref, Slot] = {}
    offsets: dict[int, int] = {}
    host_end = 0
    ref_of: dict[int, Ref] = {}
    resident: list[Vertex] = []
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    taken = {planned.id for planned in plan.order}
    fresh = (number for number in itertools.count(max(by_id, default=-1) + 1) if number not in taken)
    for buffer in plan.buffers:
        if buffer.id in written:
            continue
        ref_of[buffer.id] = ref = names.ref[buffer.version]
        begin, end = buffer.range(plan.graph.value[buffer.version[0]])
        if end - begin < plan.graph.value[buffer.version[0]].bytes:
            resident.append(_resident_range(next(fresh), by_id[ref[0]], begin, end))
            ref_of[buffer.id] = resident[-1].id, 0
    for planned in plan.order:
        for k, number in enumerate(planned.writes):
            ref_of[number] = (planned.id, k)
    for buffer in plan.buffers:
        begin, end = buffer.range(plan.graph.value[buffer.version[0]])
        ref, size = ref_of[buffer.id], end - begin
        if buffer.offset is not None and buffer.space in arenas:
            slots[ref] = Slot(buffer.space, buffer.offset, size)
        elif buffer.offset is not None:
            offsets[ref[0]] = buffer.offset
            host_end = max(host_end, buffer.offset + size)
    vertices = [*(vertex for vertex in graph.vertices if vertex.kind is VertexKind.INPUT), *resident]
    for planned in plan.order:
        inputs = tuple(ref_of[number] for number in planned.reads)
        if planned.id in by_id:
            vertices.append(replace(by_id[planned.id], inputs=inputs))
        else:
            vertices.append(_copy_vertex(planned, inputs, buffers, plan))
    host = next((space for space in plan.graph.spaces if has_homes(space)), None)
    # Without a size the host's space has what the plan takes.
    host_memory = host_end if host is None or host.bytes is None else host.bytes
    gate = next((v.id for v in vertices if arrives_at_gate(v)), None)
    data, memory = (_edges_of_vertices(edges, gate) for edges in (plan.data_edges, plan.memory_edges))
    late = {v.id for v in vertices if arrives_at_gate(v)}
    arrived = [(ref[0], v.id) for v in vertices for ref in dict.fromkeys(v.inputs) if ref[0] in late]
    return MemGraph(
        plan.graph.name,
        graph.devices,
        tuple(vertices),
        slots,
        tuple(dict.fromkeys([*data, *arrived])),
        memory,
        offsets,
        host_memory,
        host.alignment if host else 1,
        plan.cyclic,
    )


def _uses_home(graph: schema2.Graph, vertex: Vertex, version: Version) -> bool:
    """Whether ``vertex``, of a plan, is a kernel on the host that reads ``version`` at its home."""
    on_host = vertex.kind is VertexKind.KERNEL and graph.space[vertex.device].kernels
    return on_host and graph.value[version[0]].home is not None


def _is_state(value: Value) -> bool:
    return value.traits.changes_over_steps


class _Buffers:
    def __init__(self, graph: schema2.Graph) -> None:
        self._graph = graph
        self._range: tuple[int, int] | None = None
        self._homes: dict[Version, int] = {}
        self.all: list[schema2.Buffer] = []

    def of_range(self, vertex: Vertex) -> None:
        """Have what is added from now on be of the bytes that ``vertex`` has, if it has a range of a value."""
        copies = vertex.kind is VertexKind.RELOAD or is_resident_range(vertex)
        self._range = (vertex.begin, vertex.sizes[0]) if copies else None

    def all_bytes(self) -> None:
        """Have what is added from now on be of whole values."""
        self._range = None

    def add(self, version: Version, space: int, offset: int | None) -> int:
        begin, size = self._range or (0, None)
        size = None if begin == 0 and size == self._graph.value[version[0]].bytes else size
        self.all.append(schema2.Buffer(len(self.all), version, space, offset, begin, size))
        return len(self.all) - 1

    def home(self, version: Version) -> int:
        """The buffer at the home of a value that lives from step to step."""
        if version not in self._homes:
            home = self._graph.value[version[0]].home
            if home is None:
                raise GraphFileError(f"value {version[0]}: home: a reload reads it on the host, where nothing has it")
            self._homes[version] = self.add(version, home, None)
        return self._homes[version]


def _edges_of_values(edges: Iterable[Edge], by_id: Mapping[int, Vertex]) -> tuple[Edge, ...]:
    """Edges from what arrives at the gate wait for the gate; from other inputs they say nothing."""
    converted = []
    for u, v in edges:
        if by_id[u].kind is not VertexKind.INPUT:
            converted.append((u, v))
        elif arrives_at_gate(by_id[u]):
            converted.append((GATE, v))
    return tuple(dict.fromkeys(converted))


def _edges_of_vertices(edges: Iterable[Edge], gate: int | None) -> tuple[Edge, ...]:
    converted = []
    for u, v in edges:
        if u != GATE:
            converted.append((u, v))
        elif gate is not None:
            converted.append((gate, v))
    return tuple(converted)


def _copy_vertex(
    planned: schema2.Planned,
    inputs: tuple[Ref, ...],
    buffers: Mapping[int, schema2.Buffer],
    plan: schema2.Plan,
) -> Vertex:
    source, target = buffers[planned.reads[0]], buffers[planned.writes[0]]
    spaces = plan.graph.space[source.space], plan.graph.space[target.space]
    if spaces[0].is_arena and has_homes(spaces[1]):
        kind, device = VertexKind.OFFLOAD, source.space
        value = plan.graph.value[source.version[0]]
        if _is_state(value) != (target.offset is None) and value.bytes:
            place = "its home" if _is_state(value) else "offsets"
            raise GraphFileError(f"vertex {planned.id}: on the host value {value.id} lies at {place} alone")
    elif has_homes(spaces[0]) and spaces[1].is_arena:
        kind, device = VertexKind.RELOAD, target.space
    else:
        raise GraphFileError(f"vertex {planned.id}: no engine copies from {spaces[0].kind} to {spaces[1].kind} yet")
    begin, end = target.range(plan.graph.value[source.version[0]])
    return Vertex(planned.id, kind, device, kind.name.lower(), inputs, (end - begin,), begin=begin)


def _resident_range(number: int, source: Vertex, begin: int, end: int) -> Vertex:
    sizes = (end - begin,)
    return Vertex(
        number, VertexKind.INPUT, source.device, "resident", ((source.id, 0),), sizes, traits=source.traits, begin=begin
    )
