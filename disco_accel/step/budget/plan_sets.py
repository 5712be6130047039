"""The plan sets of one prepared model's steps: which plan runs within the budget, and which are made beside."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, MutableMapping
from functools import partial
from typing import Any

from disco_accel.errors import BudgetTooSmall, ConfigError, DiscoError
from disco_accel.gc_pause import collector_left_alone
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.step.budget.grant import Grant
from disco_accel.step.budget.grant_source import GrantChanged
from disco_accel.step.budget.plan_set import Kind, Member, PlanSet
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.gradients.accumulating_step import AccumulatingStep
from disco_accel.step.update.updated_step import StepWithUpdate
from disco_accel.threads import start_thread

logger = logging.getLogger("disco_accel")

_RECENT_STEPS = 4
"""A job wants no more memory than its last so many steps could use. Batches of two lengths in turn should not move it,
and a job whose need has ended should not keep others waiting."""

_TURNS = 16
"""Forwards without gradients take turns with training if one displaces its arena twice within so many runs, as the
reference of a preference loss does; an evaluation now and then does not."""

_QUICK_SECONDS = 1.0
"""Of a search that a step waits for. The thorough one follows beside the steps."""


class PlanSets:
    """One for each captured step, by its key. Used under the session's lock."""

    def __init__(self, plans: MutableMapping[Any, CompiledStep], grant: Grant, host_memory: int) -> None:
        """``plans``: the session's table. ``host_memory``: bytes that training may take on the host."""
        self._plans, self._grant, self._host_memory = plans, grant, host_memory
        self.largest_outside = 0
        """Bytes outside the arena, of the step that has most there; a forward in turn with training is one."""
        self._lookups, self._displaced = 0, -_TURNS
        self._by_key: dict[Hashable, PlanSet] = {}
        self._of_captured: dict[int, tuple[Hashable, PlanSet]] = {}
        self._recent: deque[PlanSet] = deque(maxlen=_RECENT_STEPS)
        self._noted: set[int] = set()
        self.maker = _PlanMaker(self.want)

    def all(self) -> list[PlanSet]:
        """Of all steps that are found again by their keys."""
        return list(self._by_key.values())

    def knows(self, key: Hashable) -> bool:
        """Whether there is a plan under ``key``."""
        return key in self._by_key

    def keep(self, key: Hashable, step: CompiledStep, *, found_again: bool) -> None:
        """``step`` is the first plan under ``key``, by which it is ``found_again``."""
        plan_set = PlanSet(step, self._host_memory)
        if step.captured.gradients:
            # Results of a forward are the user's to free before the next step: they make no plan of training smaller.
            self.largest_outside = max(self.largest_outside, step.budget.outside)
        self._of_captured[id(step.captured)] = key, plan_set
        if found_again:
            self._by_key[key] = plan_set
            if self._grant.shared:
                plan_set.measure()
                self.maker.spread(plan_set, self._grant.most)
            self._begin_fusing(plan_set)
            # Runs that are being compiled bring a longer search with them.
            if step.hasty and not plan_set.runs:
                plan_set.measure()
                plan_set.hasty = step.budget.total

    def _begin_fusing(self, plan_set: PlanSet) -> None:
        if plan_set.fusing is not None:
            plan_set.runs = plan_set.runs_to_compile()
            plan_set.fusing.begin(plan_set.runs, logger.info)

    @property
    def compiling(self) -> bool:
        """Whether kernels of a step are being compiled, or are to be measured."""
        return any(each.runs and each.fusing is not None and not each.fusing.failed for each in self.all())

    def kernels_arrived(self, key: Hashable) -> bool:
        """Whether kernels for the step under ``key`` have been compiled beside it: ``use_fused`` is to be called now,
        while nothing runs."""
        plan_set = self._by_key.get(key)
        if plan_set is None or not plan_set.runs or plan_set.fusing is None:
            return False
        if plan_set.fusing.failed:
            plan_set.runs = {}
        return bool(plan_set.runs) and plan_set.fusing.compiled(plan_set.runs.values())

    def use_fused(self, key: Hashable) -> None:
        """Measure the kernels that have arrived; plans with them are made beside the steps."""
        plan_set = self._by_key[key]
        assert plan_set.fusing is not None
        plan_set.fusing.measure(plan_set.runs)
        # Some may have to be tried otherwise.
        self._begin_fusing(plan_set)
        if not plan_set.runs:
            for total in plan_set.totals():
                self.maker.ask(plan_set, total)

    def plan(self, key: Hashable) -> CompiledStep | None:
        """The plan under ``key`` for the budget as it is; None if the step is not known. Raises BudgetTooSmall."""
        self._lookups += 1
        plan_set = self._by_key.get(key)
        if plan_set is None:
            return None
        if plan_set.hasty is not None:
            # Beside the first step the search would make that longer, for which the plan was found in haste.
            self.maker.ask(plan_set, plan_set.hasty)
            plan_set.hasty = None
        if self._grant.shared:
            self._recent.append(plan_set)
            before = self._grant.max_useful
            if self._max_useful() != before:
                self.want()
                if self._grant.max_useful > before:
                    self._wait_for_rise(plan_set)
        return self._plan_of(key, plan_set).plain

    def displaced(self, step: CompiledStep) -> None:
        """Beside ``step`` and what it has outside of its arena the arena that was there was too large. Where forwards
        do so in turn with training, all plans leave room for their results: to make arena and engine anew takes longer
        than to load some more weights."""
        in_turn = self._lookups - self._displaced < _TURNS
        self._displaced = self._lookups
        if in_turn and not step.captured.gradients:
            self.largest_outside = max(self.largest_outside, step.budget.outside)

    def fitting(self, step: CompiledStep) -> CompiledStep:
        """``step``, or where its plan takes more than the budget, the same step by another one: for a step that runs
        again from its inputs. Raises BudgetTooSmall."""
        if not self._grant.moving or step.budget.total <= self._grant.total:
            return step
        member = self._plan_of(*self._of_captured[id(getattr(step, "plain", step).captured)])
        if isinstance(step, AccumulatingStep):
            # Without a plan that adds, autograd does it.
            return next((each for each in member.more.values() if isinstance(each, AccumulatingStep)), member.plain)
        return member.plain

    def follow(self, before: int) -> None:
        """The budget was ``before`` and has changed: ask for plans that are worth making."""
        for plan_set in self.all():
            if self._grant.total > before or plan_set.fitting(self._grant.total) is not None:
                self._ask(plan_set)

    def note_kind(self, step: CompiledStep) -> None:
        """``step``, which does more than a plain one, runs: other budgets get plans of its kind too."""
        if not self._grant.moving or id(step) in self._noted or not isinstance(step, AccumulatingStep | StepWithUpdate):
            return
        self._noted.add(id(step))
        _, plan_set = self._of_captured[id(step.plain.captured)]
        key = next(key for key, each in self._plans.items() if each is step)
        kind: Kind = (key[0], *key[2:])
        plan_set.kinds.setdefault(kind, step)
        for member in plan_set.members():
            if member.plain is step.plain:
                member.more.setdefault(kind, step)
        if self._grant.shared:
            self.maker.spread(plan_set, self._grant.most)

    def want(self) -> None:
        """Tell the source the minimum of all steps, as each has to run again, and the most that recent ones use."""
        minimum = max((plan_set.minimum or 1 for plan_set in self.all()), default=1)
        self._grant.want(minimum, self._max_useful())

    def _max_useful(self) -> int:
        known = [plan_set.max_useful for plan_set in self._recent.copy() if plan_set.max_useful is not None]
        return max(known, default=self._grant.most)

    def _wait_for_rise(self, plan_set: PlanSet) -> None:
        """Once for each rise of the useful bytes: wait for it no longer than the step is slower without. At worst a
        step takes twice as long; otherwise it and its load of weights would be lost to the move behind it."""
        now, then = plan_set.fitting(self._grant.total), plan_set.fitting(self._grant.max_useful)
        if now is not None and then is not None and now.seconds > then.seconds:
            raise GrantChanged(now.seconds - then.seconds, then.plain.budget.total)

    def _plan_of(self, key: Hashable, plan_set: PlanSet) -> Member:
        try:
            member = self._member(plan_set, self._beside_others(plan_set))
        except BudgetTooSmall:
            # Alone it may fit: then the arena is made anew whenever such steps take turns.
            member = self._member(plan_set, self._grant.total)
        if len(member.more) != member.entered or plan_set.dropped:
            self._enter(key, plan_set, member)
        return member

    def _member(self, plan_set: PlanSet, total: int) -> Member:
        member = plan_set.fitting(total)
        if member is None:
            member = plan_set.make(total, _QUICK_SECONDS if self._grant.moving else None)
            if self._grant.moving:
                self._ask(plan_set)
        return member

    def _beside_others(self, plan_set: PlanSet) -> int:
        """The budget of a plan whose arena any other step may use too, with all that it has outside."""
        key = self._grant.total, self.largest_outside
        if plan_set.beside is None or plan_set.beside[0] != key:
            plan_set.beside = key, plan_set.budget(*key).total
        return plan_set.beside[1]

    def _enter(self, key: Hashable, plan_set: PlanSet, member: Member) -> None:
        """The table of plans has those of ``member``, and none that is not kept any more."""
        plans = self._plans
        assert isinstance(key, tuple)
        # First: one for the same budget may have the key of the new one.
        while plan_set.dropped:
            old = plan_set.dropped.pop()
            for each in [k for k, step in plans.items() if getattr(step, "plain", step) is old]:
                plans.pop(each).unload()
        member.entered = len(member.more)
        plans.setdefault((*key, member.plain.budget.total), member.plain)
        for kind, step in list(member.more.items()):
            plans.setdefault((kind[0], id(member.plain), *kind[1:]), step)

    def _ask(self, plan_set: PlanSet) -> None:
        total = plan_set.worth(self._grant.total)
        if total is not None:
            self.maker.ask(plan_set, total, instead=True)


