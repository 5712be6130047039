"""The memory budget of one prepared model, which may move between its steps, and the plans that follow it.

Within a step nothing moves. At the beginning of each the grant is looked at: a smaller one gives the arena back before
the step chooses a plan that fits; a larger one changes nothing until a plan for it is there and worth its switch.
"""

from __future__ import annotations

import os
import time
from typing import Any

from disco_accel.errors import BudgetTooSmall
from disco_accel.step.budget.engine_memory import EngineMemory
from disco_accel.step.budget.grant import Grant
from disco_accel.step.budget.grant_source import GrantSource
from disco_accel.step.budget.grant_watch import leave, start_watch
from disco_accel.step.budget.plan_sets import PlanSets


class MovingBudget:
    """``grant``: how much there is; ``plan_sets``: the plans to choose from."""

    def __init__(self, memory: EngineMemory, source: GrantSource, most: int, host_memory: int) -> None:
        """``most``: bytes of the device that one job may ever want. ``host_memory``: for training on the host."""
        self._memory, self._process = memory, os.getpid()
        self.grant = Grant(source, most)
        self.plan_sets = PlanSets(memory.plans, self.grant, host_memory)
        self._stop = start_watch(self, source) if self.grant.shared else None

    def follow(self) -> None:
        """Go by the grant as it is now. Between steps, under the session's lock."""
        granted = self.grant.source.granted()
        if granted == self.grant.total:
            return
        before, self.grant.total = self.grant.total, granted
        if granted < self.grant.held:
            self._shrink()
        self.plan_sets.follow(before)
        self.grant.note()

    def follow_if_changed(self) -> None:
        """Between two steps, not under the session's lock: as ``follow``."""
        if not self.grant.unchanged():
            with self._memory.lock:
                self.follow()

    def step_ended(self) -> None:
        """Give memory back that is not granted any more. Under the session's lock."""
        if self.grant.must_shrink():
            self.follow()

    def _shrink(self) -> None:
        began = time.perf_counter()
        self._memory.unload()
        self.grant.give_arena_back()
        self.grant.shrunk(time.perf_counter() - began)

    def wait_for(self, error: BudgetTooSmall) -> bool:
        """Wait until so much is granted as ``error`` asks for; False where nobody would grant it, or not in time. Not
        under the session's lock, between steps."""
        if not self.may_wait(error):
            return False
        with self._memory.lock:
            if self.grant.held > self.grant.outside:
                self._shrink()
        self.grant.minimum = max(self.grant.minimum, error.needed)
        self.plan_sets.want()
        return self.grant.wait_for(error.needed)

    def may_wait(self, error: BudgetTooSmall) -> bool:
        """Whether as much as ``error`` asks for may be granted later."""
        return self.grant.shared and error.needed <= self.grant.most

    def shrink_if_idle(self) -> None:
        """Give memory back that is not granted any more, if no step is under way. From any thread."""
        memory = self._memory
        if not self.grant.must_shrink() or not memory.lock.acquire(blocking=False):
            return
        try:
            if not memory.runs():
                self.follow()
        finally:
            memory.lock.release()

    def close(self) -> None:
        """The session is over: all is given back. In a process that was forked since nothing is: grant, plans that are
        being made and the locks of threads that are not there are its parent's."""
        if os.getpid() != self._process:
            return
        self.plan_sets.maker.stop()
        if self._stop is not None:
            self._stop.set()
            self.grant.held = 0
            leave(self.grant.source)

    def stats(self) -> dict[str, Any]:
        """As of the grant, and budgets that have plans; empty where nothing but the config decides."""
        if not self.grant.moving:
            return {}
        return self.grant.stats() | {
            "budget_plans": sorted({total for plan_set in self.plan_sets.all() for total in plan_set.totals()})
        }
