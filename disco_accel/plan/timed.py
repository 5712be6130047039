"""The timed planner: when comes before where.

The step is simulated in time (``timeline``), first with a counter of bytes to find which pages are on the device when
the step starts, then with addresses for all pages (``ground``) above those of the fixed values (``place``). Several
settings are tried and the plan that is fastest in simulation is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from disco_accel.memgraph import MemGraph
from disco_accel.plan.demand import Demand, Profile, demand_of, twice
from disco_accel.plan.ground import CLOSE
from disco_accel.plan.place import place
from disco_accel.plan.resident import SMALL
from disco_accel.plan.sim_malloc import Infeasible
from disco_accel.plan.simulate import Machine, simulate
from disco_accel.plan.stays import plan_of
from disco_accel.plan.timeline import Room, Timeline, simulate_step
from disco_accel.taskgraph import TaskGraph, VertexKind

SHARES = (0.5, 0.0, 0.85, 0.95, 0.3, 0.7)
"""Shares of the memory, beside what fixed values take at their peak, for pages that never leave; by promise."""

WORTH = (None, 10.0, 2.0)
"""How many times longer than its copies a produced value's absence must be; None: no produced value leaves."""

EFFORT = 100_000
"""Vertices in all the drafts of one search; the first share of each kind is tried in any case."""

_GOOD = 1.002
"""A draft that takes at most so many times what compute takes is not bettered any more."""

_STEP = 0.08
_FINALISTS = 2


@dataclass(frozen=True, slots=True)
class _Settings:
    """``worth`` as in WORTH, ``share`` as in SHARES; ``outliers``: unusually large pages are permanent before others,
    because what has to be kept free for the pages that come and go depends on the largest of them."""

    worth: float | None
    share: float
    outliers: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """A timeline with its demand, the pages there at the ``start``, and ``permanent`` ones with their addresses."""

    demand: Demand
    timeline: Timeline
    start: tuple[int, ...]
    permanent: dict[int, int]


def build_timed(graph: TaskGraph, machine: Machine, *, cyclic: bool, hurry: bool = False) -> MemGraph:
    """Return the fastest plan found; with ``hurry`` the first. Raises Infeasible if this planner finds none."""
    search = _Search(graph, machine, cyclic)
    search.run(hurry)
    best: tuple[float, MemGraph] | None = None
    for draft, _ in sorted(search.found, key=lambda found: found[0].timeline.seconds)[:_FINALISTS]:
        plan = plan_of(draft.demand, draft.timeline, draft.permanent, draft.start, cyclic)
        makespan = simulate(plan, machine).makespan
        if best is None or makespan < best[0]:
            best = makespan, plan
    if best is None:
        raise Infeasible(0)
    return best[1]


