"""Memory of one device while a step is simulated: first as a counter of bytes, then with an address for every page.

Fixed values lie at the bottom, up to a height that depends on the position; pages lie above. A page is *held* up to a
position if it was promised to a reader there; a page that is held no longer is *idle* and may be dropped.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from disco_accel.plan.demand import Page, Profile
from disco_accel.plan.sim_malloc import Infeasible

NEVER = 1 << 60

CLOSE = 20
"""Readers within one part in so many of the step are served by one copy."""

Drop = Callable[[int], None]


@dataclass(slots=True)
class Pages:
    """What is known of each page at a moment: whether it is ``here``, up to where it is ``held``, from when on
    (seconds) it is ``on_host``, and how many of its ``uses`` are ``past``."""

    pages: list[Page]
    uses: list[list[int]]
    here: list[bool] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    on_host: list[float] = field(default_factory=list)
    past: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.pages)
        self.here = [False] * count
        self.held = [-1] * count
        self.on_host = [0.0 if page.clean else float("inf") for page in self.pages]
        self.past = [0] * count

    def next_use(self, page: int) -> int:
        """Return the position of the next use of ``page``, or NEVER."""
        uses = self.uses[page]
        return uses[self.past[page]] if self.past[page] < len(uses) else NEVER


class Counter:
    """A device's memory as a number of bytes: any pages fit that fit together."""

    def __init__(self, state: Pages, fixed: Profile, capacity: int, drop: Drop) -> None:
        self.state = state
        self.fixed = fixed
        self.capacity = capacity
        self.drop = drop
        self.bytes = 0
        self.now = 0
        self.idle_pages: list[tuple[int, int]] = []

    def put(self, page: int) -> None:
        """Have ``page`` there at the start."""
        self.bytes += self.state.pages[page].block
        self.idle(page)

    def idle(self, page: int) -> None:
        """``page`` is held no longer."""
        heapq.heappush(self.idle_pages, (-self.state.next_use(page), page))

    def leave(self, page: int) -> None:
        """``page`` is dropped."""
        self.bytes -= self.state.pages[page].block

    def stays(self, page: int, begin: int, use: int) -> bool:
        """Whether ``page``, which is here, can be held from ``begin`` to ``use`` where it is."""
        return True

    def advance(self, position: int, begin: float) -> float:
        """Go to ``position``: pages make place for its fixed values. Return when they have, not before ``begin``."""
        self.now = position
        return self._room(0, begin)

    def take(self, page: int, use: int, begin: float, force: bool) -> float | None:
        """Find room for ``page`` from now to ``use``; return when it is free, None if it is better to wait."""
        begin = self._room(self.state.pages[page].block, begin)
        self.bytes += self.state.pages[page].block
        return begin

    def _room(self, block: int, begin: float) -> float:
        state = self.state
        over = int(self.fixed[self.now]) + self.bytes + block - self.capacity
        leaving: list[tuple[int, int]] = []
        while over > 0:
            if self.idle_pages:
                entry = heapq.heappop(self.idle_pages)
                page = entry[1]
                if not state.here[page] or state.held[page] >= self.now or -entry[0] != state.next_use(page):
                    continue
                if state.on_host[page] > begin:
                    leaving.append(entry)
                    continue
            elif leaving:
                entry = min(leaving, key=lambda entry: (state.on_host[entry[1]], entry))
                leaving.remove(entry)
                page = entry[1]
                begin = max(begin, state.on_host[page])
            else:
                raise Infeasible(self.now)
            over -= state.pages[page].block
            self.drop(page)
        for entry in leaving:
            heapq.heappush(self.idle_pages, entry)
        return begin


@dataclass(frozen=True, slots=True)
class _Window:
    """``[start, start + block)`` once the pages ``dropped`` are gone; ``loss`` is the soonest next use among them."""

    start: int
    loss: int
    dropped: tuple[int, ...]


