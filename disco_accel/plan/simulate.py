"""Discrete-event simulation of a plan on a machine: kernels in streams, copies on links, the best priority first."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from disco_accel.errors import Stalled
from disco_accel.memgraph import MemGraph
from disco_accel.taskgraph import Vertex, VertexKind


@dataclass(frozen=True, slots=True)
class Link:
    """``bandwidth`` in bytes/s and ``latency`` in seconds per copy; one copy at a time per device."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan is judged on. The defaults are those of the example in docs/schema.md."""

    compute_streams: int = 1
    h2d: Link = Link(2.0e10, 1e-5)
    d2h: Link = Link(2.0e10, 1e-5)
    p2p: Link = Link(2.0e11, 5e-6)

    def seconds(self, vertex: Vertex) -> float:
        """Return how long ``vertex`` takes: kernels their duration (0 if unknown), copies latency and bytes."""
        if vertex.kind is VertexKind.KERNEL:
            return vertex.duration or 0.0
        if vertex.kind is VertexKind.INPUT or not vertex.sizes[0]:
            return 0.0
        link = {VertexKind.RELOAD: self.h2d, VertexKind.OFFLOAD: self.d2h}.get(vertex.kind, self.p2p)
        return link.latency + vertex.sizes[0] / link.bandwidth


@dataclass(frozen=True, slots=True)
class Simulation:
    """``makespan`` in seconds; ``busy``: seconds of work per lane, such as ``compute0`` or ``h2d0`` (device 0);
    ``starts``: vertex id → second at which it starts."""

    makespan: float
    busy: Mapping[str, float]
    starts: Mapping[int, float]


def simulate(memgraph: MemGraph, machine: Machine | None = None) -> Simulation:
    """Run ``memgraph`` once in simulated time. Ready vertices of a lane start in the order of the plan.

    Late values arrive when every ``out`` vertex has finished. Raises Stalled if the plan cannot run to its end.
    """
    machine = machine or Machine()
    run = _Run(memgraph, machine)
    return run.to_end()


def lower_bound(memgraph: MemGraph, machine: Machine | None = None) -> float:
    """Return the seconds that no execution of ``memgraph`` can beat: the busiest lane's work."""
    machine = machine or Machine()
    work: dict[str, float] = defaultdict(float)
    for vertex, lane in zip(memgraph.vertices, _lanes(memgraph), strict=True):
        work[lane] += machine.seconds(vertex) / (machine.compute_streams if lane.startswith("compute") else 1)
    return max(work.values(), default=0.0)


def _lanes(memgraph: MemGraph) -> list[str]:
    device = {vertex.id: vertex.device for vertex in memgraph.vertices}
    names = {VertexKind.RELOAD: "h2d", VertexKind.OFFLOAD: "d2h"}
    return [
        f"p2p{device[vertex.inputs[0][0]]}"
        if vertex.kind is VertexKind.TRANSFER
        else f"{names.get(vertex.kind, 'compute')}{vertex.device}"
        for vertex in memgraph.vertices
    ]


class _Run:
    def __init__(self, memgraph: MemGraph, machine: Machine) -> None:
        self.memgraph = memgraph
        self.machine = machine
        self.vertices = memgraph.vertices
        index = {vertex.id: i for i, vertex in enumerate(self.vertices)}
        self.successors: list[list[int]] = [[] for _ in self.vertices]
        self.waiting = [0] * len(self.vertices)
        edges = set(memgraph.data_edges) | set(memgraph.memory_edges)
        edges |= {
            (producer, vertex.id)
            for vertex in self.vertices
            for producer, _ in vertex.inputs
            if self.vertices[index[producer]].kind is VertexKind.INPUT
        }
        for u, v in sorted(edges):
            self.successors[index[u]].append(index[v])
            self.waiting[index[v]] += 1
        self.lanes = _lanes(memgraph)
        self.free: dict[str, int] = {
            lane: machine.compute_streams if lane.startswith("compute") else 1 for lane in sorted(set(self.lanes))
        }
        self.queues: dict[str, list[int]] = {lane: [] for lane in self.free}
        self.running: list[tuple[float, int]] = []
        self.busy: dict[str, float] = dict.fromkeys(self.free, 0.0)
        self.starts: dict[int, float] = {}
        self.outs_left = sum(v.out for v in self.vertices if v.kind is not VertexKind.INPUT)
        self.left = len(self.vertices)

    def to_end(self) -> Simulation:
        """Run until nothing is left."""
        for i, vertex in enumerate(self.vertices):
            if vertex.kind is not VertexKind.INPUT and not self.waiting[i]:
                self._queue(i)
        for i, vertex in enumerate(self.vertices):
            if vertex.kind is VertexKind.INPUT and not vertex.late:
                self._done(i)
        if not self.outs_left:
            self._open_gate()
        now = 0.0
        self._launch(now)
        while self.running:
            now = self.running[0][0]
            while self.running and self.running[0][0] <= now:
                _, i = heapq.heappop(self.running)
                self.free[self.lanes[i]] += 1
                self._done(i)
                if self.vertices[i].out:
                    self.outs_left -= 1
                    if not self.outs_left:
                        self._open_gate()
            self._launch(now)
        if self.left:
            raise Stalled(f"the plan cannot run to its end: {self.left} vertices never start")
        return Simulation(now, {lane: busy for lane, busy in self.busy.items() if busy}, self.starts)

    def _queue(self, i: int) -> None:
        heapq.heappush(self.queues[self.lanes[i]], i)

    def _done(self, i: int) -> None:
        self.left -= 1
        for successor in self.successors[i]:
            self.waiting[successor] -= 1
            if not self.waiting[successor]:
                self._queue(successor)

    def _open_gate(self) -> None:
        for i, vertex in enumerate(self.vertices):
            if vertex.late:
                self._done(i)

    def _launch(self, now: float) -> None:
        for lane, queue in self.queues.items():
            while queue and self.free[lane]:
                i = heapq.heappop(queue)
                seconds = self.machine.seconds(self.vertices[i])
                self.free[lane] -= 1
                self.busy[lane] += seconds
                self.starts[self.vertices[i].id] = now
                heapq.heappush(self.running, (now + seconds, i))