class _Search:
    """Drafts with different settings, kept in ``found``."""

    def __init__(self, graph: TaskGraph, machine: Machine, cyclic: bool) -> None:
        self.graph = graph
        self.machine = machine
        self.cyclic = cyclic
        self.capacity = {device.id: device.memory // device.alignment * device.alignment for device in graph.devices}
        self.demands: dict[float | None, tuple[Demand, dict[int, Profile]] | None] = {}
        self.tried: set[tuple[float | None, tuple[int, ...]]] = set()
        self.found: list[tuple[Draft, _Settings]] = []
        self.effort = 0
        self.floor = _GOOD * self._compute()

    def run(self, hurry: bool) -> None:
        """Try kinds of demand and shares of permanent pages, then what lies around the best."""
        for worth in WORTH:
            self.attempt(_Settings(worth, SHARES[0]))
        for share in SHARES[1:]:
            self.attempt(replace(self.best(), share=share), limited=True)
            if hurry and self.found:
                return
        self.attempt(replace(self.best(), outliers=True), limited=True)
        step = _STEP
        while step > _STEP / 5:
            best, before = self.best(), self.fastest()
            for share in (best.share - step, best.share + step):
                if 0.0 <= share <= 1.0:
                    self.attempt(replace(best, share=share), limited=True)
            if self.fastest() >= before:
                step /= 2

    def fastest(self) -> float:
        """Return the seconds of the best draft so far."""
        return min((draft.timeline.seconds for draft, _ in self.found), default=float("inf"))

    def best(self) -> _Settings:
        """Return the settings of the best draft so far."""
        best = min(self.found, key=lambda found: found[0].timeline.seconds, default=None)
        return _Settings(WORTH[-1], SHARES[0]) if best is None else best[1]

    def attempt(self, settings: _Settings, limited: bool = False) -> None:
        """Draft with these settings unless the search has gone on for long enough."""
        spent = self.effort > EFFORT and (limited or self.found)
        if spent or self.fastest() <= self.floor:
            return
        demand = self._demand(settings.worth)
        if demand is None:
            return
        permanent = tuple(permanent_pages(*demand, self.capacity, settings))
        if (settings.worth, permanent) in self.tried:
            return
        self.tried.add((settings.worth, permanent))
        self.effort += 3 * demand[0].end
        try:
            draft = draft_of(*demand, self.machine, self.capacity, permanent, self.cyclic)
        except Infeasible:
            return
        self.found.append((draft, settings))

    def _compute(self) -> float:
        """Return the seconds that the busiest device computes."""
        busy = dict.fromkeys(self.capacity, 0.0)
        for vertex in self.graph.vertices:
            if vertex.kind is VertexKind.KERNEL:
                busy[vertex.device] += vertex.duration or 0.0
        return max(busy.values())

    def _demand(self, worth: float | None) -> tuple[Demand, dict[int, Profile]] | None:
        if worth not in self.demands:
            try:
                demand = demand_of(self.graph, self.machine, worth)
                self.demands[worth] = demand, _heights(demand, self.capacity)
            except Infeasible:
                self.demands[worth] = None
        return self.demands[worth]


def _heights(demand: Demand, capacity: Mapping[int, int]) -> dict[int, Profile]:
    """Give every storage an address; return the height of storages by device and position. Raises Infeasible."""
    heights = {}
    for device, memory in capacity.items():
        storages = [storage for storage in demand.storages if storage.device == device]
        clean = sum(page.block for page in demand.pages if page.device == device)
        # Where pages have to come and go, low everywhere is better than low at the peak.
        best = place(storages, demand.end, "life")
        if int(best[0].max()) > memory or int(demand.fixed[device].max()) + clean <= memory:
            others = (place(storages, demand.end, order) for order in ("size", "begin"))
            best = min((best, *others), key=lambda packed: int(packed[0].max()))
        if int(best[0].max()) > memory:
            raise Infeasible(0)
        heights[device] = best[0]
        for storage, address in zip(storages, best[1], strict=True):
            storage.addr = address
    return heights


def permanent_pages(
    demand: Demand, heights: Mapping[int, Profile], capacity: Mapping[int, int], settings: _Settings
) -> Iterable[int]:
    """Yield the pages that stay for good: all if they fit, else small ones and a share of the room for others."""
    for device, memory in capacity.items():
        clean = [i for i, page in enumerate(demand.pages) if page.clean and page.device == device]
        blocks = {i: demand.pages[i].block for i in clean}
        room = memory - int((heights[device] + demand.produced[device]).max())
        if sum(blocks.values()) <= room:
            yield from clean
            continue
        first = [i for i in clean if demand.pages[i].size < SMALL]
        if sum(blocks[i] for i in first) * 4 > room:
            first = []
        left = int(settings.share * room) - sum(blocks[i] for i in first)
        if settings.outliers and clean:
            usual = sorted(blocks.values())[len(clean) * 9 // 10]
            for i in sorted(clean, key=lambda i: -blocks[i]):
                if 2 * usual < blocks[i] <= left:
                    first.append(i)
                    left -= blocks[i]
        yield from first
        apart = set(first)
        rest = sorted((i for i in clean if i not in apart), key=lambda i: demand.pages[i].uses[0])
        total = sum(blocks[i] for i in rest)
        fraction = max(0.0, left / total) if total else 0.0
        credit = 0.0
        for i in rest:
            credit += fraction * blocks[i]
            if credit >= blocks[i] / 2 and blocks[i] <= left:
                credit -= blocks[i]
                left -= blocks[i]
                yield i


def draft_of(
    demand: Demand,
    heights: Mapping[int, Profile],
    machine: Machine,
    capacity: Mapping[int, int],
    permanent: tuple[int, ...],
    cyclic: bool,
) -> Draft:
    """Return the step that begins as it ends, with ``permanent`` pages. Raises Infeasible."""
    places, tops = _stack(demand, capacity, heights, permanent)
    rooms = {device: Room(heights[device], tops[device]) for device in capacity}
    if cyclic:
        double = twice(demand)
        joined = {d: Room(np.concatenate([room.height[:-1], room.height]), room.top) for d, room in rooms.items()}
        present = simulate_step(double, machine, joined, permanent=permanent, border=demand.end).border
    else:
        present = _by_first_use(demand, permanent)
    start, homes = _homes(demand, rooms, present)
    placed = {device: Room(room.height, room.top, homes[device]) for device, room in rooms.items()}
    back = start if cyclic else ()
    timeline = simulate_step(demand, machine, placed, start=start, back=back, permanent=permanent)
    return Draft(demand, timeline, tuple(start), places)


def _stack(
    demand: Demand, capacity: Mapping[int, int], heights: Mapping[int, Profile], permanent: Sequence[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return addresses for ``permanent`` pages and, by device, the lowest of them: below is room for others.

    They lie at the top, or right above the fixed values if nothing else needs room.
    """
    pages = demand.pages
    tops = {}
    for device, memory in capacity.items():
        own = sum(page.block for page in pages if page.device == device)
        taken = sum(pages[i].block for i in permanent if pages[i].device == device)
        tops[device] = int(heights[device].max()) if own == taken else memory - taken
    places = {}
    at = dict(tops)
    for i in permanent:
        places[i] = at[pages[i].device]
        at[pages[i].device] += pages[i].block
    return places, tops


def _homes(
    demand: Demand, rooms: Mapping[int, Room], present: Sequence[int]
) -> tuple[list[int], dict[int, dict[int, int]]]:
    """Return the first of ``present`` (by first use) that can stay until then and come back by the end, and where.

    What is used first lies lowest, where fixed values grow into its place and shrink out of it again.
    """
    start: list[int] = []
    homes: dict[int, dict[int, int]] = {}
    for device, room in rooms.items():
        pages = [page for page in present if demand.pages[page].device == device]
        before = np.maximum.accumulate(room.height)
        after = np.maximum.accumulate(room.height[::-1])[::-1]
        floors = []
        for page in pages:
            uses = demand.pages[page].uses
            back = next(use for use in uses if (uses[-1] - use) * CLOSE <= demand.end)
            floors.append(int(max(before[uses[0]], after[back])))

        def stacked(count: int, pages: list[int] = pages, floors: list[int] = floors, top: int = room.top) -> list[int]:
            """Addresses of the first ``count`` pages; none if one does not clear what lies below it."""
            at, places = top, []
            for page, floor in zip(pages[:count][::-1], floors[:count][::-1], strict=True):
                at -= demand.pages[page].block
                if at < floor:
                    return []
                places.append(at)
            return places[::-1]

        low, high = 0, len(pages)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if stacked(middle) else (low, middle - 1)
        homes[device] = dict(zip(pages, stacked(low), strict=False))
        start += homes[device]
    return start, homes


def _by_first_use(demand: Demand, permanent: tuple[int, ...]) -> list[int]:
    stays = set(permanent)
    return sorted(
        (i for i, page in enumerate(demand.pages) if page.clean and i not in stays),
        key=lambda i: demand.pages[i].uses[0],
    )
