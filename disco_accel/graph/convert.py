"""Between the two forms of graphs and plans, where both can say it. Raises GraphFileError where not.

In *vertices*, whose inputs name the vertex and output that wrote them: what planners and the engine work on, and
version 1 of the files. In *values* with versions, spaces and *buffers*: version 2 of the files, and one judge.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from disco_accel.errors import GraphFileError
from disco_accel.graph import schema2
from disco_accel.graph.byte_ranges import is_resident_range
from disco_accel.graph.carried_values import carried_values, taskgraph_of
from disco_accel.graph.check import called, check_taskgraph
from disco_accel.graph.memgraph import Edge, MemGraph, Slot
from disco_accel.graph.schema2 import GATE, Space, SpaceKind, Value, Version, Work
from disco_accel.graph.schema2_check import check_graph
from disco_accel.graph.schema2_plan_check import check_names
from disco_accel.graph.taskgraph import Device, Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import BROUGHT, MADE, MADE_FOREIGN, Access, Arrival
from disco_accel.graph.values import arrives_at_gate, changes_over_steps, host_copy_exists, is_foreign, overwrites

_COPIES = (VertexKind.OFFLOAD, VertexKind.RELOAD)


def graph_in_values(graph: TaskGraph) -> schema2.Graph:
    """Return ``graph`` in values: inputs become values with their ids, outputs values with ids of their own.

    Raises GraphFileError for an ``inplace`` that is not a new version of a value (over a clean input, of fewer bytes,
    or where another vertex is written too) and for ids below 0.
    """
    return _InValues(graph).graph()


def graph_in_vertices(graph: schema2.Graph) -> TaskGraph:
    """Return ``graph`` in vertices, which have no storage and hand out all outputs of a vertex, or none."""
    return _InVertices(graph).graph()


def plan_in_buffers(plan: MemGraph) -> schema2.Plan:
    """Return ``plan`` in buffers. Raises GraphFileError also for an offload without a place in the host's memory."""
    host = Space(_host_id(plan.devices), SpaceKind.HOST, plan.host_memory, plan.host_alignment)
    names = _InValues(taskgraph_of(plan))
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
    names = _InVertices(plan.graph)
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
    host = next((space for space in plan.graph.spaces if _has_homes(space)), None)
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


def _host_id(devices: Iterable[Device]) -> int:
    return max(device.id for device in devices) + 1


def _has_homes(space: Space) -> bool:
    """Whether it is the memory of the host where values have their homes, and offloads go."""
    return space.kind is SpaceKind.HOST and not space.kernels


def _uses_home(graph: schema2.Graph, vertex: Vertex, version: Version) -> bool:
    """Whether ``vertex``, of a plan, is a kernel on the host that reads ``version`` at its home."""
    on_host = vertex.kind is VertexKind.KERNEL and graph.space[vertex.device].kernels
    return on_host and graph.value[version[0]].home is not None


def _is_state(value: Value) -> bool:
    return value.traits.changes_over_steps


