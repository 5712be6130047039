"""Between the two forms of task graphs, where both can say it. Raises GraphFileError where not."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from disco_accel.errors import GraphFileError
from disco_accel.graph import schema2
from disco_accel.graph.check import called, check_taskgraph
from disco_accel.graph.schema2 import GATE, Space, SpaceKind, Value, Version, Work
from disco_accel.graph.schema2_check import check_graph
from disco_accel.graph.taskgraph import Device, Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import BROUGHT, MADE, MADE_FOREIGN, Access, Arrival
from disco_accel.graph.values import arrives_at_gate, changes_over_steps, host_copy_exists, is_foreign, overwrites


def graph_in_values(graph: TaskGraph) -> schema2.Graph:
    """Return ``graph`` in values: inputs become values with their ids, outputs values with ids of their own.

    Raises GraphFileError for an ``inplace`` that is not a new version of a value (over a clean input, of fewer bytes,
    or where another vertex is written too) and for ids below 0.
    """
    return GraphInValues(graph).graph()


def graph_in_vertices(graph: schema2.Graph) -> TaskGraph:
    """Return ``graph`` in vertices, which have no storage and hand out all outputs of a vertex, or none."""
    return GraphInVertices(graph).graph()


def host_id(devices: Iterable[Device]) -> int:
    return max(device.id for device in devices) + 1


def has_homes(space: Space) -> bool:
    """Whether it is the memory of the host where values have their homes, and offloads go."""
    return space.kind is SpaceKind.HOST and not space.kernels


class GraphInValues:
    """``version``: the version-2 name of each value of a version-1 graph."""

    def __init__(self, graph: TaskGraph) -> None:
        self._source = graph
        self._by_id = {vertex.id: vertex for vertex in graph.vertices}
        self.version: dict[Ref, Version] = {}

    def graph(self, host: Space | None = None) -> schema2.Graph:
        source = self._source
        host = host or Space(host_id(source.devices), SpaceKind.HOST, source.host_memory, 1)
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


class GraphInVertices:
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
        hosts = [space for space in source.spaces if has_homes(space)]
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
