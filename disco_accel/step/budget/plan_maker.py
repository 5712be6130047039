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
from disco_accel.step.budget.plan_set import PlanFamily
from disco_accel.threads import start_thread

logger = logging.getLogger("disco_accel")


class PlanMaker:
    """Makes plans for families, one after the other: those that are asked for first, then those that tell which budgets
    are of use. It touches no tensor and no lock of the session's. The thread starts with the first request, and ends
    with the maker."""

    def __init__(self, limits_found: Callable[[], None]) -> None:
        """``limits_found`` is called, in the thread, when a family's least and wish are known."""
        self._asked: dict[PlanFamily, int] = {}
        self._spread: dict[PlanFamily, int] = {}
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

    def ask(self, family: PlanFamily, total: int) -> None:
        """A plan for ``total`` bytes, in the place of what was asked for before for ``family``."""
        with self._lock:
            self._asked[family] = total
        self._begin()

    def spread(self, family: PlanFamily, most: int) -> None:
        """The limits of ``family``, up to ``most`` bytes, and plans between them."""
        with self._lock:
            self._spread[family] = most
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
            family = next(iter(self._asked or self._spread))
            total = self._asked.pop(family) if asked else self._spread[family]
        try:
            if asked:
                self._make(family, total)
            elif not self._spread_more(family, total):
                with self._lock:
                    self._spread.pop(family, None)
        except DiscoError as error:
            # Plans that there are go on; this one was only to make a later step faster.
            if not self._stopped and str(error) not in self._said:
                self._said.add(str(error))
                logger.error("a plan for another budget could not be made: %s", error)
            with self._lock:
                self._spread.pop(family, None)
        finally:
            self._busy = False
        return True

    def _make(self, family: PlanFamily, total: int) -> None:
        try:
            member = family.make(total, elsewhere=self._process)
        except (BudgetTooSmall, ConfigError, Infeasible):
            # Who runs within so little is told; here it is one budget less to choose from.
            family.settled.add(total)
            return
        for kind in list(family.kinds):
            if kind not in member.more:
                family.make_more(member, kind, elsewhere=self._process)

    def _spread_more(self, family: PlanFamily, most: int) -> bool:
        if family.wish is None:
            family.find_limits(most, self._process)
            self._limits_found()
            return True
        total = family.next_total()
        if total is not None:
            self._make(family, total)
            return True
        for member in family.members():
            for kind in list(family.kinds):
                if kind not in member.more and kind not in member.without:
                    member.without.add(kind)
                    family.make_more(member, kind, elsewhere=self._process)
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
