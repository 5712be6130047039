"""Drafts that have no offsets yet, in the order in which they get them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from disco_accel.plan.timed.drafts import Draft
from disco_accel.plan.timed.live_ranges import LiveRanges
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.plan.timed.step_buffers import Profile
from disco_accel.plan.timed.swap_schedule import SwapSchedule

Unpacked = tuple[LiveRanges, dict[int, Profile]]
"""Live ranges that do not fit, and by device and position the bytes above the memory."""


class DraftQueue:
    """The draft that promises the fastest plan comes first. ``capacity``: bytes by device; ``good``: seconds of a step
    below which none is better than another."""

    def __init__(self, settings: TimedSettings, capacity: Mapping[int, int], good: float) -> None:
        self._settings, self._capacity, self._good = settings, capacity, good
        self._heap: list[tuple[float, int, int, Draft, Unpacked | None]] = []
        """Promised seconds, bytes reloaded, number, draft, and what is known of its packing."""
        self._least_over: dict[tuple[bool, int], float] = {}
        """By what is alike in drafts: the least share of the memory that one lay above it when it got offsets."""
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
        if unpacked is not None:
            over = self._share(unpacked)
            self._least_over[_like(draft)] = min(over, self._least_over.get(_like(draft), over))
        self._add(draft, unpacked)

    def pop(self) -> tuple[Draft, Unpacked | None]:
        """Take the first out."""
        while True:
            promised, _, _, draft, unpacked = heapq.heappop(self._heap)
            if self._promise(draft, unpacked) <= promised:
                return draft, unpacked
            # Others like it have failed since it was added.
            self._add(draft, unpacked)

    def _add(self, draft: Draft, unpacked: Unpacked | None) -> None:
        self._pushed += 1
        entry = self._promise(draft, unpacked), draft.schedule.reloaded, self._pushed, draft, unpacked
        heapq.heappush(self._heap, entry)

    def _promise(self, draft: Draft, unpacked: Unpacked | None) -> float:
        """About the seconds of a plan of ``draft``, once what is above the memory has been cut.

        One that has no offsets yet is taken to lie above the memory by as much as the best of its like: drafts whose
        seconds differ by a thousandth would all fail, one after the other, before any is mended."""
        if unpacked is not None:
            over = self._share(unpacked)
        else:
            over = 0.0 if draft.retries else self._least_over.get(_like(draft), 0.0)
        # One that has been through a few retries needs few more.
        bonus, penalty = self._settings.retry_bonus * draft.retries, self._settings.cut_penalty * over
        return self.rank(draft.schedule)[0] * (1 - bonus) * (1 + penalty)

    def _share(self, unpacked: Unpacked) -> float:
        return max(int(profile.max()) / self._capacity[device] for device, profile in unpacked[1].items())


def _like(draft: Draft) -> tuple[bool, int]:
    """What drafts of one search have in common whose offsets fail alike."""
    return bool(draft.choice.kept), len(draft.requirements.swappable)