class _InValues:
    """``version``: the version-2 name of each value of a version-1 graph."""

    def __init__(self, graph: TaskGraph) -> None:
        self._source = graph
        self._by_id = {vertex.id: vertex for vertex in graph.vertices}
        self.version: dict[Ref, Version] = {}

    def graph(self, host: Space | None = None) -> schema2.Graph:
        source = self._source
        host = host or Space(_host_id(source.devices), SpaceKind.HOST, source.host_memory, 1)
        spaces = tuple(
            Space(d.id, SpaceKind.HOST if d.host else SpaceKind.DEVICE, d.memory, d.alignment, d.host)
            for d in source.devices
        )
        if any(vertex.id < 0 for vertex in source.vertices):
            raise GraphFileError("id: version 2 counts vertices from 0 on; give them other numbers")
        fresh = max((vertex.id for vertex in source.vertices), default=-1) + 1
        values: list[Value] = []
        taken: dict[Version, int] = {}
        # By id and not by place, so that a graph and a plan of it, which may have another order, agree on names.
        for vertex in sorted(source.vertices, key=lambda vertex: vertex.id):
            if vertex.kind is VertexKind.INPUT:
                values.append(_value_of_input(vertex, host.id))
                self.version[vertex.id, 0] = (vertex.id, 0)
                continue
            for k, size in enumerate(vertex.sizes):
                if k not in dict(vertex.inplace):
                    values.append(Value(fresh, size, vertex.device, vertex.traits if is_foreign(vertex) else MADE))
                    self.version[vertex.id, k] = (fresh, 0)
                    fresh += 1
        for vertex in source.vertices:
            for output, ref in overwrites(vertex):
                self.version[vertex.id, output] = self._next_version(vertex, output, ref, taken)
        return check_graph(
            schema2.Graph(
                source.name,
                (*spaces, host),
                tuple(values),
                tuple(self._vertex(v) for v in source.vertices if v.kind is not VertexKind.INPUT),
                self._outputs("out"),
                self._outputs("keep"),
                source.ops,
            )
        )

    def _next_version(self, vertex: Vertex, output: int, ref: Ref, taken: dict[Version, int]) -> Version:
        source = self._by_id[ref[0]]
        if host_copy_exists(source) and not changes_over_steps(source):
            raise GraphFileError(
                f"{called(vertex)}: inplace: over {called(source)}, which no kernel changes: the host's copy stays"
            )
        if vertex.sizes[output] != source.sizes[ref[1]]:
            raise GraphFileError(
                f"{called(vertex)}: inplace: over a value of more bytes, which is no new version of it"
            )
        value, version = self.version[ref]
        following = (value, version + 1)
        if following in taken:
            raise GraphFileError(f"{called(vertex)}: inplace: over the same value as vertex {taken[following]}")
        taken[following] = vertex.id
        return following

    def _vertex(self, vertex: Vertex) -> schema2.Vertex:
        after = []
        for other in vertex.after:
            if self._by_id[other].kind is not VertexKind.INPUT:
                after.append(other)
            elif arrives_at_gate(self._by_id[other]):
                after.append(GATE)
        return schema2.Vertex(
            vertex.id,
            Work.COPY if vertex.kind is VertexKind.TRANSFER else Work.KERNEL,
            vertex.device,
            vertex.op,
            tuple(self.version[ref] for ref in vertex.inputs),
            tuple(self.version[vertex.id, k] for k in range(len(vertex.sizes))),
            vertex.duration,
            tuple(dict.fromkeys(after)),
            vertex.may_inplace,
        )

    def _outputs(self, flag: str) -> tuple[Version, ...]:
        marked = [vertex for vertex in self._source.vertices if getattr(vertex, flag)]
        return tuple(self.version[vertex.id, k] for vertex in marked for k in range(len(vertex.sizes)))


def _value_of_input(vertex: Vertex, host: int) -> Value:
    return Value(
        vertex.id,
        vertex.sizes[0],
        vertex.device,
        vertex.traits,
        host if host_copy_exists(vertex) else None,
        vertex.op,
    )


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
    if spaces[0].is_arena and _has_homes(spaces[1]):
        kind, device = VertexKind.OFFLOAD, source.space
        value = plan.graph.value[source.version[0]]
        if _is_state(value) != (target.offset is None) and value.bytes:
            place = "its home" if _is_state(value) else "offsets"
            raise GraphFileError(f"vertex {planned.id}: on the host value {value.id} lies at {place} alone")
    elif _has_homes(spaces[0]) and spaces[1].is_arena:
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


