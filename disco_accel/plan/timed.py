"""The timed planner: first when, then where.

The step is simulated in time with a counter of bytes (``timeline``); the stays that come out get addresses
(``place``). Where those do not fit, the counter gets fewer bytes and all is repeated. Several settings are tried and
the plan that is fastest in simulation is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disco_accel.memgraph import MemGraph
from disco_accel.plan.demand import Demand, demand_of, twice
from disco_accel.plan.place import place
from disco_accel.plan.resident import SMALL
from disco_accel.plan.sim_malloc import Infeasible
from disco_accel.plan.simulate import Machine, simulate
from disco_accel.plan.stays import Script, finish, script_of
from disco_accel.plan.timeline import Timeline, simulate_step
from disco_accel.taskgraph import TaskGraph

SHARES = (0.0, 0.3, 0.5, 0.7, 0.85)
"""Shares of the memory, beside what fixed values take at their peak, for pages that never leave."""

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Draft:
    """A timeline that is still without addresses: ``start`` and ``permanent`` pages, ``capacity`` of the counter."""

    demand: Demand
    timeline: Timeline
    start: tuple[int, ...]
    permanent: tuple[int, ...]
    capacity: dict[int, int]


def build_timed(graph: TaskGraph, machine: Machine, *, cyclic: bool) -> MemGraph:
    """Return the fastest plan found. Raises Infeasible if there is none that this planner finds."""
    best: tuple[float, MemGraph] | None = None
    for worth in (None, 10.0, 2.0):
        try:
            demand = demand_of(graph, machine, worth)
        except Infeasible:
            continue
        for draft in drafts(demand, machine, cyclic):
            plan = _with_addresses(draft, machine, cyclic)
            if plan is None:
                continue
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
    found = []
    tried: set[tuple[int, ...]] = set()
    for share in SHARES:
        permanent = tuple(permanent_pages(demand, capacity, share))
        if permanent in tried:
            continue
        tried.add(permanent)
        try:
            found.append(draft_of(demand, machine, capacity, permanent, cyclic))
        except Infeasible:
            continue
    return sorted(found, key=lambda draft: draft.timeline.seconds)


def permanent_pages(demand: Demand, capacity: dict[int, int], share: float) -> Iterable[int]:
    """Yield the pages that stay for good: all if they fit, else small ones and ``share`` of the room for others."""
    for device, memory in capacity.items():
        clean = [i for i, page in enumerate(demand.pages) if page.clean and page.device == device]
        room = memory - int(demand.fixed[device].max())
        if sum(demand.pages[i].block for i in clean) <= room:
            yield from clean
            continue
        small = [i for i in clean if demand.pages[i].size < SMALL]
        taken = sum(demand.pages[i].block for i in small)
        if taken * 4 > room:
            small, taken = [], 0
        yield from small
        large = sorted((i for i in clean if i not in set(small)), key=lambda i: demand.pages[i].uses[0])
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
    demand: Demand, machine: Machine, capacity: dict[int, int], permanent: tuple[int, ...], cyclic: bool
) -> Draft:
    """Return the step that begins as it ends, with ``permanent`` pages. Raises Infeasible."""
    if cyclic:
        pair = simulate_step(twice(demand), machine, capacity, permanent=permanent, border=demand.end)
        start = _fitting(demand, capacity, pair.border, permanent)
        back: Sequence[int] = start
    else:
        start = _fitting(demand, capacity, _by_first_use(demand, permanent), permanent)
        back = ()
    timeline = simulate_step(demand, machine, capacity, start=start, back=back, permanent=permanent)
    return Draft(demand, timeline, tuple(start), permanent, capacity)


def _by_first_use(demand: Demand, permanent: tuple[int, ...]) -> list[int]:
    stays = set(permanent)
    return sorted(
        (i for i, page in enumerate(demand.pages) if page.clean and i not in stays),
        key=lambda i: demand.pages[i].uses[0],
    )


def _fitting(demand: Demand, capacity: dict[int, int], pages: Iterable[int], permanent: tuple[int, ...]) -> list[int]:
    """Return those of ``pages`` that fit both at the start and at the end."""
    left = {
        device: memory - int(max(demand.fixed[device][0], demand.fixed[device][-1]))
        for device, memory in capacity.items()
    }
    for page in permanent:
        left[demand.pages[page].device] -= demand.pages[page].block
    chosen = []
    for page in pages:
        value = demand.pages[page]
        if value.block <= left[value.device]:
            left[value.device] -= value.block
            chosen.append(page)
    return chosen


def _with_addresses(draft: Draft, machine: Machine, cyclic: bool) -> MemGraph | None:
    """Return the plan of ``draft``, its counter shrunk until the addresses fit; None if they never do."""
    limits = {device.id: device.memory for device in draft.demand.graph.devices}
    capacity = dict(draft.capacity)
    for _ in range(_ROUNDS):
        script = script_of(draft.demand, draft.timeline, draft.start, draft.permanent, cyclic)
        over = _place_all(script, limits)
        if not over:
            return finish(script)
        for device, excess in over.items():
            capacity[device] -= excess
        try:
            draft = draft_of(draft.demand, machine, capacity, draft.permanent, cyclic)
        except Infeasible:
            return None
    return None


def _place_all(script: Script, limits: dict[int, int]) -> dict[int, int]:
    """Place all stays; return by device how many bytes are missing."""
    over = {}
    for device, limit in limits.items():
        stays = [stay for stay in script.stays if stay.device == device]
        height = place(stays, limit) if stays else 0
        if height > limit:
            over[device] = height - limit
    return over