class _PlanMaker:
    """A thread that makes plans for other budgets while a model trains by the plans that it has: those that are asked
    for first, then those that tell which budgets are of use. It touches no tensor and no lock of the session's. It
    starts with the first request, and ends with the maker."""

    def __init__(self, limits_found: Callable[[], None]) -> None:
        """``limits_found``, a method that is not kept alive, is called in the thread when a plan set's ``minimum`` and
        ``max_useful`` are known."""
        self._asked: dict[tuple[PlanSet, int], None] = {}
        self._spread: dict[PlanSet, int] = {}
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._limits_found = weakref.WeakMethod(limits_found)
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

    def ask(self, plan_set: PlanSet, total: int, *, instead: bool = False) -> None:
        """Ask for a plan for ``total`` bytes; ``instead``: in the place of earlier requests for ``plan_set``."""
        with self._lock:
            if instead:
                self._asked = {each: None for each in self._asked if each[0] is not plan_set}
            self._asked[plan_set, total] = None
        self._begin()

    def spread(self, plan_set: PlanSet, most: int) -> None:
        """Ask for the limits of ``plan_set``, up to ``most`` bytes, and plans between them."""
        with self._lock:
            self._spread[plan_set] = most
        self._begin()

    def stop(self) -> None:
        """Make nothing more; a plan that is being made is thrown away."""
        self._stopped = True
        self._process.stop()
        self._wake.set()

    def _begin(self) -> None:
        if self._thread is None and not self._stopped:
            maker = weakref.ref(self)
            self._thread = start_thread(_run, maker, self._wake, name="disco-plans", stop=partial(_stop, maker))
        self._wake.set()

    def work(self) -> bool:
        """Serve one request; False if there is none."""
        with self._lock:
            self._busy = not self._stopped and bool(self._asked or self._spread)
            if not self._busy:
                return False
            asked = bool(self._asked)
            if asked:
                plan_set, total = next(iter(self._asked))
                del self._asked[plan_set, total]
            else:
                plan_set, total = next(iter(self._spread.items()))
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
            limits_found = self._limits_found()
            if limits_found is not None:
                limits_found()
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


def _stop(maker: weakref.ref[_PlanMaker]) -> None:
    own = maker()
    if own is not None:
        own.stop()


def _run(maker: weakref.ref[_PlanMaker], wake: threading.Event) -> None:
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
