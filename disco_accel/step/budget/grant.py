"""Bytes of the device that one prepared model is granted, and that it holds."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

from disco_accel.sizes import format_size
from disco_accel.step.budget.grant_source import GrantChanged, GrantSource

logger = logging.getLogger("disco_accel")

POLL_SECONDS = 0.02
"""Between two looks at a grant that is waited for, and at one that an idle job may have to give back."""

_SHORT_POLL_SECONDS = 0.002
"""Between two looks at a grant, where less than a step is waited for."""

_MOST_HISTORY = 1024
"""Entries of a history; the oldest go."""


class Grant:
    """``total``: bytes that plans may take now. ``moving``: whether anything but the config has a say in it."""

    patience = 600.0
    """Seconds that a step waits for a grant that is large enough, before it is an error."""

    def __init__(self, source: GrantSource | None, most: int) -> None:
        """``most``: bytes of the device that one job may ever want; the budget, until ``set``, where ``source`` is
        None."""
        self.source, self.most, self._given = source, most, most
        self.moving = self.shared = source is not None
        self.held = self.outside = 0
        """Bytes held, and those of them that are outside of an arena."""
        self.moves, self.last_move_seconds = 0, 0.0
        self.minimum, self.max_useful = 1, most
        self._began = time.monotonic()
        self._history: deque[tuple[float, int, int]] = deque(maxlen=_MOST_HISTORY)
        """Seconds since ``prepare``, bytes granted, bytes held: an entry whenever one of both changed."""
        self._told_to_wait = False
        if source is not None:
            source.want(1, most)
        self.total = self.granted()
        if self.shared:
            self.note()

    def granted(self) -> int:
        """Bytes that the model may hold now."""
        return self._given if self.source is None else self.source.granted()

    def set(self, nbytes: int) -> None:
        """A budget of the user's, set in any thread, from the next step on."""
        assert self.source is None
        self.moving = True
        self._given = nbytes

    def must_shrink(self) -> bool:
        """Whether more is held than is granted."""
        return self.granted() < self.held

    def shrunk(self, seconds: float) -> None:
        """The arena was given back, which took so long."""
        self.moves += 1
        self.last_move_seconds = seconds

    def claim(self, outside: int, arena: int) -> None:
        """``outside`` and ``arena`` bytes are about to be used. Raises GrantChanged."""
        before, now = self.held, outside + arena
        if now == before:
            return
        self._hold(now)
        if self.moving and self.must_shrink():
            self._hold(min(before, now))
            raise GrantChanged
        self.outside = outside
        self.note()

    def claim_all(self) -> None:
        """Measurements for a plan may use all that is granted. Raises GrantChanged."""
        if self.shared:
            self.claim(self.outside, max(0, self.total - self.outside))

    def give_arena_back(self) -> None:
        """The bytes claimed for an arena are not used."""
        self._hold(self.outside)

    def give_back(self) -> None:
        """The bytes claimed for a plan are not used: there is none."""
        if self.shared:
            self.give_arena_back()

    def _hold(self, nbytes: int) -> None:
        self.held = nbytes
        if self.source is not None:
            self.source.hold(nbytes)

    def want(self, minimum: int, max_useful: int) -> None:
        """Tell the source the bytes that the model needs, if more than it knows, and those with which it is fastest."""
        self.minimum, self.max_useful = max(self.minimum, minimum), max_useful
        if self.shared and self.source is not None:
            self.source.want(self.minimum, max(self.max_useful, self.minimum))

    def wait_to_rise(self, nbytes: int, seconds: float) -> None:
        """Until so many bytes are granted, at most so long."""
        until = time.monotonic() + seconds
        while self.granted() < nbytes and time.monotonic() < until:
            time.sleep(min(_SHORT_POLL_SECONDS, seconds))

    def wait_for(self, needed: int) -> bool:
        """Wait until so many bytes are granted, which may be told once; whether they are, in time."""
        until = time.monotonic() + self.patience
        while self.granted() < needed:
            if not self._told_to_wait:
                self._told_to_wait = True
                logger.warning(
                    "memory_budget: shared: this step needs %s, %s are granted: waiting for other jobs to give memory "
                    "back, for up to %.0f s",
                    format_size(needed),
                    format_size(self.granted()),
                    self.patience,
                )
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def note(self) -> None:
        """Enter bytes granted and held into the history."""
        self._history.append((time.monotonic() - self._began, self.total, self.held))

    def draw_history(self, path: Path) -> None:
        """Write a picture of the history, if matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is None:
            return
        from disco_accel.observe.budget_plot import draw_budget

        draw_budget(path, list(self._history), title=f"memory budget, moved {self.moves} times")

    def stats(self) -> dict[str, Any]:
        """Bytes granted and held, how often memory was given back, how long that took the last time, and the history:
        seconds since ``prepare``, bytes granted, bytes held."""
        return {
            "granted_bytes": self.granted(),
            "held_bytes": self.held,
            "budget_moves": self.moves,
            "last_move_seconds": self.last_move_seconds,
            "budget_history": list(self._history),
        }
