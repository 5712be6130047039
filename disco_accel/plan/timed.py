"""The timed planner: when comes before where.

The step is simulated in time (``timeline``), first with a counter of bytes to find which pages are on the device when
the step starts, then with addresses for all pages (``ground``) above those of the fixed values (``place``). Several
settings are tried and the plan that is fastest in simulation is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
from disco_accel.taskgraph import TaskGraph

SHARES = (0.0, 0.3, 0.5, 0.7, 0.85)
"""Shares of the memory, beside what fixed values take at their peak, for pages that never leave."""

WORTH = (None, 10.0, 2.0)
"""How many times longer than its copies a produced value's absence must be; None: no produced value leaves."""

_FINALISTS = 2


@dataclass(frozen=True, slots=True)
class Draft:
    """A timeline with its demand, the pages there at the ``start``, and ``permanent`` ones with their addresses."""

    demand: Demand
    timeline: Timeline
    start: tuple[int, ...]
    permanent: dict[int, int]


def build_timed(graph: TaskGraph, machine: Machine, *, cyclic: bool) -> MemGraph:
    """Return the fastest plan found. Raises Infeasible if there is none that this planner finds."""
    best: tuple[float, MemGraph] | None = None
    for worth in WORTH:
        try:
            demand = demand_of(graph, machine, worth)
        except Infeasible:
            continue
        for draft in drafts(demand, machine, cyclic)[:_FINALISTS]:
            plan = plan_of(demand, draft.timeline, draft.permanent, draft.start, cyclic)
            makespan = simulate(plan, machine).makespan
            if best is None or makespan < best[0]:
                best = makespan, plan
        if best is not None:
            break
    if best is None:
        raise Infeasible(0)
    return best[1]


def drafts(demand: Demand, machine: Machine, cyclic: bool) -> list[Draft]:
    """Return drafts with different permanent pages, the fastest first."""
    capacity = {device.id: device.memory // device.alignment * device.alignment for device in demand.graph.devices}
    heights = _heights(demand, capacity)
    found = []
    tried: set[tuple[int, ...]] = set()
    for share in SHARES:
        permanent = tuple(permanent_pages(demand, capacity, heights, share))
        if permanent in tried:
            continue
        tried.add(permanent)
        try:
            found.append(draft_of(demand, machine, capacity, heights, permanent, cyclic))
        except Infeasible:
            continue
    return sorted(found, key=lambda draft: draft.timeline.seconds)


def _heights(demand: Demand, capacity: Mapping[int, int]) -> dict[int, Profile]:
    """Give every storage an address; return the height of storages by device and position. Raises Infeasible."""
    heights = {}
    for device, memory in capacity.items():
        storages = [storage for storage in demand.storages if storage.device == device]
        packed = place(storages, demand.end)
        clean = sum(page.block for page in demand.pages if page.device == device)
        tops = [int(height.max()) for height, _ in packed]
        # Where pages have to come and go, low everywhere is better than low at the peak.
        chosen = 0 if min(tops) + clean > memory and tops[0] <= memory else tops.index(min(tops))
        if tops[chosen] > memory:
            raise Infeasible(0)
        heights[device] = packed[chosen][0]
        for storage, address in zip(storages, packed[chosen][1], strict=True):
            storage.addr = address
    return heights


def permanent_pages(
    demand: Demand, capacity: Mapping[int, int], heights: Mapping[int, Profile], share: float
) -> Iterable[int]:
    """Yield the pages that stay for good: all if they fit, else small ones and ``share`` of the room for others."""
    for device, memory in capacity.items():
        clean = [i for i, page in enumerate(demand.pages) if page.clean and page.device == device]
        room = memory - int((heights[device] + demand.produced[device]).max())
        if sum(demand.pages[i].block for i in clean) <= room:
            yield from clean
            continue
        small = [i for i in clean if demand.pages[i].size < SMALL]
        taken = sum(demand.pages[i].block for i in small)
        if taken * 4 > room:
            small, taken = [], 0
        yield from small
        apart = set(small)
        large = sorted((i for i in clean if i not in apart), key=lambda i: demand.pages[i].uses[0])
        total = sum(demand.pages[i].block for i in large)
        left = int(share * room) - taken
        fraction = max(0.0, left / total) if total else 0.0
        credit = 0.0
        for i in large:
            block = demand.pages[i].block
            credit += fraction * block
            if credit >= block / 2 and block <= left:
                credit -= block
                left -= block
                yield i


def draft_of(
    demand: Demand,
    machine: Machine,
    capacity: Mapping[int, int],
    heights: Mapping[int, Profile],
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