class Map:
    """A device's memory with addresses. ``homes``: where pages must be when the step ends."""

    def __init__(
        self, state: Pages, end: int, height: Profile, top: int, homes: Mapping[int, int], drop: Drop, unhold: Drop
    ) -> None:
        self.state = state
        self.end = end
        self.height = height
        self.top = top
        self.homes = homes
        self.drop = drop
        self.unhold = unhold
        self.now = 0
        self.order: list[tuple[int, int]] = []
        """Address and page of all that is here, ascending."""
        self.addr: dict[int, int] = {}
        self.home_from = {page: self._returns(page) for page in homes}
        self.first_return = min(self.home_from.values(), default=NEVER)

    def put(self, page: int) -> None:
        """Have ``page`` at home at the start."""
        self._settle(page, self.homes[page])

    def idle(self, page: int) -> None:
        """``page`` is held no longer."""

    def leave(self, page: int) -> None:
        """``page`` is dropped."""
        address = self.addr.pop(page)
        del self.order[bisect_left(self.order, (address, page))]

    def stays(self, page: int, begin: int, use: int) -> bool:
        """Whether ``page``, which is here, can be held from ``begin`` to ``use`` where it is."""
        if use == self.end and self.homes.get(page, self.addr[page]) != self.addr[page]:
            return False
        return int(self.height[begin : use + 1].max()) <= self.addr[page]

    def advance(self, position: int, begin: float) -> float:
        """Go to ``position``: pages make place for its fixed values. Return when they have, not before ``begin``."""
        self.now = position
        height = int(self.height[position])
        while self.order and self.order[0][0] < height:
            page = self.order[0][1]
            if self.state.held[page] >= position:
                raise Infeasible(position)
            begin = max(begin, self.state.on_host[page])
            self.drop(page)
        return begin

    def take(self, page: int, use: int, begin: float, force: bool) -> float | None:
        """Find a place for ``page`` from now to ``use``; return when it is free, None if it is better to wait."""
        block = self.state.pages[page].block
        floor = int(self.height[self.now : use + 1].max())
        window = None
        home = self.homes.get(page)
        if home is not None and use >= self.home_from[page]:
            window = self._at(home, block, floor, begin)
            if window is None and (use == self.end or not force):
                if force:
                    raise Infeasible(self.now)
                return None
        elif home is not None:
            window = self._at(home, block, floor, begin)
            if window is not None and window.loss <= use:
                window = None
        if window is None:
            window = self._best(page, floor, use, begin, hard=False)
        if window is None and force:
            window = self._best(page, floor, use, float("inf"), hard=True)
            if window is None:
                raise Infeasible(self.now)
        if window is None:
            return None
        for other in window.dropped:
            begin = max(begin, self.state.on_host[other])
            if self.state.held[other] >= self.now:
                self.unhold(other)
            self.drop(other)
        self._settle(page, window.start)
        return begin

    def _settle(self, page: int, address: int) -> None:
        self.addr[page] = address
        insort(self.order, (address, page))

    def _returns(self, page: int) -> int:
        """Return the use from which ``page`` had better be at home: only readers close together are left."""
        uses = self.state.uses[page]
        last = uses[-2] if len(uses) > 1 else self.end
        return next((use for use in uses if (last - use) * CLOSE <= self.end), self.end)

    def _at(self, start: int, block: int, floor: int, begin: float) -> _Window | None:
        """Return the window at ``start`` if nothing is in the way but idle pages."""
        if start < floor:
            return None
        first = bisect_left(self.order, (start, -1))
        if first:
            address, page = self.order[first - 1]
            if address + self.state.pages[page].block > start:
                first -= 1
        dropped = []
        loss = NEVER
        for address, page in self.order[first:]:
            if address >= start + block:
                break
            if not self._may_go(page, begin):
                return None
            dropped.append(page)
            loss = min(loss, self.state.next_use(page))
        return _Window(start, loss, tuple(dropped))

    def _may_go(self, page: int, begin: float) -> bool:
        return self.state.held[page] < self.now and self.state.on_host[page] <= begin

    def _best(self, page: int, floor: int, use: int, begin: float, hard: bool) -> _Window | None:
        """Return the window for ``page`` whose loss is needed last; ``hard``: pages held for later may go too.

        Bytes left over beside it lessen a window's worth. Where the page cannot stay until the use after ``use``,
        because fixed values grow there, that use is lost too.
        """
        block = self.state.pages[page].block
        after = next((other for other in self.state.uses[page] if other > use), NEVER)
        lasting = floor if after == NEVER else int(self.height[self.now : after + 1].max())
        limit = min(after, 2 * self.end)
        claims = self._claims(use)
        best: tuple[tuple[float, int, int], int, list[int]] | None = None
        for low, high, pages, starts, ends in self._runs(block, floor, begin, hard):
            needs = [self.state.next_use(other) for other in pages]
            for start in {low, high - block, *ends, *(address - block for address in starts)}:
                if start < low or start + block > high:
                    continue
                i, j = bisect_right(ends, start), bisect_left(starts, start + block)
                loss = NEVER if i == j else needs[i] if j == i + 1 else min(needs[i:j])
                for address, end, needed in claims:
                    if address < start + block and end > start:
                        loss = min(loss, needed)
                if loss <= use and not hard:
                    continue
                hole = (starts[j] if j < len(starts) else high) - (ends[i - 1] if i else low) - block
                distance = min(loss, limit if start < lasting else 2 * self.end) - self.now
                rank = (-distance / (1 + hole / block), hole, -start)
                if best is None or rank < best[0]:
                    best = rank, loss, pages[i:j]
        return None if best is None else _Window(-best[0][2], best[1], tuple(best[2]))

    def _runs(
        self, block: int, floor: int, begin: float, hard: bool
    ) -> list[tuple[int, int, list[int], list[int], list[int]]]:
        """Return stretches of at least ``block`` bytes above ``floor`` with nothing in them but pages that may go.

        A stretch is its start, its end, and its pages with the start and the end of each.
        """
        state = self.state
        runs = []
        inside: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        wall = floor
        for address, page in self.order:
            value = state.pages[page]
            end = address + value.block
            if end <= floor:
                continue
            leaves = value.free <= self.now and state.on_host[page] <= begin
            if leaves and (state.held[page] < self.now or (hard and state.next_use(page) > self.now)):
                inside.append(page)
                starts.append(address)
                ends.append(end)
                continue
            if address - wall >= block:
                runs.append((wall, address, inside, starts, ends))
            inside, starts, ends, wall = [], [], [], max(wall, end)
        if self.top - wall >= block:
            runs.append((wall, self.top, inside, starts, ends))
        return runs

    def _claims(self, use: int) -> list[tuple[int, int, int]]:
        """Return the homes, with the position of return, of pages that are elsewhere and want to be back by ``use``."""
        if use < self.first_return:
            return []
        return [
            (address, address + self.state.pages[page].block, self.home_from[page])
            for page, address in self.homes.items()
            if self.home_from[page] <= use and self.addr.get(page) != address
        ]
