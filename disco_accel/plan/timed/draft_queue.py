"""Drafts that wait for offsets, in the order in which they get them."""

from __future__ import annotations

import heapq

from disco_accel.plan.timed.drafts import Draft
from disco_accel.plan.timed.swap_schedule import SwapEvent, SwapSchedule


class _DraftQueue:
    """Drafts that have no offsets yet, the fastest first. ``good``: seconds of a step below which none is better than
    another."""

    def __init__(self, good: float) -> None:
        self._good = good
        self._heap: list[tuple[float, int, int, Draft]] = []
        """Seconds, bytes reloaded, number, draft."""
        self._pushed = 0
        self._schedules: dict[float, list[list[tuple[SwapEvent, int]]]] = {}
        """Events of all drafts that were added by their seconds."""

    def __bool__(self) -> bool:
        return bool(self._heap)

    def clear(self) -> None:
        """Forget all drafts."""
        self._heap.clear()

    def rank(self, schedule: SwapSchedule) -> tuple[float, int]:
        """Seconds of a schedule, then bytes reloaded, by which schedules are compared."""
        return max(schedule.seconds, self._good), schedule.reloaded

    def add(self, draft: Draft) -> None:
        """Add ``draft`` unless one with the same schedule was added before."""
        equally_fast = self._schedules.setdefault(draft.schedule.seconds, [])
        if draft.schedule.events not in equally_fast:
            equally_fast.append(draft.schedule.events)
            self._pushed += 1
            heapq.heappush(self._heap, (*self.rank(draft.schedule), self._pushed, draft))

    def pop(self) -> Draft:
        """Take the first out."""
        return heapq.heappop(self._heap)[-1]
