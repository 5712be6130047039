"""Drafts that have no offsets yet, in the order in which they get them."""

from __future__ import annotations

import heapq

from disco_accel.plan.timed.drafts import Draft
from disco_accel.plan.timed.live_ranges import LiveRanges
from disco_accel.plan.timed.step_buffers import Profile
from disco_accel.plan.timed.swap_schedule import SwapSchedule

Unpacked = tuple[LiveRanges, dict[int, Profile]]
"""Live ranges that do not fit, and by device and position the bytes above the memory."""


class DraftQueue:
    """The draft that promises the fastest plan comes first. ``good``: seconds of a step below which none is better than
    another; ``retry_bonus``: as of ``TimedSettings``."""

    def __init__(self, retry_bonus: float, good: float) -> None:
        self._retry_bonus, self._good = retry_bonus, good
        self._heap: list[tuple[float, int, int, Draft, Unpacked | None]] = []
        """Promised seconds, bytes reloaded, number, draft, and what is known of its packing."""
        self._pushed = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def clear(self) -> None:
        """Forget all drafts."""
        self._heap.clear()

    def rank(self, schedule: SwapSchedule) -> tuple[float, int]:
        """What schedules are compared by: seconds, then bytes reloaded."""
        return max(schedule.seconds, self._good), schedule.reloaded

    def push(self, draft: Draft, unpacked: Unpacked | None = None) -> None:
        """Add ``draft``, or put it back with the packing that does not fit."""
        self._pushed += 1
        seconds, reloaded = self.rank(draft.schedule)
        # One that has been through a few retries needs few more.
        promised = seconds * (1 - self._retry_bonus * draft.retries)
        heapq.heappush(self._heap, (promised, reloaded, self._pushed, draft, unpacked))

    def pop(self) -> tuple[Draft, Unpacked | None]:
        """Take the first out."""
        *_, draft, unpacked = heapq.heappop(self._heap)
        return draft, unpacked
