"""A thread that makes plans for other budgets while a model trains by the plans that it has."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial

from disco_accel.errors import BudgetTooSmall, ConfigError, DiscoError
from disco_accel.gc_pause import collector_left_alone
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.step.budget.plan_set import PlanSet
from disco_accel.threads import start_thread

logger = logging.getLogger("disco_accel")


class PlanMaker:
    """Makes plans for sets, one after the other: those that are asked for first, then those that tell which budgets are
    of use. It touches no tensor and no lock of the session's. The thread starts with the first request, and ends
    with the maker."""

    def __init__(self, limits_found: Callable[[], None]) -> None:
        """``limits_found`` is called, in the thread, when a plan set's ``minimum`` and ``max_useful`` are known."""
        self._asked: dict[PlanSet, int] = {}
        self._spread: dict[PlanSet, int] = {}
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._limits_found = limits_found
        self._stopped = False
        self._process = PlanningProcess()
        self._busy = False
        self._said: set[str] = set()
        weakref.finalize(self, self._wake.set).atexit = False

    @property
    def idle(self) -> bool:
        """Whether nothing is being made or asked for."""
        with self._lock:
            return not (self._busy or self._asked or self._spread)

    def ask(self, plan_set: PlanSet, total: int) -> None:
        """A plan for ``total`` bytes, in the place of what was asked for before for ``plan_set``."""
        with self._lock:
            self._asked[plan_set] = total
        self._begin()

    def spread(self, plan_set: PlanSet, most: int) -> None:
        """The limits of ``plan_set``, up to ``most`` bytes, and plans between them."""
        with self._lock:
            self._spread[plan_set] = most
        self._begin()

    def stop(self) -> None:
        """Make nothing more; what is being made is thrown away."""
        self._stopped = True
        self._process.stop()
        self._wake.set()

    def _begin(self) -> None:
        if self._thread is None and not self._stopped:
            maker = weakref.ref(self)
            self._thread = start_thread(_run, maker, self._wake, name="disco-plans", stop=partial(_stop, maker))
        self._wake.set()

    def work(self) -> bool:
        """Do one piece of what there is to do; False if there is nothing."""
        with self._lock:
            self._busy = not self._stopped and bool(self._asked or self._spread)
            if not self._busy:
                return False
            asked = bool(self._asked)
            plan_set = next(iter(self._asked or self._spread))
            total = self._asked.pop(plan_set) if asked else self._spread[plan_set]
        try:
            if asked:
                self._make(plan_set, total)
            elif not self._spread_more(plan_set, total):
                with self._lock:
                    self._spread.pop(plan_set, None)
        except DiscoError as error:
            # Plans that there are go on; this one was only to make a later step faster.
            if not self._stopped and str(error) not in self._said:
                self._said.add(str(error))
                logger.error("a plan for another budget could not be made: %s", error)
            with self._lock:
                self._spread.pop(plan_set, None)
        finally:
            self._busy = False
        return True

    def _make(self, plan_set: PlanSet, total: int) -> None:
        try:
            member = plan_set.make(total, elsewhere=self._process)
        except (BudgetTooSmall, ConfigError, Infeasible):
            # Who runs within so little is told; here it is one budget less to choose from.
            plan_set.settled.add(total)
            return
        for kind in list(plan_set.kinds):
            if kind not in member.more:
                plan_set.make_more(member, kind, elsewhere=self._process)

    def _spread_more(self, plan_set: PlanSet, most: int) -> bool:
        if plan_set.max_useful is None:
            plan_set.find_limits(most, self._process)
            self._limits_found()
            return True
        total = plan_set.next_total()
        if total is not None:
            self._make(plan_set, total)
            return True
        for member in plan_set.members():
            for kind in list(plan_set.kinds):
                if kind not in member.more and kind not in member.without:
                    member.without.add(kind)
                    plan_set.make_more(member, kind, elsewhere=self._process)
                    return True
        return False


def _stop(maker: weakref.ref[PlanMaker]) -> None:
    own = maker()
    if own is not None:
        own.stop()


def _run(maker: weakref.ref[PlanMaker], wake: threading.Event) -> None:
    with collector_left_alone():
        while True:
            wake.wait()
            wake.clear()
            while True:
                own = maker()
                if own is None or own._stopped:
                    return
                if not own.work():
                    break
            del own
