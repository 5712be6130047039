"""The timed planner: when comes before where.

The step is simulated in time with a counter of bytes (``timeline``): first two steps on end, which shows what is on the
device when a step starts, then one step from there. Several settings are tried. The fastest drafts get addresses
(``place``); one that does not fit is drafted again with less memory. The plan that is fastest in simulation is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan.buildmemgraph.residents import SMALL
from disco_accel.plan.common.serial_orders import lower_order
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import DRAFTED, FINISHED, PLACED, REPLAYED, Work
from disco_accel.plan.timed.live_ranges import Stays, stays_of
from disco_accel.plan.timed.requirements import Demand, Profile, demand_of, twice
from disco_accel.plan.timed.swap_schedule import Act, Timeline, simulate_step
from disco_accel.simulate.simulator import Machine, simulate

SHARES = (0.0, 0.5, 0.9, 0.95, 0.3, 0.7)
"""Shares of the memory, beside what fixed values take at their peak, for pages that never leave; by promise."""

WORTH = (None, 10.0, 5.0, 2.0)
"""How many times longer than its copies a produced value's absence must be; None: no produced value leaves."""

EFFORT = 400_000
"""Vertices in all the drafts of one search; the first share of each kind is tried in any case."""

AHEAD = (0.2, 0.05)
"""Shares of what a step with memory for all takes: nothing is dropped for what is wanted later than that. Without such
a limit an idle link trades what is here for what is wanted sooner, again and again, and is busy when it matters."""

_PLACED = 4_000_000
"""Addresses that are tried in one search, after which the first plan found is the last."""

_TRIES = 6
"""Drafts that are tried even if that takes more addresses."""

_GOOD = 1.003
"""A draft that takes at most so many times what a step with memory for all takes is not bettered any more."""

_DRAFTING = 0.5
"""Share of the work, or of the user's time, after which no more settings are tried: drafts need addresses."""

_STEP = 0.08
_REORDERED = 12_000
"""Vertices of a graph for which an order with a lower peak is tried too."""

_RETRIES = 8
_LEAST = 256
"""Pages come and go as a whole: taking away less than one part in so many of the memory may change nothing."""

_HASTE = 0.02
"""How much sooner, as a share of its seconds, a draft gets addresses for each retry that it has been through."""

_BUSY = 0.9
"""Share of a step that a link is busy from which on a load that starts later makes the step longer."""

_LATE = 1.002
"""A plan that takes more than so many times what its draft takes has lost it by loads that were put off."""

_CUT = 0.25
"""How much longer a step becomes, as a share of itself, by giving up all of its memory; a guess for small cuts."""

