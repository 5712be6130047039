"""When evicted objects have to start on their way back."""

from __future__ import annotations

import heapq
from collections.abc import Container

_SLACK = 64
"""Entries beyond two for each object, before those of objects that were freed or announced anew are thrown away."""


class DueTimes:
    """Start times of objects by their ids, the earliest first. One id may have several; the last of them counts last,
    and whoever takes an id looks whether there is anything left to do."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, start: float, id: int, known: Container[int], count: int) -> None:
        """Object ``id`` starts at ``start``. ``known``: the ``count`` ids that exist; entries of others may be dropped,
        as their time may never come."""
        heapq.heappush(self._heap, (start, id))
        if len(self._heap) > _SLACK + 2 * count:
            first = {id: start for start, id in sorted(self._heap, reverse=True) if id in known}
            self._heap = sorted((start, id) for id, start in first.items())

    def take(self, now: float) -> int | None:
        """The next id that is due; None if none is."""
        return heapq.heappop(self._heap)[1] if self._heap and self._heap[0][0] <= now else None

    @property
    def next(self) -> float | None:
        """When the next is due."""
        return self._heap[0][0] if self._heap else None
