"""When each page is on the device: a step simulated in time.

Kernels run in serial order. An idle link takes the missing page with the nearest next use, if from now to that use the
fixed values, the pages needed until then and this one fit together. Pages beyond that window stay as long as nothing
needs their bytes; the one with the furthest next use goes first.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from disco_accel.graph.check import dependencies
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.timed.byte_counter import NEVER, Counter, Pages
from disco_accel.plan.timed.requirements import Demand, Profile
from disco_accel.simulate.simulator import Machine

_ALWAYS = float("inf")


class Act(enum.IntEnum):
    """``RUN`` position; ``LOAD``, ``DROP``, ``OFFLOAD`` page; ``RELEASE`` device: its last vertex has ended."""

    RUN = 0
    LOAD = 1
    DROP = 2
    OFFLOAD = 3
    RELEASE = 4


@dataclass(slots=True)
class Timeline:
    """``acts`` in an order that respects all that waits for each other; ``seconds`` of the step; ``loaded`` bytes.

    ``border``: the clean pages that are on the device, or on their way, when the position asked for is reached."""

    acts: list[tuple[Act, int]] = field(default_factory=list)
    seconds: float = 0.0
    loaded: int = 0
    border: list[int] = field(default_factory=list)


def simulate_step(
    demand: Demand,
    machine: Machine,
    capacity: Mapping[int, int],
    *,
    start: Sequence[int] = (),
    back: Sequence[int] = (),
    permanent: Iterable[int] = (),
    border: int | None = None,
    ahead: float = _ALWAYS,
) -> Timeline:
    """Return the timeline of ``demand`` within ``capacity`` bytes by device.

    ``start``: pages there at the start; ``back``: pages to be there again at the end, in order of importance;
    ``permanent``: pages that never leave, which have no part in the capacity. ``ahead``: nothing is dropped for what is
    wanted more seconds of compute later. Raises Infeasible.
    """
    clock = _Clock(demand, machine, capacity, start, back, permanent, ahead)
    clock.at = border
    return clock.run()


class _Lane:
    """One device: its memory, when its link and its compute are free, and the pages wanted in order of use."""

    def __init__(
        self, device: int, memory: Counter, room: Profile, wanted: list[tuple[int, int]], clock: list[float]
    ) -> None:
        self.device = device
        self.memory = memory
        self.room = room
        """Bytes by position that are not promised to anyone yet."""
        self.wanted = wanted
        self.clock = clock
        """Seconds of compute before each position."""
        self.next = 0
        self.now = -1
        self.running = -1
        self.link = 0.0
        self.compute = 0.0


class _Clock:
    def __init__(
        self,
        demand: Demand,
        machine: Machine,
        capacity: Mapping[int, int],
        start: Sequence[int],
        back: Sequence[int],
        permanent: Iterable[int],
        ahead: float,
    ) -> None:
        self.demand = demand
        self.pages = demand.pages
        self.machine = machine
        self.ahead = ahead
        self.at: int | None = None
        self.line = Timeline()
        self.permanent = frozenset(permanent)
        uses = [[] if i in self.permanent else list(page.uses) for i, page in enumerate(self.pages)]
        for i in back:
            uses[i].append(demand.end)
        self.state = Pages(self.pages, uses)
        for i in self.permanent:
            self.state.here[i] = True
        self.arrival = [0.0] * len(self.pages)
        self.joins: dict[int, list[int]] = {}
        for i, page in enumerate(self.pages):
            if not page.clean:
                self.joins.setdefault(page.free, []).append(i)
        self.lanes = {device: self._lane(device, room, back) for device, room in capacity.items()}
        for i in start:
            self.state.here[i] = True
            self._memory(i).put(i)
        self.d2h = dict.fromkeys(capacity, 0.0)
        self.p2p = dict.fromkeys(capacity, 0.0)
        self.ready: dict[int, float] = {}

    def _lane(self, device: int, room: int, back: Sequence[int]) -> _Lane:
        state = self.state
        fixed = self.demand.fixed[device]
        memory = Counter(state, fixed, room, self._drop)
        free = room - fixed - self.demand.produced[device]
        busy = [
            seconds if vertex.device == device and vertex.kind is VertexKind.KERNEL else 0.0
            for vertex, seconds in zip(self.demand.order, self.demand.seconds, strict=True)
        ]
        rank = {page: order for order, page in enumerate(back)}
        wanted = [
            (use, rank.get(i, 0) if use == self.demand.end else 0, i)
            for i, page in enumerate(self.pages)
            if page.device == device
            for use in state.uses[i]
        ]
        return _Lane(device, memory, free, [(use, i) for use, _, i in sorted(wanted)], [0.0, *accumulate(busy)])

    def _memory(self, page: int) -> Counter:
        return self.lanes[self.pages[page].device].memory

    def run(self) -> Timeline:
        """Run all positions in order."""
        for position in range(self.demand.end):
            if position == self.at:
                self.line.border = self._border()
            self._execute(position)
        for lane in self.lanes.values():
            self._release(lane)
            self._advance(lane, self.demand.end)
            lane.compute = lane.memory.advance(self.demand.end, lane.compute)
            self._bring(lane)
        self.line.seconds = max([self.line.seconds, *self.d2h.values()])
        return self.line

    def _border(self) -> list[int]:
        clean = [i for i, page in enumerate(self.pages) if page.clean and i not in self.permanent]
        return sorted((i for i in clean if self.state.here[i]), key=self.state.next_use)

    def _execute(self, position: int) -> None:
        vertex = self.demand.order[position]
        lane = self.lanes[vertex.device]
        touched = [self.lanes[device] for device in self.demand.devices[position]]
        begin = 0.0
        for source in dependencies(vertex):
            begin = max(begin, self.ready.get(source, 0.0))
        for other in touched:
            self._release(other)
            self._advance(other, position)
            begin = max(begin, other.memory.advance(position, begin))
            self._bring(other)
        for page in self.demand.reads[position]:
            begin = max(begin, self.arrival[page])
        moves = vertex.kind is VertexKind.TRANSFER
        sender = touched[0].device
        begin = max(begin, self.p2p[sender] if moves else lane.compute)
        for page in self.demand.made.get(position, ()):
            begin = self._make(lane, page, begin)
        if not moves:
            self._fill(lane, begin)
        self.line.acts.append((Act.RUN, position))
        end = begin + self.demand.seconds[position]
        self.ready[vertex.id] = end
        self.line.seconds = max(self.line.seconds, end)
        for other in touched:
            other.running = position
        if moves:
            self.p2p[sender] = end
        else:
            lane.compute = end
        for page in self.demand.made.get(position, ()):
            self._offload(page, end)
        self._fill(lane, lane.compute)

    def _make(self, lane: _Lane, page: int, begin: float) -> float:
        """Find room for a page that the vertex at hand produces; return when the vertex may start."""
        value = self.pages[page]
        when = lane.memory.take(page, begin)
        self.state.here[page] = True
        self.state.held[page] = max(self.state.held[page], value.free - 1)
        return when

    def _offload(self, page: int, ready: float) -> None:
        value = self.pages[page]
        link = self.machine.d2h
        self.d2h[value.device] = max(self.d2h[value.device], ready) + link.latency + value.size / link.bandwidth
        self.state.on_host[page] = self.d2h[value.device]
        self.line.acts.append((Act.OFFLOAD, page))

    def _release(self, lane: _Lane) -> None:
        """The last vertex has ended: what it read is idle unless it is wanted again soon."""
        last = lane.running
        if last < 0:
            return
        self.line.acts.append((Act.RELEASE, lane.device))
        for page in self.demand.reads[last]:
            value = self.pages[page]
            if value.device != lane.device or page in self.permanent or last < value.free:
                continue
            while self.state.next_use(page) <= last:
                self.state.past[page] += 1
            if self.state.held[page] <= last:
                self._idle(lane, page)
        lane.running = -1

    def _idle(self, lane: _Lane, page: int) -> None:
        value = self.pages[page]
        if self.state.next_use(page) == NEVER and not value.clean and not self.demand.order[value.producer].keep:
            self._drop(page)
        else:
            lane.memory.idle(page)

    def _drop(self, page: int) -> None:
        self.state.here[page] = False
        self._memory(page).leave(page)
        self.line.acts.append((Act.DROP, page))

    def _advance(self, lane: _Lane, position: int) -> None:
        """Move to ``position``: the first stay of produced pages may end from now on."""
        for at in range(lane.now + 1, position + 1):
            for page in self.joins.get(at, ()):
                if self.pages[page].device == lane.device and self.state.held[page] < at:
                    self._idle(lane, page)
        lane.now = position

    def _bring(self, lane: _Lane) -> None:
        """Load all that the position at hand reads."""
        while lane.next < len(lane.wanted) and lane.wanted[lane.next][0] <= lane.now:
            if not self._want(lane, _ALWAYS):
                raise Infeasible(lane.now)

    def _fill(self, lane: _Lane, until: float) -> None:
        """Use the link until the given time."""
        while lane.next < len(lane.wanted) and self._want(lane, until):
            pass
        lane.link = max(lane.link, until)

    def _want(self, lane: _Lane, until: float) -> bool:
        """Make sure of the next page wanted, by holding it or by loading it; False if it has to wait."""
        use, page = lane.wanted[lane.next]
        value = self.pages[page]
        held = self.state.held[page]
        if held >= use or use < lane.now:
            lane.next += 1
            return True
        here, coming = self.state.here[page], not value.clean and lane.now < value.free
        begin = max(lane.now, value.free, held + 1)
        if int(lane.room[begin : use + 1].min()) < value.block:
            return False
        if not here and not coming:
            if lane.link >= until:
                return False
            far = lane.clock[use] - lane.clock[lane.now] > self.ahead
            if far and not lane.memory.fits(value.block):
                return False
            self._load(lane, page, lane.memory.take(page, max(lane.link, self.state.on_host[page])))
        lane.room[begin : use + 1] -= value.block
        self.state.held[page] = use
        lane.next += 1
        return True

    def _load(self, lane: _Lane, page: int, begin: float) -> None:
        size, link = self.pages[page].size, self.machine.h2d
        lane.link = begin + link.latency + size / link.bandwidth
        self.arrival[page] = lane.link
        self.line.seconds = max(self.line.seconds, lane.link)
        self.state.here[page] = True
        self.line.loaded += size
        self.line.acts.append((Act.LOAD, page))