_SMALL = 1000
"""Positions of a step up to which a draft without addresses is followed by several others, not one."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """``worth`` as in WORTH, ``share`` as in SHARES, ``ahead`` as in AHEAD; ``outliers``: unusually large pages are
    permanent before others, because what has to be kept free for those that come and go depends on the largest;
    ``lower``: in the order with a lower peak; ``lean``: unusually large pages are not there at the border of the step,
    where memory is fullest, because pieces as large as they leave holes."""

    worth: float | None
    share: float
    outliers: bool = False
    ahead: float = float("inf")
    lower: bool = False
    lean: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """A timeline with its demand, the pages there at the ``start``, and those that are ``permanent``; ``ahead`` in
    seconds; ``lean`` as in settings; ``retries``: how often addresses did not fit."""

    demand: Demand
    timeline: Timeline
    start: tuple[int, ...]
    permanent: tuple[int, ...]
    ahead: float
    lean: bool = False
    retries: int = 0


def build_timed(graph: TaskGraph, machine: Machine, *, cyclic: bool, work: Work | None = None) -> MemGraph:
    """Return the fastest plan found before ``work`` is over. Raises Infeasible if there is none by then."""
    search = _Search(graph, machine, cyclic, work or Work())
    search.run()
    search.settle()
    if search.makespan > search.floor and search.effort < EFFORT and not search.over():
        # What was good enough as a draft may have lost by its addresses.
        search.floor = 0.0
        search.run()
        search.settle()
    if search.plan is None:
        raise Infeasible(0)
    return search.plan


class _Search:
    """Drafts with different settings, kept in ``found``, and the best ``plan`` with its ``makespan``."""

    def __init__(self, graph: TaskGraph, machine: Machine, cyclic: bool, work: Work) -> None:
        self.graph = graph
        self.work = work
        self.machine = machine
        self.cyclic = cyclic
        self.capacity = {device.id: device.memory // device.alignment * device.alignment for device in graph.devices}
        self.demands: dict[tuple[bool, float | None], Demand | None] = {}
        self.tried: set[tuple[bool, bool, float | None, float, tuple[int, ...]]] = set()
        self.found: list[tuple[Draft, _Settings]] = []
        self.queue: list[tuple[float, int, int, Draft, tuple[Stays, dict[int, Profile]] | None]] = []
        self.seen: dict[float, list[list[tuple[Act, int]]]] = {}
        self.count = 0
        self.effort = 0
        self.pieces = 0
        self.tries = 0
        self.ideal = self._ideal()
        self.floor = _GOOD * self.ideal
        self.plan: MemGraph | None = None
        self.makespan = float("inf")

    def over(self, share: float = 1.0) -> bool:
        """Whether the search has had ``share`` of its work, or of the user's time."""
        return self.work.over(len(self.graph.vertices), share)

    def run(self) -> None:
        """Try kinds of demand and shares of permanent pages, then what lies around the best."""
        for worth in WORTH:
            if not self.found or self.effort * 4 < EFFORT:
                self.attempt(_Settings(worth, SHARES[0]))
        if self.found:
            self.attempt(replace(self.best(), lower=True), limited=True)
            self.attempt(replace(self.best(), lean=True), limited=True)
        for share in SHARES[1:]:
            wasteful = share == SHARES[2] and bool(self.found) and self.best_draft().loaded > 0
            self.attempt(replace(self.best(), share=share), limited=True, even_if_good=wasteful)
        self.attempt(replace(self.best(), outliers=True), limited=True)
        if self.found and self.best_draft().loaded:
            for ahead in AHEAD:
                self.attempt(replace(self.best(), ahead=ahead), limited=True, even_if_good=True)
        step = _STEP
        while step > _STEP / 5:
            best, before = self.best(), self.fastest()
            for share in (best.share - step, best.share + step):
                if 0.0 <= share <= 1.0:
                    self.attempt(replace(best, share=share), limited=True)
            if self.fastest() >= before:
                step /= 2

    def settle(self) -> None:
        """Give drafts addresses, the most promising first, until none can be faster than the best plan."""
        pieces, tries = self.pieces + _PLACED, self.tries + _TRIES
        while self.queue and self.makespan > self.floor and not self.over():
            if self.pieces > pieces and (self.plan or (self.tries > tries and self.pieces > 4 * pieces)):
                return
            _, _, _, draft, first = heapq.heappop(self.queue)
            if draft.timeline.seconds >= self.makespan:
                continue
            self.tries += 1
            if first is None:
                stays = stays_of(draft.demand, draft.timeline, draft.permanent, draft.start, self.cyclic)
                self.work.add(REPLAYED, draft.demand.end)
                over = stays.settle(self.capacity, lowest=not draft.timeline.loaded)
                self._tried(stays.tried)
                if over:
                    self._put(draft, (stays, over))
                else:
                    self._keep(stays.plan(self.cyclic))
            elif self._waits_for_link(draft):
                self._again(draft, first[1])
            else:
                self._postpone(draft, *first)

    def _postpone(self, draft: Draft, stays: Stays, over: dict[int, Profile]) -> None:
        """Put loads off; draft again where that does not help, or costs time."""
        tried, still = stays.tried, stays.postpone(self.capacity)
        self._tried(stays.tried - tried)
        seconds = float("inf") if still else self._keep(stays.plan(self.cyclic))
        if seconds > _LATE * draft.timeline.seconds:
            self._again(draft, still or over)

    def _tried(self, pieces: int) -> None:
        self.pieces += pieces
        self.work.add(PLACED, pieces)

    def _keep(self, plan: MemGraph) -> float:
        """Keep the plan if it is the fastest so far; return its seconds."""
        self.work.add(FINISHED, len(plan.vertices))
        makespan = simulate(plan, self.machine).makespan
        if makespan < self.makespan:
            self.plan, self.makespan = plan, makespan
        return makespan

    def _waits_for_link(self, draft: Draft) -> bool:
        """Whether the draft keeps links so busy that a load which starts later cannot be made up for."""
        links = self.machine.h2d.bandwidth * len(self.capacity)
        return draft.timeline.loaded > _BUSY * draft.timeline.seconds * links

    def _put(self, draft: Draft, first: tuple[Stays, dict[int, Profile]] | None = None) -> None:
        """Queue ``draft``, the sooner the faster it promises to be when what was over the memory has been cut.

        ``first``: its stays, and what they were over the memory, if that is known."""
        over = 0.0 if first is None else max(int(p.max()) / self.capacity[d] for d, p in first[1].items())
        # One that has been through a few retries is soon settled.
        rank = self._rank(draft.timeline)[0] * (1 - _HASTE * draft.retries) * (1 + _CUT * over)
        self.count += 1
        heapq.heappush(self.queue, (rank, draft.timeline.loaded, self.count, draft, first))

    def _again(self, draft: Draft, over: Mapping[int, Profile]) -> None:
        """Draft once more with less memory where addresses were ``over`` it, and with less memory everywhere."""
        if draft.retries >= _RETRIES:
            return
        fixed = draft.demand.fixed
        free = _free(draft, self.capacity)
        least = {device: memory // _LEAST * (draft.retries + 1) for device, memory in self.capacity.items()}
        kinds = [{d: np.where(profile > 0, np.maximum(profile, least[d]), 0) for d, profile in over.items()}]
        if draft.demand.end <= _SMALL:
            kinds += [
                {device: np.full_like(profile, profile.max() // part) for device, profile in over.items()}
                for part in (1, 3)
            ]
        for less in kinds:
            taken = {device: np.minimum(profile, free[device]) for device, profile in less.items()}
            if not any(profile.any() for profile in taken.values()):
                continue
            again = {device: profile + taken.get(device, 0) for device, profile in fixed.items()}
            demand = replace(draft.demand, fixed=again)
            self._draft(demand, draft.permanent, draft.ahead, draft.lean, draft.retries + 1)

    def _draft(
        self, demand: Demand, permanent: tuple[int, ...], ahead: float, lean: bool, retries: int = 0
    ) -> Draft | None:
        """Draft and put the draft in the queue, if there is one."""
        self.effort += 3 * demand.end
        self.work.add(DRAFTED, 3 * demand.end)
        self.work.drafts += 1
        try:
            draft = draft_of(demand, self.machine, self.capacity, permanent, ahead, lean, self.cyclic)
        except Infeasible:
            return None
        draft = replace(draft, retries=retries)
        if draft.timeline.acts in self.seen.setdefault(draft.timeline.seconds, []):
            return draft
        self.seen[draft.timeline.seconds].append(draft.timeline.acts)
        self._put(draft)
        return draft

    def fastest(self) -> float:
        """Return the seconds of the best draft so far."""
        return self.best_draft().seconds if self.found else float("inf")

    def best_draft(self) -> Timeline:
        """Return the fastest draft so far, the one that loads least of those that are good enough."""
        return min((draft.timeline for draft, _ in self.found), key=self._rank)

    def best(self) -> _Settings:
        """Return the settings of the best draft so far."""
        best = min(self.found, key=lambda found: self._rank(found[0].timeline), default=None)
        return _Settings(WORTH[-1], SHARES[0]) if best is None else best[1]

    def _rank(self, timeline: Timeline) -> tuple[float, int]:
        return max(timeline.seconds, _GOOD * self.ideal), timeline.loaded

    def attempt(self, settings: _Settings, limited: bool = False, even_if_good: bool = False) -> None:
        """Draft with these settings unless the search has gone on for long enough."""
        spent = (self.effort > EFFORT or self.over(_DRAFTING)) and (limited or self.found)
        if spent or self.work.late(_DRAFTING) or (self.fastest() <= self.floor and not even_if_good):
            return
        demand = self._demand(settings.worth, settings.lower)
        if demand is None:
            return
        permanent = tuple(permanent_pages(demand, self.capacity, settings))
        attempt = (settings.lower, settings.lean, settings.worth, settings.ahead, permanent)
        if attempt in self.tried:
            return
        self.tried.add(attempt)
        draft = self._draft(demand, permanent, settings.ahead * self.ideal, settings.lean)
        if draft is not None:
            self.found.append((draft, settings))

    def _ideal(self) -> float:
        """Return the seconds of a step in this order if nothing ever had to leave."""
        demand = self._demand(None) or self._demand(WORTH[-1])
        if demand is None:
            return 0.0
        plenty = dict.fromkeys(self.capacity, 1 << 60)
        clean = [i for i, page in enumerate(demand.pages) if page.clean]
        return simulate_step(demand, self.machine, plenty, permanent=clean).seconds

    def _demand(self, worth: float | None, lower: bool = False) -> Demand | None:
        kind = lower, worth
        if kind not in self.demands:
            graph = self.lower if lower else self.graph
            try:
                self.demands[kind] = None if graph is None else demand_of(graph, self.machine, worth)
            except Infeasible:
                self.demands[kind] = None
        return self.demands[kind]

    @cached_property
    def lower(self) -> TaskGraph | None:
        """The graph in an order with a lower peak, if there is one and the graph is small enough to look for it."""
        return lower_order(self.graph) if len(self.graph.vertices) <= _REORDERED else None


def permanent_pages(demand: Demand, capacity: Mapping[int, int], settings: _Settings) -> Iterable[int]:
    """Yield the pages that stay for good: all if they fit, else small ones and a share of the room for others."""
    for device, memory in capacity.items():
        clean = [i for i, page in enumerate(demand.pages) if page.clean and page.device == device]
        blocks = {i: demand.pages[i].block for i in clean}
        room = memory - int((demand.fixed[device] + demand.produced[device]).max())
        if sum(blocks.values()) <= room:
            yield from clean
            continue
        first = [i for i in clean if demand.pages[i].size < SMALL]
        if sum(blocks[i] for i in first) * 4 > room:
            first = []
        left = int(settings.share * room) - sum(blocks[i] for i in first)
        if settings.outliers:
            for i in _outliers(demand, device):
                if blocks[i] <= left:
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
    machine: Machine,
    capacity: Mapping[int, int],
    permanent: tuple[int, ...],
    ahead: float,
    lean: bool,
    cyclic: bool,
) -> Draft:
    """Return the step that begins as it ends, with ``permanent`` pages. Raises Infeasible."""
    rooms = dict(capacity)
    for i in permanent:
        rooms[demand.pages[i].device] -= demand.pages[i].block
    if cyclic:
        double = twice(demand)
        start = simulate_step(double, machine, rooms, permanent=permanent, border=demand.end, ahead=ahead).border
        if lean:
            outliers = {i for device in capacity for i in _outliers(demand, device)}
            start = [i for i in start if i not in outliers]
    else:
        start = _first_used(demand, rooms, permanent)
    back = start if cyclic else ()
    timeline = simulate_step(demand, machine, rooms, start=start, back=back, permanent=permanent, ahead=ahead)
    return Draft(demand, timeline, tuple(start), permanent, ahead, lean)


def _outliers(demand: Demand, device: int) -> list[int]:
    """Return the clean pages that are more than twice as large as nine in ten of them, the largest first."""
    blocks = {i: page.block for i, page in enumerate(demand.pages) if page.clean and page.device == device}
    if not blocks:
        return []
    usual = sorted(blocks.values())[len(blocks) * 9 // 10]
    return sorted((i for i, block in blocks.items() if block > 2 * usual), key=lambda i: -blocks[i])


def _free(draft: Draft, capacity: Mapping[int, int]) -> dict[int, Profile]:
    """Return by device and position the bytes that are left beside what the vertex there cannot do without."""
    demand, permanent = draft.demand, set(draft.permanent)
    free = {device: memory - demand.fixed[device] - demand.produced[device] for device, memory in capacity.items()}
    for i in permanent:
        free[demand.pages[i].device] -= demand.pages[i].block
    for position, read in enumerate(demand.reads):
        for i in read:
            if i not in permanent:
                free[demand.pages[i].device][position] -= demand.pages[i].block
    return {device: np.maximum(profile, 0) for device, profile in free.items()}


def _first_used(demand: Demand, rooms: Mapping[int, int], permanent: Sequence[int]) -> list[int]:
    """Return the clean pages, by first use, that fit beside what is there at the start."""
    stays = set(permanent)
    left = {device: room - int(demand.fixed[device][0] + demand.produced[device][0]) for device, room in rooms.items()}
    clean = (i for i, page in enumerate(demand.pages) if page.clean and i not in stays)
    found = []
    for i in sorted(clean, key=lambda i: demand.pages[i].uses[0]):
        page = demand.pages[i]
        if page.block <= left[page.device]:
            left[page.device] -= page.block
            found.append(i)
    return found
