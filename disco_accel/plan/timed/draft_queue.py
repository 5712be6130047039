"""Drafts that have no offsets yet, in the order in which they get them."""

from __future__ import annotations

import heapq

from disco_accel.plan.timed.drafts import Draft
from disco_accel.plan.timed.live_ranges import LiveRanges
from disco_accel.plan.timed.step_buffers import Profile
from disco_accel.plan.timed.swap_schedule import SwapEvent, SwapSchedule

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
        self._schedules: dict[float, list[list[tuple[SwapEvent, int]]]] = {}
        """Events of all drafts that were added by their seconds."""

    def __bool__(self) -> bool:
        return bool(self._heap)

    def clear(self) -> None:
        """Forget all drafts."""
        self._heap.clear()

    def rank(self, schedule: SwapSchedule) -> tuple[float, int]:
        """What schedules are compared by: seconds, then bytes reloaded."""
        return max(schedule.seconds, self._good), schedule.reloaded

    def add(self, draft: Draft) -> None:
        """Add ``draft`` unless one with the same schedule was added before."""
        equally_fast = self._schedules.setdefault(draft.schedule.seconds, [])
        if draft.schedule.events not in equally_fast:
            equally_fast.append(draft.schedule.events)
            self._push(draft, None)

    def put_back(self, draft: Draft, unpacked: Unpacked) -> None:
        """Put ``draft`` back with the packing that does not fit."""
        self._push(draft, unpacked)

    def _push(self, draft: Draft, unpacked: Unpacked | None) -> None:
        self._pushed += 1
        seconds, reloaded = self.rank(draft.schedule)
        # One that has been through a few retries needs few more.
        promised = seconds * (1 - self._retry_bonus * draft.retries)
        heapq.heappush(self._heap, (promised, reloaded, self._pushed, draft, unpacked))

    def pop(self) -> tuple[Draft, Unpacked | None]:
        """Take the first out."""
        *_, draft, unpacked = heapq.heappop(self._heap)
        return draft, unpacked
