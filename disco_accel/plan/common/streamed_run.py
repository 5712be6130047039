"""A simulated step whose weights do not all fit: kernels of weights that are there go first, while the next are loaded.

A serial order that takes the batch's parts one by one loads a layer's weight once for each. Here parts that wait for a
weight run behind each other once it has come, so that a load serves as many as have got there meanwhile.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.order import data_edges, serial_order
from disco_accel.graph.spaces import TO_DEVICE
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
            total[vertex.space] += vertex.sizes[0]
    if all(device.is_host_device or total[device.id] <= room[device.id] for device in graph.devices):
        return None
    return _StreamedRun(graph, order, machine, room).starts()


def _others(order: Sequence[Vertex], device: int) -> int:
    """Return the most bytes on ``device`` at once, in this order, of values that the host has not."""
    last = {ref: at for at, vertex in enumerate(order) for ref in vertex.inputs}
    change = [0] * (len(order) + 1)
    for at, vertex in enumerate(order):
        if vertex.space == device and not host_copy_exists(vertex) and not is_foreign(vertex):
            for k, size in enumerate(vertex.sizes):
                change[at] += size
                change[len(order) if is_handed_out(vertex) else last.get((vertex.id, k), at) + 1] -= size
    return max(accumulate(change), default=0)


@dataclass
class _Weights:
    """The weights of one device. ``room``: bytes that are free for them; ``kernels``: positions of those that read
    some, ascending; ``readers``: weight → those that read it and have not started, ascending; ``used``: weight →
    running kernels that read it. ``settled``: nothing has changed since no weight could be loaded."""

    room: int
    kernels: list[int] = field(default_factory=list)
    readers: dict[int, list[int]] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    used: Counter[int] = field(default_factory=Counter)
    coming: int | None = None
    settled: bool = False
    _started: set[int] = field(default_factory=set)
    _window: int = 0
    """How many of ``kernels`` there are up to the last for which a weight is loaded, started ones included."""
    _missing: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (next reader, weight), of weights that are not there; stale once the weight has come. No reader starts
    before that."""
    _furthest: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (minus the next reader, minus the weight), of weights that are there; stale once a reader has started
    or the weight has left."""

    def begin(self) -> None:
        """Note the window, and which weights are there and which are not, before the first kernel starts."""
        self._window = min(_WINDOW, len(self.kernels))
        self._missing = [(self.next_reader(each), each) for each in self.readers if each not in self.there]
        self._furthest = [(-self.next_reader(each), -each) for each in self.there]
        heapq.heapify(self._missing)
        heapq.heapify(self._furthest)

    def next_reader(self, weight: int) -> float:
        """Return the position of the first reader that has not started."""
        return self.readers[weight][0] if self.readers[weight] else float("inf")

    def start(self, at: int, reads: Sequence[int]) -> None:
        """Note that kernel ``at`` starts, which ``reads`` some of the weights."""
        self.used.update(reads)
        for each in reads:
            self.readers[each].remove(at)
            heapq.heappush(self._furthest, (-self.next_reader(each), -each))
        self._started.add(at)
        if self._window < len(self.kernels) and at < self.kernels[self._window]:
            self._window += 1
            while self._window < len(self.kernels) and self.kernels[self._window - 1] in self._started:
                self._window += 1
        self.settled = False

    def arrive(self, weight: int) -> None:
        """Note that ``weight`` has come."""
        self.there.add(weight)
        heapq.heappush(self._furthest, (-self.next_reader(weight), -weight))
        self.settled = False

    def first_short(self) -> int | None:
        """Return the first kernel of the window that has not started for want of a weight, if there is one."""
        while self._missing and (
            self._missing[0][1] in self.there or self._missing[0][0] != self.next_reader(self._missing[0][1])
        ):
            heapq.heappop(self._missing)
        if not self._missing or not self._window or self._missing[0][0] > self.kernels[self._window - 1]:
            return None
        return int(self._missing[0][0])

    def make_room(self, nbytes: int, at: int, size: Mapping[int, int]) -> bool:
        """Have weights of ``size`` leave whose next reader comes behind ``at``, the furthest first, until there is room
        for ``nbytes``; say whether there is. Those that a running kernel reads stay."""
        kept = []
        while self.room < nbytes and self._furthest and -self._furthest[0][0] > at:
            entry = heapq.heappop(self._furthest)
            weight = -entry[1]
            if weight not in self.there or -entry[0] != self.next_reader(weight):
                continue
            if self.used[weight]:
                kept.append(entry)
                continue
            self.there.discard(weight)
            self.room += size[weight]
            heapq.heappush(self._missing, (self.next_reader(weight), weight))
        for entry in kept:
            heapq.heappush(self._furthest, entry)
        return self.room >= nbytes


class _StreamedRun:
    """Vertices by their position in ``order``."""

    def __init__(self, graph: TaskGraph, order: tuple[Vertex, ...], machine: Machine, room: Mapping[int, int]) -> None:
        before = tuple((order[reader].id, order[writer].id) for reader, writer in overwritings(order))
        self.machine = machine
        self.plan = Simulator(MemGraph(graph.name, graph.spaces, order, {}, data_edges(order), before), machine)
        self.device = [vertex.space for vertex in order]
        hosts = host_devices(graph.devices)
        near = {vertex.id: vertex for vertex in order if host_copy_exists(vertex) and vertex.space not in hosts}
        self.size = {vertex.id: vertex.sizes[0] for vertex in near.values()}
        self.weights = {device: _Weights(bytes_) for device, bytes_ in room.items()}
        self.reads: list[tuple[int, ...]] = []
        for at, vertex in enumerate(order):
            own_weights = [p for p, _ in vertex.inputs if p in near and near[p].space == vertex.space]
            self.reads.append(tuple(dict.fromkeys(own_weights)) if vertex.kind is VertexKind.KERNEL else ())
            if self.reads[at]:
                own = self.weights[vertex.space]
                own.kernels.append(at)
                # Beside the weights of one kernel there is room for those of the next.
                own.room = max(own.room, 2 * sum(self.size[each] for each in self.reads[at]))
                for each in self.reads[at]:
                    own.readers.setdefault(each, []).append(at)
        for own in self.weights.values():
            for each in own.readers:
                if self.size[each] <= own.room and outlives_step(near[each]):
                    own.there.add(each)
                    own.room -= self.size[each]
            own.begin()
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
                    if self.reads[at]:
                        self.weights[self.device[at]].used.subtract(self.reads[at])
                        self.weights[self.device[at]].settled = False
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
            own.arrive(weight)
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
            if own.coming is None and not own.settled:
                self._load(device, own)

    def _start(self, at: int) -> None:
        self.started[at] = self.now
        if self.reads[at]:
            self.weights[self.device[at]].start(at, self.reads[at])
        self.free[self.plan.lanes[at]] -= 1
        heapq.heappush(self.events, (self.now + self.plan.seconds[at], at, self.device[at]))

    def _load(self, device: int, own: _Weights) -> None:
        """Load the first weight that is missing, over those with later readers, the furthest first."""
        own.settled = True
        at = own.first_short()
        if at is None:
            return
        missing = next(each for each in self.reads[at] if each not in own.there)
        if own.make_room(self.size[missing], at, self.size):
            own.room -= self.size[missing]
            own.coming = missing
            seconds = self.machine.link(TO_DEVICE).seconds(self.size[missing], device)
            heapq.heappush(self.events, (self.now + seconds, -1, device))
