"""Memory of one device while a step is simulated: a counter of bytes, for nothing has an address yet.

A page is *held* up to a position if it was promised to a reader there; a page that is held no longer is *idle* and may
be dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.timed.requirements import Page, Profile

NEVER = 1 << 60

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

    def advance(self, position: int, begin: float) -> float:
        """Go to ``position``: pages make place for its fixed values. Return when they have, not before ``begin``."""
        self.now = position
        return self._room(0, begin)

    def fits(self, block: int) -> bool:
        """Whether there is room for ``block`` bytes without a drop."""
        return int(self.fixed[self.now]) + self.bytes + block <= self.capacity

    def take(self, page: int, begin: float) -> float:
        """Make room for ``page``; return when it is there, not before ``begin``."""
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
