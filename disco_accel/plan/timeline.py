"""When each page is on the device: a step simulated in time with a counter of bytes and no addresses.

Kernels run in serial order. An idle link takes the missing page with the nearest next use, if from now to that use the
fixed values, the pages needed until then and this one fit together. Pages beyond that window stay as long as nothing
needs their bytes; the one with the furthest next use goes first.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disco_accel.graphcheck import dependencies
from disco_accel.plan.demand import Demand, Page
from disco_accel.plan.sim_malloc import Infeasible
from disco_accel.plan.simulate import Machine
from disco_accel.taskgraph import VertexKind

NEVER = 1 << 60
_ALWAYS = float("inf")


class Act(enum.IntEnum):
    """``RUN`` position; ``LOAD``, ``DROP``, ``OFFLOAD`` page; ``RELEASE`` device: its last vertex has ended."""

    RUN = 0
    LOAD = 1
    DROP = 2
    OFFLOAD = 3
    RELEASE = 4


@dataclass(frozen=True, slots=True)
class Timeline:
    """``acts`` in an order that respects all that waits for each other; ``seconds`` of the step; ``loaded`` bytes.

    ``border``: the clean pages that are on the device, or on their way, when position ``at`` of ``run`` is reached.
    """

    acts: list[tuple[Act, int]]
    seconds: float
    loaded: int
    border: list[int]


def simulate_step(
    demand: Demand,
    machine: Machine,
    capacity: dict[int, int],
    *,
    start: Sequence[int] = (),
    back: Sequence[int] = (),
    permanent: Iterable[int] = (),
    border: int | None = None,
) -> Timeline:
    """Return the timeline of ``demand`` within ``capacity`` bytes per device.

    ``start``: pages there at the start; ``back``: pages to be there again at the end, in order of importance;
    ``permanent``: pages that never leave (not to be named in the others). Raises Infeasible.
    """
    return _Clock(demand, machine, capacity, start, back, permanent, border).run()


class _Lane:
    """Memory and link of one device: ``room`` by position, ``held`` bytes of pages now, the pages wanted in order."""

    def __init__(self, demand: Demand, device: int, capacity: int, pages: Sequence[Page], uses: list[list[int]]):
        self.room = capacity - demand.fixed[device]
        self.fixed = demand.fixed[device]
        self.capacity = capacity
        self.device = device
        self.now = -1
        self.last = -1
        self.held = 0
        self.link = 0.0
        self.compute = 0.0
        self.next = 0
        self.idle: list[tuple[int, int]] = []
        wanted = [(use, order, i) for i in range(len(pages)) for order, use in enumerate(uses[i])]
        self.wanted = [(use, i) for use, _, i in sorted(wanted) if pages[i].device == device]


class _Clock:
    def __init__(
        self,
        demand: Demand,
        machine: Machine,
        capacity: dict[int, int],
        start: Sequence[int],
        back: Sequence[int],
        permanent: Iterable[int],
        border: int | None,
    ) -> None:
        self.demand = demand
        self.pages = demand.pages
        self.machine = machine
        self.back = back
        self.at = border
        fixed_pages = set(permanent)
        taken = dict.fromkeys(capacity, 0)
        for i in fixed_pages:
            taken[self.pages[i].device] += self.pages[i].block
        self.uses = [[] if i in fixed_pages else list(page.uses) for i, page in enumerate(self.pages)]
        self.lanes = {
            device: _Lane(demand, device, capacity[device] - taken[device], self.pages, self.uses)
            for device in capacity
        }
        for i in back:
            self.uses[i].append(demand.end)
            self.lanes[self.pages[i].device].wanted.append((demand.end, i))
        count = len(self.pages)
        self.here = [i in fixed_pages for i in range(count)]
        self.pinned = list(self.here)
        self.arrival = [0.0] * count
        self.committed = [-1] * count
        self.used = [0] * count
        """How many of a page's uses are past."""
        self.on_host = [0.0 if page.clean else -1.0 for page in self.pages]
        self.joins: dict[int, list[int]] = {}
        self.acts: list[tuple[Act, int]] = []
        self.loaded = 0
        self.d2h = dict.fromkeys(capacity, 0.0)
        self.p2p = dict.fromkeys(capacity, 0.0)
        self.ready: dict[int, float] = {}
        self.seconds = 0.0
        for i, page in enumerate(self.pages):
            if not page.clean:
                self.joins.setdefault(page.free, []).append(i)
        for i in start:
            self.here[i] = True
            lane = self.lanes[self.pages[i].device]
            lane.held += self.pages[i].block
            heapq.heappush(lane.idle, (-self._next_use(i), i))

    def run(self) -> Timeline:
        """Run all positions in order."""
        border: list[int] = []
        for position in range(self.demand.end):
            if position == self.at:
                border = self._border()
            self._execute(position)
        for lane in self.lanes.values():
            self._release(lane)
            self._advance(lane, self.demand.end)
            self._make_room(lane, 0, lane.compute)
            self._bring(lane)
        return Timeline(self.acts, max([self.seconds, *self.d2h.values()]), self.loaded, border)

    def _border(self) -> list[int]:
        found = [i for i, page in enumerate(self.pages) if self.here[i] and page.clean and not self.pinned[i]]
        return sorted(found, key=self._next_use)

    def _next_use(self, page: int) -> int:
        uses = self.uses[page]
        return uses[self.used[page]] if self.used[page] < len(uses) else NEVER

    def _execute(self, position: int) -> None:
        vertex = self.demand.order[position]
        touched = [self.lanes[device] for device in self.demand.devices[position]]
        for lane in touched:
            self._release(lane)
            self._advance(lane, position)
            self._bring(lane)
        begin = 0.0
        for source in dependencies(vertex):
            begin = max(begin, self.ready.get(source, 0.0))
        begin = max([begin, *(self.arrival[page] for page in self.demand.reads[position])])
        lane = self.lanes[vertex.device]
        moves = vertex.kind is VertexKind.TRANSFER
        begin = max(begin, self.p2p[self.demand.devices[position][0]] if moves else lane.compute)
        for other in touched:
            begin = max(begin, self._make_room(other, 0, begin))
        if not moves:
            self._fill(lane, begin)
        self.acts.append((Act.RUN, position))
        end = begin + self.demand.seconds[position]
        self.ready[vertex.id] = end
        self.seconds = max(self.seconds, end)
        for other in touched:
            other.last = position
        if moves:
            self.p2p[self.demand.devices[position][0]] = end
        else:
            lane.compute = end
        for page in self.demand.made.get(position, ()):
            self._offload(page, end)
        self._fill(lane, lane.compute)

    def _offload(self, page: int, ready: float) -> None:
        value = self.pages[page]
        link = self.machine.d2h
        self.d2h[value.device] = max(self.d2h[value.device], ready) + link.latency + value.size / link.bandwidth
        self.on_host[page] = self.d2h[value.device]
        self.acts.append((Act.OFFLOAD, page))

    def _release(self, lane: _Lane) -> None:
        """The last vertex has ended: what it read is idle unless it is wanted again soon."""
        if lane.last < 0:
            return
        self.acts.append((Act.RELEASE, lane.device))
        for page in self.demand.reads[lane.last]:
            value = self.pages[page]
            if value.device != lane.device or self.pinned[page] or lane.last < value.free:
                continue
            while self._next_use(page) <= lane.last:
                self.used[page] += 1
            if self.committed[page] <= lane.last:
                self._idle(lane, page)
        lane.last = -1

    def _idle(self, lane: _Lane, page: int) -> None:
        value = self.pages[page]
        if self._next_use(page) == NEVER and self._is_done(value):
            self._drop(lane, page)
        else:
            heapq.heappush(lane.idle, (-self._next_use(page), page))

    def _is_done(self, page: Page) -> bool:
        """Whether nobody will ask for the page again, here or on the host."""
        if page.clean:
            return False
        vertex = self.demand.order[page.producer]
        return not vertex.keep

    def _drop(self, lane: _Lane, page: int) -> None:
        self.here[page] = False
        lane.held -= self.pages[page].block
        self.acts.append((Act.DROP, page))

    def _advance(self, lane: _Lane, position: int) -> None:
        """Move to ``position``; produced pages whose fixed time is over are held like any other."""
        for at in range(lane.now + 1, position + 1):
            for page in self.joins.get(at, ()):
                if self.lanes[self.pages[page].device] is lane and not self.here[page]:
                    self.here[page] = True
                    lane.held += self.pages[page].block
                    if self.committed[page] < position:
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
        committed = self.committed[page]
        if committed >= use:
            lane.next += 1
            return True
        begin = max(lane.now, value.free if not value.clean else 0)
        if committed >= begin:
            begin = committed + 1
        window = lane.room[begin : use + 1]
        if int(window.min()) < value.block:
            return False
        if not (self.here[page] or (not value.clean and lane.now < value.free)):
            if lane.link >= until:
                return False
            self._load(lane, page)
        window -= value.block
        self.committed[page] = use
        lane.next += 1
        return True

    def _load(self, lane: _Lane, page: int) -> None:
        value = self.pages[page]
        link = self.machine.h2d
        begin = max(lane.link, self.on_host[page])
        begin = self._make_room(lane, value.block, begin)
        lane.link = begin + link.latency + value.size / link.bandwidth
        self.arrival[page] = lane.link
        self.seconds = max(self.seconds, lane.link)
        self.here[page] = True
        lane.held += value.block
        self.loaded += value.size
        self.acts.append((Act.LOAD, page))

    def _make_room(self, lane: _Lane, block: int, begin: float) -> float:
        """Drop idle pages until ``block`` more bytes fit now; return when they do, not before ``begin``."""
        over = int(lane.fixed[lane.now]) + lane.held + block - lane.capacity
        waiting: list[tuple[int, int]] = []
        while over > 0:
            if not lane.idle:
                if not waiting:
                    raise Infeasible(lane.now)
                # All that is left is on its way to the host.
                soonest = min(waiting, key=lambda entry: (self.on_host[entry[1]], entry))
                waiting.remove(soonest)
                begin = max(begin, self.on_host[soonest[1]])
                over -= self.pages[soonest[1]].block
                self._drop(lane, soonest[1])
                continue
            entry = heapq.heappop(lane.idle)
            page = entry[1]
            if not self.here[page] or self.committed[page] >= lane.now or -entry[0] != self._next_use(page):
                continue
            if self.on_host[page] > begin:
                waiting.append(entry)
                continue
            over -= self.pages[page].block
            self._drop(lane, page)
        for entry in waiting:
            heapq.heappush(lane.idle, entry)
        return begin
