"""How long a step takes that changes its own weights, by a list schedule without addresses.

It compares places where updates may run. Values that several kernels of a device read stay there. Values of one
alone, such as an optimizer's state, come and go through the rest of the memory, or stay as far as it is large enough.
An estimate: no plan, and no value that the step makes is offloaded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from disco_accel.graph.check import dependencies
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import Edge, MemGraph
from disco_accel.graph.order import live_peak
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists, lasting_versions, overwrites
from disco_accel.simulate.simulator import Machine, Simulation, Simulator

_IN_FLIGHT = 3
"""Streamed values for which there is room at once: one that arrives, one in use, one that leaves."""


def list_schedule(graph: TaskGraph) -> MemGraph:
    """Return ``graph`` with the copies that a step needs, in an order and with edges, but without addresses."""
    return _Copies(graph).plan()


def estimated(graph: TaskGraph, machine: Machine) -> Simulation:
    """Run the list schedule in simulated time."""
    return Simulator(list_schedule(graph), machine).run()


class _Copies:
    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.home_uses = HomeUses.of(graph)
        self.states = lasting_versions(graph.vertices)
        self.versions = {version: state for state, each in self.states.items() for version in each}
        self.by_id = {vertex.id: vertex for vertex in graph.vertices}
        self.readers: dict[Ref, list[Vertex]] = {}
        for vertex in graph.vertices:
            for ref in dict.fromkeys(vertex.inputs):
                if not self.home_uses.at_home(vertex, ref):
                    self.readers.setdefault(ref, []).append(vertex)
        self.next_id = 1 + max(self.by_id, default=0)
        self.before: dict[int, list[Vertex]] = {}
        """Copies to put in front of a vertex, in the order of the plan."""
        self.behind: dict[int, list[Vertex]] = {}
        self.edges: list[Edge] = [
            (producer, vertex.id)
            for vertex in graph.vertices
            for producer in dependencies(vertex)
            if self.by_id[producer].kind is not VertexKind.INPUT
        ]

    def plan(self) -> MemGraph:
        for device in self.graph.devices:
            if not device.is_host_device:
                self._stream(device)
        self._load_from_homes()
        self._readers_before_writers()
        vertices: list[Vertex] = []
        for vertex in self.graph.vertices:
            vertices += [*self.before.get(vertex.id, ()), vertex, *self.behind.get(vertex.id, ())]
        # Inputs in front: copies at the head of the step read them.
        vertices.sort(key=lambda vertex: vertex.kind is not VertexKind.INPUT)
        return MemGraph(self.graph.name, self.graph.spaces, tuple(vertices), {}, tuple(self.edges), ())

    def _copy(self, value: Ref, source: int, target: int) -> Vertex:
        producer = self.by_id[value[0]]
        self.next_id += 1
        made = Vertex(self.next_id, VertexKind.COPY, target, "", (value,), (producer.sizes[value[1]],), source=source)
        if producer.kind is not VertexKind.INPUT:
            self.edges.append((producer.id, made.id))
        return made

    def _stream(self, device: Space) -> None:
        """Add the copies of values that one vertex of ``device`` reads, in the order of their readers."""
        streamed: list[tuple[Vertex, Vertex]] = []
        held = 0
        for vertex in self.graph.vertices:
            if vertex.space != device.id or not host_copy_exists(vertex) or self.home_uses.never_moves(vertex):
                continue
            readers = {r.id: r for ref in self.states.get((vertex.id, 0), [(vertex.id, 0)]) for r in self._of(ref)}
            at_home = not self.home_uses.written.isdisjoint(self.states.get((vertex.id, 0), ()))
            if len(readers) == 1 and not at_home:
                streamed.append((vertex, next(iter(readers.values()))))
            elif readers:
                held += vertex.sizes[0]
        if not streamed:
            return
        place = {vertex.id: i for i, vertex in enumerate(self.graph.vertices)}
        streamed.sort(key=lambda pair: place[pair[1].id])
        own = [v if v.space == device.id else replace(v, sizes=(0,) * len(v.sizes)) for v in self.graph.vertices]
        made = [_without_versions(vertex) for vertex in own]
        room = device.memory - held - live_peak(made)
        window = max(_IN_FLIGHT * max(vertex.sizes[0] for vertex, _ in streamed), 0)
        room -= window
        # The last to be used stay: then a step does not end with their way back.
        while streamed and streamed[-1][0].sizes[0] <= room:
            room -= streamed.pop()[0].sizes[0]
        self._through(streamed, window, device.id)

    def _of(self, ref: Ref) -> list[Vertex]:
        return self.readers.get(ref, [])

    def _through(self, streamed: list[tuple[Vertex, Vertex]], window: int, device: int) -> None:
        """Add the copies of values that share ``window`` bytes, each with the vertex that reads it."""
        inside: deque[tuple[int, int]] = deque()
        free = window
        for value, reader in streamed:
            reload = self._copy((value.id, 0), value.source, device)
            while free < value.sizes[0] and inside:
                left, size = inside.popleft()
                self.edges.append((left, reload.id))
                free += size
            free -= value.sizes[0]
            self.edges.append((reload.id, reader.id))
            self.before.setdefault(reader.id, []).append(reload)
            gone = reader.id
            for output, ref in overwrites(reader):
                if ref == (value.id, 0):
                    offload = self._copy((reader.id, output), device, value.source)
                    self.behind.setdefault(reader.id, []).append(offload)
                    gone = offload.id
            inside.append((gone, value.sizes[0]))

    def _load_from_homes(self) -> None:
        """Add a reload of each version that a device reads of a value that the processors change at its home."""
        written = {self.versions[ref] for ref in self.home_uses.written}
        for state in sorted(written):
            chain = self.states[state]
            for i, version in enumerate(chain):
                readers = self._of(version)
                if not readers:
                    continue
                reload = self._copy(version, self.by_id[state[0]].source, self.by_id[state[0]].space)
                self.before.setdefault(readers[0].id, []).append(reload)
                self.edges += [(reload.id, reader.id) for reader in readers]
                if i + 1 < len(chain):
                    self.edges.append((reload.id, chain[i + 1][0]))

    def _readers_before_writers(self) -> None:
        place = {vertex.id: i for i, vertex in enumerate(self.graph.vertices)}
        for vertex in self.graph.vertices:
            for output, ref in overwrites(vertex):
                if (vertex.id, output) not in self.home_uses.written:
                    readers = (reader.id for reader in self._of(ref) if place[reader.id] < place[vertex.id])
                    self.edges += [(reader, vertex.id) for reader in readers]


def _without_versions(vertex: Vertex) -> Vertex:
    """``vertex`` with no bytes for outputs that it writes over an input."""
    over = {output for output, _ in overwrites(vertex)}
    return replace(vertex, sizes=tuple(0 if k in over else size for k, size in enumerate(vertex.sizes)))
