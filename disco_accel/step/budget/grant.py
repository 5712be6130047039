"""Bytes of the device that one prepared model is granted, and that it holds."""

from __future__ import annotations

import logging
import time
from typing import Any

from disco_accel.sizes import format_size
from disco_accel.step.budget.budget_history import BudgetHistory
from disco_accel.step.budget.grant_source import GivenBudget, GrantSource, GrantWithdrawn
from disco_accel.step.budget.grant_watch import POLL_SECONDS

logger = logging.getLogger("disco_accel")

SHORT_POLL_SECONDS = 0.002
"""Between two looks at a grant, where less than a step is waited for."""

PATIENCE_SECONDS = 600.0
"""How long a step waits for a grant that is large enough, before it is an error."""


class Grant:
    """``total``: bytes that plans may take now. ``moving``: whether anything but the config has a say in it."""

    def __init__(self, source: GrantSource, most: int) -> None:
        """``most``: bytes of the device that one job may ever want."""
        self.source, self.most = source, most
        self.shared = not isinstance(source, GivenBudget)
        self.moving = self.shared
        self.held = self.outside = 0
        """Bytes held, and those of them that are outside of an arena."""
        self.moves, self.last_move_seconds = 0, 0.0
        self.minimum, self.max_useful = 1, most
        self.patience = PATIENCE_SECONDS
        self.history = BudgetHistory()
        self._told_to_wait = False
        if self.shared:
            source.want(1, most)
        self.total = source.granted()
        if self.shared:
            self.note()

    def unchanged(self) -> bool:
        """Whether the budget is as the last step had it."""
        return self.source.granted() == self.total

    def set(self, nbytes: int) -> None:
        """A budget of the user's, from the next step on."""
        assert isinstance(self.source, GivenBudget)
        self.moving = True
        self.source.nbytes = nbytes

    def must_shrink(self) -> bool:
        """Whether more is held than is granted."""
        return self.source.granted() < self.held

    def shrunk(self, seconds: float) -> None:
        """The arena was given back, which took so long."""
        self.moves += 1
        self.last_move_seconds = seconds

    def claim(self, outside: int, arena: int) -> None:
        """``outside`` and ``arena`` bytes are about to be used. Raises GrantWithdrawn."""
        before, now = self.held, outside + arena
        if now == before:
            return
        self._hold(now)
        if self.moving and self.must_shrink():
            self._hold(min(before, now))
            raise GrantWithdrawn
        self.outside = outside
        self.note()

    def claim_all(self) -> None:
        """All that is granted may be used, by what is measured for a plan. Raises GrantWithdrawn."""
        if self.shared:
            self.claim(self.outside, max(0, self.total - self.outside))

    def give_arena_back(self) -> None:
        """What was claimed for an arena is not used."""
        self._hold(self.outside)

    def give_back(self) -> None:
        """What was claimed for a plan is not used: there is none."""
        if self.shared:
            self.give_arena_back()

    def _hold(self, nbytes: int) -> None:
        self.held = nbytes
        self.source.hold(nbytes)

    def want(self, minimum: int, max_useful: int) -> None:
        """Tell the source what the model cannot run without, if that is more than it knows, and with what it is
        fastest."""
        self.minimum, self.max_useful = max(self.minimum, minimum), max_useful
        if self.shared:
            self.source.want(self.minimum, max(self.max_useful, self.minimum))

    def wait_to_rise(self, nbytes: int, seconds: float) -> None:
        """Until so many bytes are granted, at most so long."""
        until = time.monotonic() + seconds
        while self.source.granted() < nbytes and time.monotonic() < until:
            time.sleep(min(SHORT_POLL_SECONDS, seconds))

    def wait_for(self, needed: int) -> bool:
        """Wait until so many bytes are granted, which may be told once; whether they are, in time."""
        until = time.monotonic() + self.patience
        while self.source.granted() < needed:
            if not self._told_to_wait:
                self._told_to_wait = True
                logger.warning(
                    "memory_budget: shared: this step needs %s, %s are granted: waiting for other jobs to give memory "
                    "back, for up to %.0f s",
                    format_size(needed),
                    format_size(self.source.granted()),
                    self.patience,
                )
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def note(self) -> None:
        """Enter what is granted and held into the history."""
        self.history.note(self.total, self.held)

    def stats(self) -> dict[str, Any]:
        """Bytes granted and held, how often memory was given back, how long that took the last time, and the history:
        seconds since ``prepare``, bytes granted, bytes held."""
        return {
            "granted_bytes": self.source.granted(),
            "held_bytes": self.held,
            "budget_moves": self.moves,
            "last_move_seconds": self.last_move_seconds,
            "budget_history": self.history.entries(),
        }
