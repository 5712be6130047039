"""The work that a search for a plan may cost, and the work that it has cost.

The planner's output is a function of its input alone, so its own limit counts work, not seconds: vertices drafted,
offsets tried, vertices walked, each with the seconds that one takes on a usual core. Only a deadline that the user
sets is read from the clock; a plan that it cut short may differ from run to run, and ``SearchWork.cut`` says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

DRAFTED = 14e-6
"""Seconds for a vertex that is simulated while the device's memory is a counter of bytes. These five are measured on
one core of a 2.x GHz Xeon, on captured steps of 400 to 9,600 vertices; there they hold within a third."""

PLACED = 1.5e-6
"""Seconds for an offset that is tried."""

REPLAYED = 14e-6
"""Seconds for a vertex of a draft whose live ranges are listed."""

FINISHED = 21e-6
"""Seconds for a vertex of a plan that is assembled and simulated."""

WALKED = 40e-6
"""Seconds for a vertex that BUILDMEMGRAPH walks past."""

SOLVED = 50e-6
"""Seconds for a vertex of a step program that is solved: on one core of an EPYC 27e-6 to 47e-6, for captured steps of
7,500 to 17,000 vertices."""

_BASE_SECONDS = 2.0
_SECONDS_PER_VERTEX = 1.4e-3
_MAX_SECONDS = 60.0


def enough(vertices: int) -> float:
    """Return the seconds of work that ``plan_seconds: auto`` allows the timed planner for a graph of so many vertices.

    Tuned on captured steps of 400 to 9,600 vertices (docs/planner.md): none of 20 plans is slower for the limit.
    """
    return min(_BASE_SECONDS + _SECONDS_PER_VERTEX * vertices, _MAX_SECONDS)


@dataclass(slots=True)
class SearchWork:
    """``limit``: seconds on the clock that a search may take (None: as much work as ``enough`` says). ``spent``:
    seconds of work so far, counted; ``drafts``: how many were made; ``cut``: whether the user's deadline has ended
    it, ``ended`` seconds after it began. ``part``: share of the work that is enough for a graph.
    ``finds_needed``: whether it may end with a search for the smallest memory, where the graph's is too small.
    ``names_needed``: whether it does where nothing else has found a plan; otherwise that is Infeasible at once."""

    limit: float | None = None
    spent: float = 0.0
    drafts: int = 0
    cut: bool = False
    ended: float = 0.0
    part: float = 1.0
    finds_needed: bool = True
    names_needed: bool = True
    _began: float = field(default_factory=lambda: time.monotonic())

    @property
    def seconds(self) -> float:
        """Seconds on the clock since the search began."""
        return time.monotonic() - self._began

    def add(self, each: float, count: int) -> None:
        """Count ``count`` steps that take ``each`` seconds."""
        self.spent += each * count

    def late(self, share: float = 1.0) -> bool:
        """Whether ``share`` of the user's seconds have passed, which is noted as ``cut``."""
        passed = self.limit is not None and self.seconds >= share * self.limit
        if passed and not self.cut:
            self.cut, self.ended = True, self.seconds
        return passed

    def over(self, vertices: int, share: float = 1.0) -> bool:
        """Whether a search over a graph of so many vertices has had ``share`` of its work, or of the user's seconds."""
        return self.late(share) if self.limit is not None else self.spent >= share * self.allowed(vertices)

    def allowed(self, vertices: int) -> float:
        """Return the seconds of work for a graph of so many vertices, if the user sets no time."""
        return self.part * enough(vertices)

    def shared(self, share: float, vertices: int, *, finds_needed: bool = True) -> SearchWork:
        """Return the work of one of several searches over a graph of so many vertices: ``share`` of the rest."""
        if self.limit is not None:
            return SearchWork(max(0.0, share * (self.limit - self.seconds)), finds_needed=finds_needed)
        left = max(0.0, self.part - self.spent / enough(vertices))
        return SearchWork(part=share * left, finds_needed=finds_needed)

    def take(self, other: SearchWork) -> None:
        """Count the cost of ``other``, which is one of ``shared`` of this one."""
        self.spent += other.spent
        self.drafts += other.drafts
        if other.cut and not self.cut:
            self.cut, self.ended = True, self.seconds
