"""From a timeline to stays: which bytes are taken from when to when, and by whom they are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np

from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.plan.common.assemble import assemble
from disco_accel.plan.common.device_copy import Planned
from disco_accel.plan.common.plan_log import PlanLog
from disco_accel.plan.timed.packing import Piece, Placed, place
from disco_accel.plan.timed.requirements import Demand, Profile
from disco_accel.plan.timed.swap_schedule import Act, Timeline

_DELAYS = (0.03, 0.12, 0.4)
"""Shares of the time from a load to its first reader by which the load is put off, by promise."""


@dataclass(slots=True, eq=False)
class Occupancy:
    """``block`` bytes of ``device`` from tick ``begin`` up to tick ``end`` for one value or a chain of them.

    ``values`` are named as in the plan, each with its readers; a tick is a place in the order of acts, and 0 the start.
    ``earliest`` and ``latest``: from when on a copy to here was drafted to take the bytes, and the tick of its first
    reader; ``delay``: the share of the time between them by which it is put off. ``twin``: the stay that the step
    begins with, if this one is to end it at the same address.
    """

    device: int
    block: int
    begin: int
    end: int
    values: list[tuple[Ref, list[int]]] = field(default_factory=list)
    addr: int = -1
    earliest: int = -1
    latest: int = -1
    delay: float = 0.0
    twin: Occupancy | None = None

    @property
    def users(self) -> list[int]:
        """Who must finish before the bytes are written again; empty if nobody ever touched them."""
        ref, readers = self.values[-1]
        return readers or ([] if self.begin == 0 and len(self.values) == 1 else [ref[0]])


@dataclass(frozen=True, slots=True)
class _Placing:
    """The ``stays`` of one device with a piece each, and where these were ``placed``."""

    stays: list[Occupancy]
    pieces: list[Piece]
    placed: Placed

    def above(self, memory: int) -> Iterator[tuple[int, int]]:
        """Yield the spans of pieces that lie above ``memory``."""
        for piece, address in zip(self.pieces, self.placed.addresses, strict=True):
            if address + piece.block > memory:
                yield from piece.spans


@dataclass(slots=True)
class Stays:
    """``planned``: the vertices but for inputs, in order; ``all``: every occupancy by begin; ``slots``: that of each
    value, as it is named in the plan; ``positions``: which vertex of the serial order is the next at each tick;
    ``ticks``: that of each of ``planned``; ``end``: the tick behind the last; ``placed``: by device, what ``settle``
    found; ``tried``: how many addresses were looked for."""

    demand: Demand
    planned: list[Vertex]
    all: list[Occupancy]
    slots: dict[Ref, Occupancy]
    positions: list[int]
    ticks: list[int]
    end: int
    placed: dict[int, _Placing] = field(default_factory=dict)
    tried: int = 0

    def settle(self, capacity: Mapping[int, int], *, lowest: bool) -> dict[int, Profile]:
        """Give all an address; return by device and position the bytes above ``capacity``, nothing if all fit.

        ``lowest``: take as few bytes as can be found even if more would do."""
        self.placed = {device: self._place(device, 0 if lowest else memory) for device, memory in capacity.items()}
        return self._adopt(self.placed, capacity)

    def postpone(self, capacity: Mapping[int, int]) -> dict[int, Profile]:
        """Go on from ``settle``: where not all fits, copies to the device take their bytes later than drafted, nearer
        to their first reader."""
        later = {device: self._place_later(device, memory) for device, memory in capacity.items()}
        over = self._adopt(later, capacity)
        for device in capacity:
            if device not in over:
                self._bring_forward(device)
        self.all.sort(key=lambda stay: stay.begin)
        return over

    def _adopt(self, placings: Mapping[int, _Placing], capacity: Mapping[int, int]) -> dict[int, Profile]:
        over = {}
        for device, found in placings.items():
            for stay, address in zip(found.stays, found.placed.addresses, strict=True):
                stay.addr = address
            if found.placed.top > capacity[device]:
                over[device] = self._overflow(found, capacity[device])
        for stay in self.all:
            if stay.twin is not None:
                stay.addr = stay.twin.addr
        return over

    def _place_later(self, device: int, memory: int) -> _Placing:
        best = placing = self.placed[device]
        for delay in _DELAYS:
            if best.placed.top <= memory or not self._put_off(placing, memory, delay):
                break
            placing = self._place(device, memory, best.placed.order)
            stuck = placing.placed.top == best.placed.top
            best = min(best, placing, key=lambda each: each.placed.top)
            if stuck:
                break
        return best

    def _place(self, device: int, memory: int, order: list[int] | None = None) -> _Placing:
        own = [stay for stay in self.all if stay.device == device and stay.twin is None]
        back = {id(stay.twin): stay for stay in self.all if stay.twin is not None}
        pieces = [Piece(stay.block, _spans(stay, back.get(id(stay)))) for stay in own]
        placed = place(pieces, memory, order)
        self.tried += placed.tried * len(pieces)
        return _Placing(own, pieces, placed)

    def _put_off(self, placing: _Placing, memory: int, delay: float) -> bool:
        """Put off by ``delay`` the loads that have bytes ahead of need while others lie above ``memory``, if any."""
        above = np.zeros(self.end + 2, np.int64)
        for begin, end in placing.above(memory):
            above[begin] += 1
            above[end] -= 1
        before = np.concatenate(([0], np.cumsum(np.cumsum(above) > 0)))
        device = placing.stays[0].device
        early = [
            stay
            for stay in self.all
            if stay.device == device and stay.latest > stay.earliest >= 0 and before[stay.latest] > before[_begin(stay)]
        ]
        for stay in early:
            stay.delay = delay
        return bool(early)

    def _bring_forward(self, device: int) -> None:
        """Put loads off by as little as their addresses allow."""
        stays = [stay for stay in self.all if stay.device == device]
        for stay in stays:
            stay.begin = _begin(stay)
        lows = np.array([stay.addr for stay in stays], np.int64)
        highs = np.array([stay.addr + stay.block for stay in stays], np.int64)
        ends = np.array([stay.end for stay in stays], np.int64)
        for stay in stays:
            if stay.begin > stay.earliest >= 0:
                before = (lows < stay.addr + stay.block) & (highs > stay.addr) & (ends <= stay.begin)
                stay.begin = max(stay.earliest, int(ends[before].max(initial=0)))

    def _overflow(self, placing: _Placing, memory: int) -> Profile:
        """Return by position how many bytes lie above ``memory``."""
        over = np.zeros(self.demand.end + 1, np.int64)
        for piece, address in zip(placing.pieces, placing.placed.addresses, strict=True):
            beyond = address + piece.block - memory
            if beyond > 0:
                for begin, end in piece.spans:
                    stretch = slice(self.positions[begin], self.positions[end - 1] + 1)
                    over[stretch] = np.maximum(over[stretch], beyond)
        return over

    def plan(self, cyclic: bool) -> MemGraph:
        """Return the plan: who has to wait for whom follows from who had the same bytes before."""
        demand = self.demand
        log = PlanLog((*demand.inputs, *demand.order))
        begins = {stay.values[0][0][0]: stay.begin for stay in self.all if stay.earliest >= 0}
        late = sorted(range(len(self.planned)), key=lambda i: begins.get(self.planned[i].id, self.ticks[i]))
        log.planned = [Planned(self.planned[i]) for i in late]
        waits: dict[int, list[int]] = {}
        memories: dict[int, _Ground] = {device: _Ground() for device in demand.fixed}
        for stay in self.all:
            producer = stay.values[0][0][0]
            for other in memories[stay.device].replace(stay):
                waits.setdefault(producer, []).extend(user for user in other.users if user != producer)
            for (_, readers), (ref, _) in pairwise(stay.values):
                waits.setdefault(ref[0], []).extend(reader for reader in readers if reader != ref[0])
        log.memory_edges = {vertex: tuple(dict.fromkeys(others)) for vertex, others in waits.items()}
        vertices = (*demand.inputs, *self.planned)
        sizes = {(vertex.id, k): size for vertex in vertices for k, size in enumerate(vertex.sizes)}
        slots = {ref: Slot(stay.device, stay.addr, sizes[ref]) for ref, stay in self.slots.items()}
        return assemble(demand.graph, log, slots, {}, cyclic=cyclic)


def _spans(stay: Occupancy, back: Occupancy | None) -> tuple[tuple[int, int], ...]:
    """Return when the bytes are taken."""
    return tuple((_begin(each), each.end) for each in (stay, back) if each is not None)


def _begin(stay: Occupancy) -> int:
    return stay.begin if stay.latest < 0 else stay.earliest + int(stay.delay * (stay.latest - stay.earliest))


def stays_of(demand: Demand, timeline: Timeline, permanent: Sequence[int], start: Sequence[int], cyclic: bool) -> Stays:
    """Return what ``timeline`` describes, still without addresses; ``permanent`` pages never leave."""
    replay = _Replay(demand, timeline)
    replay.run(permanent, start, cyclic)
    runs = (act is Act.RUN for act, _ in timeline.acts)
    positions = [0, *accumulate(runs, initial=0)]
    return Stays(demand, replay.planned, replay.stays, replay.slots, positions, replay.ticks, replay.end)


class _Replay:
    def __init__(self, demand: Demand, timeline: Timeline) -> None:
        self.demand = demand
        self.acts = timeline.acts
        self.end = len(timeline.acts) + 1
        self.planned: list[Vertex] = []
        self.ticks: list[int] = []
        self.tick = 0
        self.stays: list[Occupancy] = []
        self.slots: dict[Ref, Occupancy] = {}
        self.current: dict[int, Occupancy] = {}
        self.readers: dict[Ref, list[int]] = {}
        """Readers of what is not a page."""
        self.host: dict[int, Ref] = {i: page.ref for i, page in enumerate(demand.pages) if page.clean}
        self.fresh = max((v.id for v in (*demand.inputs, *demand.order)), default=-1) + 1
        self.needed = self._needed_offloads()
        self.released = self._releases()

    def run(self, permanent: Sequence[int], start: Sequence[int], cyclic: bool) -> None:
        """Go through all acts."""
        for page in (*permanent, *start):
            self._open(page, self.demand.pages[page].ref, 0)
        first = dict(self.current)
        ticks: dict[int, int] = {-1: 0}
        for tick, (act, what) in enumerate(self.acts, start=1):
            self.tick = tick
            if act is Act.RUN:
                ticks[what] = tick
                self._run(what, tick)
            elif act is Act.LOAD:
                self._open(what, (self._copy(VertexKind.RELOAD, what, self.host[what]), 0), tick)
                self.current[what].earliest = tick
            elif act is Act.DROP:
                stay = self.current.pop(what)
                if stay.values[-1][0] == self.demand.pages[what].ref and not self.demand.pages[what].clean:
                    # Its bytes are not free before its offload has ended.
                    stay.end = tick
            elif act is Act.OFFLOAD and what in self.needed:
                stay = self.current[what]
                offload = self._copy(VertexKind.OFFLOAD, what, stay.values[-1][0])
                stay.values[-1][1].append(offload)
                self.host[what] = (offload, 0)
        for page, stay in self.current.items():
            value = self.demand.pages[page]
            if not value.clean or (cyclic and page in first):
                stay.end = self.end
                if page in first and stay is not first[page]:
                    stay.twin = first[page]
        self._store(ticks)
        self.stays.sort(key=lambda stay: stay.begin)

    def _store(self, ticks: Mapping[int, int]) -> None:
        for storage in self.demand.storages:
            values = [(ref, self.readers.get(ref, [])) for ref in storage.values]
            end = self.released.get((storage.last, storage.device), self.end)
            stay = Occupancy(storage.device, storage.block, ticks[storage.first], end, values)
            self.stays.append(stay)
            self.slots.update(dict.fromkeys(storage.values, stay))

    def _releases(self) -> dict[tuple[int, int], int]:
        """Return by position and device when that position's vertex is known to have ended."""
        running: dict[int, int] = {}
        released = {}
        for tick, (act, what) in enumerate(self.acts, start=1):
            if act is Act.RUN:
                running.update(dict.fromkeys(self.demand.devices[what], what))
            elif act is Act.RELEASE:
                released[running[what], what] = tick
        return released

    def _needed_offloads(self) -> set[int]:
        """Return the produced pages that are wanted again after they left, by a reader or by the user."""
        needed = set()
        for act, page in self.acts:
            if act in (Act.LOAD, Act.DROP) and not self.demand.pages[page].clean:
                producer = self.demand.order[self.demand.pages[page].producer]
                if act is Act.LOAD or producer.keep:
                    needed.add(page)
        return needed

    def _open(self, page: int, ref: Ref, tick: int) -> None:
        value = self.demand.pages[page]
        stay = Occupancy(value.device, value.block, tick, tick + 1, [(ref, [])])
        self.current[page] = stay
        self.stays.append(stay)
        self.slots[ref] = stay

    def _copy(self, kind: VertexKind, page: int, source: Ref) -> int:
        value = self.demand.pages[page]
        vertex = Vertex(self.fresh, kind, value.device, kind.name.lower(), (source,), (value.size,))
        self.fresh += 1
        self.planned.append(vertex)
        self.ticks.append(self.tick)
        return vertex.id

    def _run(self, position: int, tick: int) -> None:
        vertex = self.demand.order[position]
        here: dict[Ref, Ref] = {}
        for page in self.demand.reads[position]:
            stay = self.current[page]
            ref, readers = stay.values[-1]
            if stay.earliest >= 0 and stay.latest < 0:
                stay.latest = tick
            here[self.demand.pages[page].ref] = ref
            readers.append(vertex.id)
            stay.end = self.released.get((position, stay.device), self.end)
        for ref in dict.fromkeys(vertex.inputs):
            if ref not in here:
                self.readers.setdefault(ref, []).append(vertex.id)
        self.planned.append(replace(vertex, inputs=tuple(here.get(ref, ref) for ref in vertex.inputs)))
        self.ticks.append(self.tick)
        for page in self.demand.made.get(position, ()):
            self._open(page, self.demand.pages[page].ref, tick)


class _Ground:
    """Who had each byte of an arena last: disjoint ranges by address."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ranges: list[tuple[int, int, Occupancy]] = []

    def replace(self, stay: Occupancy) -> list[Occupancy]:
        """Give the bytes of ``stay`` to it and return who had them."""
        begin, end = stay.addr, stay.addr + stay.block
        low = bisect_right(self.starts, begin)
        if low and self.ranges[low - 1][1] > begin:
            low -= 1
        high = low
        kept: list[tuple[int, int, Occupancy]] = []
        former: list[Occupancy] = []
        while high < len(self.ranges) and self.ranges[high][0] < end:
            start, stop, other = self.ranges[high]
            former.append(other)
            if start < begin:
                kept.append((start, begin, other))
            if stop > end:
                kept.append((end, stop, other))
            high += 1
        kept.append((begin, end, stay))
        kept.sort(key=lambda piece: piece[0])
        self.ranges[low:high] = kept
        self.starts[low:high] = [piece[0] for piece in kept]
        return list(dict.fromkeys(former))
