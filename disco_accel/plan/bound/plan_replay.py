"""A plan run again with every lane in the order in which it ran, without some of its waits.

Nothing can get later without a wait: with fixed orders each start is a largest of sums. So each relaxation gives the
cost of its part, and the differences of a row of relaxations add up.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field, replace

from disco_accel.graph.carried_values import inputs_held
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, VertexKind
from disco_accel.graph.values import is_handed_out
from disco_accel.simulate.machine import DEFAULT_LINKS, Machine
from disco_accel.simulate.simulator import Simulation, Simulator


@dataclass(slots=True)
class _Storage:
    """``size`` bytes on ``device`` from the start of vertex ``maker`` to the end of all ``users``, or to the end of the
    step if it ``stays``. Vertices by their number in the plan."""

    device: int
    size: int
    maker: int
    users: set[int]
    stays: bool = False


class Replay:
    """One simulated step of ``plan``, to be run again."""

    def __init__(self, plan: MemGraph, machine: Machine, run: Simulation) -> None:
        self.plan = plan
        self.machine = machine
        self.simulator = Simulator(plan, machine)
        starts = [run.starts.get(vertex.id, -1.0) for vertex in plan.vertices]
        self.order = sorted(range(len(starts)), key=lambda i: (starts[i], i))
        place = {i: n for n, i in enumerate(self.order)}
        number = {vertex.id: i for i, vertex in enumerate(plan.vertices)}
        self.data: list[set[int]] = [set() for _ in plan.vertices]
        self.memory: list[set[int]] = [set() for _ in plan.vertices]
        for edges, into in ((plan.data_edges, self.data), (plan.memory_edges, self.memory)):
            for u, v in edges:
                into[number[v]].add(number[u])
        for i, vertex in enumerate(plan.vertices):
            self.data[i].update(number[producer] for producer, _ in vertex.inputs)
        outs = {i for i, out in enumerate(self.simulator.out) if out}
        for i in self.simulator.late:
            self.data[i] |= outs
        # An input is there before all else, a late one when all that is handed out has ended.
        late = set(self.simulator.late)
        for i in late:
            behind = max((place[out] for out in outs), default=-1)
            place[i] = behind
        self.order.sort(key=lambda i: (place[i], i in late))
        self.storages = _storages_of(plan)
        self.makes: dict[int, list[_Storage]] = defaultdict(list)
        self.last_user: dict[int, list[_Storage]] = defaultdict(list)
        rank = {i: n for n, i in enumerate(self.order)}
        for storage in self.storages:
            self.makes[storage.maker].append(storage)
            if not storage.stays:
                self.last_user[max(storage.users, key=rank.__getitem__)].append(storage)

    def seconds(
        self, *, anywhere: bool = False, free_offloads: bool = False, fine: bool = False, no_latency: bool = False
    ) -> float:
        """Return the seconds of the step without some of its waits.

        ``anywhere``: a value may lie at any address, as long as the bytes in use fit the memory. ``free_offloads``: an
        offload takes no time. ``fine``: a load takes bytes of its place as they come. ``no_latency``: copies have no
        latency."""
        plan, simulator = self.plan, self.simulator
        taken = simulator.seconds
        if no_latency:
            taken = Simulator(plan, without_latency(self.machine)).seconds
        ends = [0.0] * len(taken)
        lanes = [_Lane(width) for width in simulator.width]
        memory = {device.id: _ReplayMemory(device.memory) for device in plan.devices}
        for i in self.order:
            vertex = plan.vertices[i]
            begin = max((ends[each] for each in self.data[i]), default=0.0)
            if not anywhere:
                begin = max(begin, max((ends[each] for each in self.memory[i]), default=0.0))
            seconds = taken[i]
            free = free_offloads and swaps_out(vertex)
            lane = None if free or simulator.inputs[i] else lanes[simulator.lanes[i]]
            if lane is not None:
                begin = max(begin, lane.free)
            end = begin if free else begin + seconds
            if anywhere:
                for storage in self.makes.get(i, ()):
                    arena = memory[storage.device]
                    if simulator.inputs[i]:
                        arena.take(storage.size)
                    elif fine and swaps_in(vertex):
                        end = max(end, arena.stream(storage.size, seconds))
                    else:
                        # Its end moves with its start.
                        at = max(begin, arena.take(storage.size))
                        begin, end = at, max(end, at + seconds)
            ends[i] = end
            if lane is not None:
                lane.took(begin, end)
            for storage in self.last_user.get(i, ()):
                memory[storage.device].give(max(ends[user] for user in storage.users), storage.size)
        return max(ends, default=0.0)


def without_latency(machine: Machine) -> Machine:
    """Return ``machine`` with copies that take as long as their bytes."""
    return machine.with_links({route: replace(machine.link(route), latency=0.0) for route in DEFAULT_LINKS})


def _storages_of(plan: MemGraph) -> list[_Storage]:
    """Return each storage once: an output over an input, at the same offset, has the storage of the input."""
    number = {vertex.id: i for i, vertex in enumerate(plan.vertices)}
    # A kept result may end the step on the host alone.
    offloaded = {vertex.inputs[0] for vertex in plan.vertices if swaps_out(vertex)}
    of: dict[Ref, _Storage] = {}
    made: list[_Storage] = []
    for i, vertex in enumerate(plan.vertices):
        read: dict[tuple[int, int], _Storage] = {}
        for ref in vertex.inputs:
            # A reload of an input reads the host's copy.
            from_host = swaps_in(vertex) and plan.vertices[number[ref[0]]].kind is VertexKind.INPUT
            if ref in of and not from_host:
                of[ref].users.add(i)
                read[plan.slots[ref].space, plan.slots[ref].offset] = of[ref]
        for k in range(len(vertex.sizes)):
            slot = plan.slots.get((vertex.id, k)) if not swaps_out(vertex) else None
            if slot is None or not vertex.sizes[k]:
                continue
            over = read.get((slot.space, slot.offset))
            if over is None:
                over = _Storage(slot.space, vertex.sizes[k], i, {i})
                made.append(over)
            over.stays |= is_handed_out(vertex) and (vertex.id, k) not in offloaded
            over.users.add(i)
            of[vertex.id, k] = over
    for ref in at_the_end(plan).values():
        of[ref].stays = True
    return made


def at_the_end(plan: MemGraph) -> dict[Ref, Ref]:
    """Return the value with the same bytes at the step's end, for each input and resident range that is on its device
    when a step starts."""
    held = inputs_held(plan)
    size = {(vertex.id, k): nbytes for vertex in plan.vertices for k, nbytes in enumerate(vertex.sizes)}
    begin = {(vertex.id, k): vertex.begin for vertex in plan.vertices for k in range(len(vertex.sizes))}
    residents: dict[int, list[Ref]] = defaultdict(list)
    for vertex in plan.vertices:
        if vertex.kind is VertexKind.INPUT and (vertex.id, 0) in held and (vertex.id, 0) in plan.slots:
            residents[held[vertex.id, 0]].append((vertex.id, 0))
    found: dict[Ref, Ref] = {}
    # The last in the order of the plan is what the step ends with.
    for ref in (ref for ref in begin if ref in plan.slots):
        slot = plan.slots[ref]
        for first in residents.get(held.get(ref, -1), ()):
            there = plan.slots[first]
            same_place = there.offset - begin[first] == slot.offset - begin[ref]
            covers = there.offset + size[first] <= slot.offset + size[ref]
            if same_place and slot.offset <= there.offset and covers:
                found[first] = ref
    return found


class _Lane:
    """Runs ``width`` vertices at a time, in order: ``free`` is the earliest start of the next."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.free = 0.0
        self._running: list[float] = []

    def took(self, begin: float, end: float) -> None:
        """Note that the next one ran from ``begin`` to ``end``."""
        heapq.heappush(self._running, end)
        self.free = begin
        if len(self._running) == self.width:
            self.free = max(begin, heapq.heappop(self._running))


