"""How busy a link has been of late."""

from __future__ import annotations

import math


class BusyShare:
    """The part of time in which a link was busy, of late: a mean that forgets within ``SECONDS``."""

    SECONDS = 2.0

    def __init__(self) -> None:
        self._share = self._then = 0.0

    def add(self, seconds: float, now: float) -> None:
        """The link takes a copy of so many seconds at ``now``."""
        self._share, self._then = self.at(now) + seconds / self.SECONDS, now

    def at(self, now: float) -> float:
        """The share at ``now``; more than 1 where copies wait for each other."""
        return self._share * math.exp(-max(0.0, now - self._then) / self.SECONDS)