class _InVertices:
    """``ref``: the version-1 name of each version of a version-2 graph."""

    def __init__(self, graph: schema2.Graph) -> None:
        self._source = graph
        self.ref: dict[Version, Ref] = {}

    def graph(self) -> TaskGraph:
        source = self._source
        devices = []
        for space in source.spaces:
            if space.kind is SpaceKind.STORAGE:
                raise GraphFileError(f"space {space.id}: no planner and no engine knows storage yet")
            if space.is_arena:
                assert space.bytes is not None
                devices.append(Device(space.id, space.bytes, space.alignment, space.kernels))
        arriving = [value for value in source.values if value.traits.arrival is not Arrival.MADE]
        ids = _input_ids(arriving, {vertex.id for vertex in source.vertices})
        for value in arriving:
            self.ref[value.id, 0] = (ids[value.id], 0)
        for vertex in source.vertices:
            for k, version in enumerate(vertex.writes):
                self.ref[version] = (vertex.id, k)
        inputs = [self._input(value, ids[value.id]) for value in arriving]
        gate = next((vertex.id for vertex in inputs if arrives_at_gate(vertex)), None)
        kernels = [self._vertex(vertex, gate) for vertex in source.vertices]
        hosts = [space for space in source.spaces if _has_homes(space)]
        if len(hosts) > 1:
            raise GraphFileError(f"space {hosts[1].id}: planners and the engine know one memory of the host")
        host = hosts[0].bytes if hosts else None
        return check_taskgraph(TaskGraph(source.name, tuple(devices), (*inputs, *kernels), source.ops, host))

    def _input(self, value: Value, number: int) -> Vertex:
        return Vertex(
            number,
            VertexKind.INPUT,
            value.space,
            value.name,
            (),
            (value.bytes,),
            traits=value.traits,
            out=self._marked([(value.id, 0)], self._source.gate_outputs, f"value {value.id}"),
            keep=self._marked([(value.id, 0)], self._source.end_outputs, f"value {value.id}"),
        )

    def _vertex(self, vertex: schema2.Vertex, gate: int | None) -> Vertex:
        inplace = tuple(
            (k, vertex.reads.index((value, version - 1))) for k, (value, version) in enumerate(vertex.writes) if version
        )
        if GATE in vertex.after and gate is None:
            raise GraphFileError(f"vertex {vertex.id}: after: nothing arrives at the gate, which nobody would open")
        written = [self._source.value[value] for value, _ in vertex.writes]
        foreign = any(
            value.traits.arrival is Arrival.MADE and value.traits.access is Access.FOREIGN for value in written
        )
        where = f"vertex {vertex.id}"
        return Vertex(
            vertex.id,
            VertexKind.TRANSFER if vertex.work is Work.COPY else VertexKind.KERNEL,
            vertex.space,
            vertex.op,
            tuple(self.ref[version] for version in vertex.reads),
            tuple(value.bytes for value in written),
            vertex.duration,
            traits=MADE_FOREIGN if foreign else BROUGHT,
            out=self._marked(vertex.writes, self._source.gate_outputs, where),
            keep=self._marked(vertex.writes, self._source.end_outputs, where),
            after=tuple(gate if other == GATE and gate is not None else other for other in vertex.after),
            inplace=inplace,
            may_inplace=vertex.may_overwrite,
        )

    def _marked(self, versions: Iterable[Version], outputs: Collection[Version], where: str) -> bool:
        """Whether a vertex's outputs are handed out: all that have bytes, or none."""
        marks = {v in outputs for v in versions if self._source.value[v[0]].bytes}
        if len(marks) > 1:
            raise GraphFileError(f"{where}: planners hand out all outputs of a vertex, or none")
        return marks == {True} or (not marks and any(v in outputs for v in versions))


def _input_ids(arriving: Iterable[Value], vertices: set[int]) -> dict[int, int]:
    """Ids of the vertices that stand for values: the values' own, where no vertex has them."""
    ids: dict[int, int] = {}
    used = {value.id for value in arriving} | vertices
    fresh = max(used, default=-1) + 1
    for value in arriving:
        if value.id in vertices:
            ids[value.id], fresh = fresh, fresh + 1
        else:
            ids[value.id] = value.id
    return ids