@dataclass
class _ReplayMemory:
    """``size`` bytes, promised in one order and given back at any time."""

    size: int
    _promised: int = 0
    _given: list[tuple[float, int]] = field(default_factory=list)
    _counted: list[tuple[float, int]] = field(default_factory=list)
    _counted_bytes: int = 0

    def give(self, at: float, size: int) -> None:
        """Give ``size`` bytes back at second ``at``."""
        if self._counted and at < -self._counted[0][0]:
            heapq.heappush(self._counted, (-at, size))
            self._counted_bytes += size
            while self._counted and self._counted_bytes - self._counted[0][1] >= self._promised - self.size:
                self._uncount()
        else:
            heapq.heappush(self._given, (at, size))

    def take(self, size: int) -> float:
        """Return the first second at which ``size`` bytes more fit, beside all that was promised before."""
        self._promised += size
        while self._counted_bytes < self._promised - self.size and self._given:
            self._count()
        return -self._counted[0][0] if self._counted else 0.0

    def stream(self, size: int, seconds: float) -> float:
        """Return the first second at which ``size`` bytes have come that take ``seconds`` together, each byte once
        there is room for it."""
        before = self._promised - self.size
        self._promised += size
        # None of what is counted is more than what was promised before needs.
        end = -self._counted[0][0] + seconds if self._counted else 0.0
        while self._counted_bytes < before + size and self._given:
            fits = min(size, max(0, self._counted_bytes - before))
            self._count()
            end = max(end, -self._counted[0][0] + seconds * (size - fits) / size)
        return end

    def _count(self) -> None:
        at, size = heapq.heappop(self._given)
        heapq.heappush(self._counted, (-at, size))
        self._counted_bytes += size

    def _uncount(self) -> None:
        at, size = heapq.heappop(self._counted)
        heapq.heappush(self._given, (-at, size))
        self._counted_bytes -= size
