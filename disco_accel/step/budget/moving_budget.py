"""The memory budget of one prepared model, which may move between its steps, and the plans that follow it.

Within a step nothing moves. Each step begins with a look at the grant. A smaller one gives the arena back before the
step chooses a plan that fits; a larger one changes nothing until a plan for it is there and worth its switch.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from disco_accel.errors import BudgetTooSmall
from disco_accel.step.budget.engine_memory import EngineMemory
from disco_accel.step.budget.grant import POLL_SECONDS, Grant
from disco_accel.step.budget.grant_source import GrantChanged, GrantSource
from disco_accel.step.budget.plan_sets import PlanSets
from disco_accel.threads import start_thread

T = TypeVar("T")


class MovingBudget:
    """``grant``: how much there is; ``plan_sets``: the plans to choose from."""

    def __init__(self, memory: EngineMemory, source: GrantSource | None, most: int, host_memory: int) -> None:
        """``source``, ``most``: as of ``Grant``. ``host_memory``: for training on the host."""
        self._memory, self._process = memory, os.getpid()
        self.grant = Grant(source, most)
        self.plan_sets = PlanSets(memory.plans, self.grant, host_memory)
        self._stop: threading.Event | None = None
        if source is not None:
            self._stop = stop = threading.Event()
            start_thread(_watch, weakref.ref(self), source, stop, name="disco-grant", stop=stop.set)

    def follow(self) -> None:
        """Go by the grant as it is now. Between steps, under the session's lock."""
        granted = self.grant.granted()
        if granted == self.grant.total:
            return
        before, self.grant.total = self.grant.total, granted
        if granted < self.grant.held:
            self._shrink()
        self.plan_sets.follow(before)
        self.grant.note()

    def follow_if_changed(self) -> None:
        """Between two steps, not under the session's lock: as ``follow``."""
        if self.grant.granted() != self.grant.total:
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
        if self._stop is not None and self.grant.source is not None:
            self._stop.set()
            self.grant.held = 0
            _leave(self.grant.source)

    def stats(self) -> dict[str, Any]:
        """As of the grant, and budgets that have plans; empty where nothing but the config decides."""
        if not self.grant.moving:
            return {}
        return self.grant.stats() | {
            "budget_plans": sorted({total for plan_set in self.plan_sets.all() for total in plan_set.totals()})
        }


def retry_on_budget_change(budgets: MovingBudget, step: Callable[[], T]) -> T:
    """Call ``step``, the beginning of a step of one session, until it succeeds under the budget as it is then.

    Raises:
        BudgetTooSmall: it needs more than the budget, and nobody grants as much in time.
    """
    while True:
        budgets.follow_if_changed()
        try:
            return step()
        except GrantChanged as changed:
            budgets.grant.wait_to_rise(changed.total, changed.seconds)
        except BudgetTooSmall as error:
            if not budgets.wait_for(error):
                raise


def _leave(source: GrantSource) -> None:
    """The job is over."""
    source.hold(0)
    source.want(0, 0)


def _watch(budget: weakref.ref[MovingBudget], source: GrantSource, stop: threading.Event) -> None:
    """Between steps a model gives back memory that is not granted any more; once it is gone, all."""
    while not stop.wait(POLL_SECONDS):
        own = budget()
        try:
            if own is not None:
                own.shrink_if_idle()
        except ReferenceError:
            own = None
        if own is None:
            # Here, and not where it is collected: a source may be in the middle of another call there.
            _leave(source)
            return
        del own
