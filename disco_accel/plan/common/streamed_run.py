"""A simulated step whose weights do not all fit: kernels of weights that are there go first, while the next are loaded.

A serial order that takes the batch's parts one by one loads a layer's weight once for each. Here parts that wait for a
weight run behind each other once it has come, so that a load serves as many as have got there meanwhile.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.order import data_edges, serial_order
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists, is_foreign, is_handed_out, outlives_step
from disco_accel.plan.common.serial_orders import overwritings
from disco_accel.simulate.machine import Machine
from disco_accel.simulate.simulator import Simulator

_WINDOW = 256
"""Kernels of a device that have not started, in their order, for the first of which a weight is loaded."""


def streamed_starts(graph: TaskGraph, machine: Machine) -> Mapping[int, float] | None:
    """Return when the vertices of ``graph`` start; None if all weights fit."""
    order = serial_order(graph)
    room = {device.id: device.memory - _others(order, device.id) for device in graph.devices}
    total = Counter[int]()
    for vertex in order:
        if host_copy_exists(vertex):
            total[vertex.device] += vertex.sizes[0]
    if all(device.host or total[device.id] <= room[device.id] for device in graph.devices):
        return None
    return _StreamedRun(graph, order, machine, room).starts()


def _others(order: Sequence[Vertex], device: int) -> int:
    """Return the most bytes on ``device`` at once, in this order, of all but what the host has."""
    last = {ref: at for at, vertex in enumerate(order) for ref in vertex.inputs}
    change = [0] * (len(order) + 1)
    for at, vertex in enumerate(order):
        if vertex.device == device and not host_copy_exists(vertex) and not is_foreign(vertex):
            for k, size in enumerate(vertex.sizes):
                change[at] += size
                change[len(order) if is_handed_out(vertex) else last.get((vertex.id, k), at) + 1] -= size
    return max(accumulate(change), default=0)


@dataclass
class _Weights:
    """The weights of one device. ``room``: bytes that are free for them; ``kernels``: positions of those that read some
    and have not started; ``readers``: weight → its own, ascending; ``used``: weight → running kernels that read it."""

    room: int
    kernels: dict[int, None] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    used: Counter[int] = field(default_factory=Counter)
    coming: int | None = None

    def next_reader(self, weight: int) -> float:
        """Return the position of the first reader that has not started."""
        return self.readers[weight][0] if self.readers[weight] else float("inf")


class _StreamedRun:
    """Vertices by their position in ``order``."""

    def __init__(self, graph: TaskGraph, order: tuple[Vertex, ...], machine: Machine, room: Mapping[int, int]) -> None:
        before = tuple((order[reader].id, order[writer].id) for reader, writer in overwritings(order))
        self.machine = machine
        self.plan = Simulator(MemGraph(graph.name, graph.devices, order, {}, data_edges(order), before, {}), machine)
        self.device = [vertex.device for vertex in order]
        hosts = host_devices(graph.devices)
        near = {vertex.id: vertex for vertex in order if host_copy_exists(vertex) and vertex.device not in hosts}
        self.size = {vertex.id: vertex.sizes[0] for vertex in near.values()}
        self.weights = {device: _Weights(bytes_) for device, bytes_ in room.items()}
        self.reads: list[tuple[int, ...]] = []
        for at, vertex in enumerate(order):
            own_weights = [p for p, _ in vertex.inputs if p in near and near[p].device == vertex.device]
            self.reads.append(tuple(dict.fromkeys(own_weights)) if vertex.kind is VertexKind.KERNEL else ())
            if self.reads[at]:
                own = self.weights[vertex.device]
                own.kernels[at] = None
                # Beside the weights of one kernel there is room for those of the next.
                own.room = max(own.room, 2 * sum(self.size[each] for each in self.reads[at]))
                for each in self.reads[at]:
                    own.readers.setdefault(each, []).append(at)
        for own in self.weights.values():
            for each in own.readers:
                if self.size[each] <= own.room and outlives_step(near[each]):
                    own.there.add(each)
                    own.room -= self.size[each]
        self.waiting = list(self.plan.waiting)
        self.outs_left = sum(self.plan.out)
        self.free = list(self.plan.width)
        self.queues: list[list[int]] = [[] for _ in self.plan.lane_names]
        self.held: dict[int, list[int]] = defaultdict(list)
        """Weight that is missing → kernels that wait for it, and for nothing else but other weights."""
        self.events: list[tuple[float, int, int]] = []
        """Second, and the position of the vertex that ends then; or -1 and the device to which a weight has come."""
        self.now = 0.0
        self.started: dict[int, float] = {}

    def starts(self) -> dict[int, float]:
        """Run to the end; return vertex id → the second at which it starts."""
        for at in [at for at, waits in enumerate(self.waiting) if not waits]:
            self._ready(at)
        self._go_on()
        while self.events:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] <= self.now:
                _, at, device = heapq.heappop(self.events)
                if at < 0:
                    self._arrived(self.weights[device])
                else:
                    self.free[self.plan.lanes[at]] += 1
                    self.weights[self.device[at]].used.subtract(self.reads[at])
                    self._done(at)
            self._go_on()
        return {self.plan.ids[at]: second for at, second in self.started.items()}

    def _ready(self, at: int) -> None:
        if self.plan.inputs[at]:
            self._done(at)
            return
        own = self.weights[self.device[at]]
        missing = next((each for each in self.reads[at] if each not in own.there), None)
        if missing is None:
            heapq.heappush(self.queues[self.plan.lanes[at]], at)
        else:
            self.held[missing].append(at)

    def _done(self, at: int) -> None:
        released = list(self.plan.successors[at])
        if self.plan.out[at]:
            self.outs_left -= 1
            if not self.outs_left:
                released += self.plan.late
        for each in released:
            self.waiting[each] -= 1
            if not self.waiting[each]:
                self._ready(each)

    def _arrived(self, own: _Weights) -> None:
        weight, own.coming = own.coming, None
        if weight is not None:
            own.there.add(weight)
            for at in self.held.pop(weight, ()):
                self._ready(at)

    def _go_on(self) -> None:
        for lane, queue in enumerate(self.queues):
            while queue and self.free[lane]:
                at = heapq.heappop(queue)
                if self.weights[self.device[at]].there.issuperset(self.reads[at]):
                    self._start(at)
                else:
                    # Its weight has left since.
                    self._ready(at)
        for device, own in self.weights.items():
            if own.coming is None:
                self._load(device, own)

    def _start(self, at: int) -> None:
        self.started[at] = self.now
        own = self.weights[self.device[at]]
        own.kernels.pop(at, None)
        own.used.update(self.reads[at])
        for each in self.reads[at]:
            own.readers[each].remove(at)
        self.free[self.plan.lanes[at]] -= 1
        heapq.heappush(self.events, (self.now + self.plan.seconds[at], at, self.device[at]))

    def _load(self, device: int, own: _Weights) -> None:
        """Load the first weight that is missing, over those with later readers, the furthest first."""
        for at in islice(own.kernels, _WINDOW):
            missing = next((each for each in self.reads[at] if each not in own.there), None)
            if missing is None:
                continue
            idle = [each for each in own.there if not own.used[each] and own.next_reader(each) > at]
            idle.sort(key=lambda each: (own.next_reader(each), each))
            while own.room < self.size[missing] and idle:
                out = idle.pop()
                own.there.discard(out)
                own.room += self.size[out]
            if own.room >= self.size[missing]:
                own.room -= self.size[missing]
                own.coming = missing
                seconds = self.machine.h2d.seconds(self.size[missing], device)
                heapq.heappush(self.events, (self.now + seconds, -1, device))
            return
