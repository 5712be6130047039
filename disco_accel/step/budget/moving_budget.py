"""The memory budget of one prepared model, which may move between its steps, and the plans that follow it.

Within a step nothing moves. At the beginning of each the grant is looked at: a smaller one gives the arena back before
the step chooses a plan that fits; a larger one changes nothing until a plan for it is there and worth its switch.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, Protocol

from disco_accel.errors import BudgetTooSmall
from disco_accel.sizes import format_size
from disco_accel.step.budget.budget_history import BudgetHistory
from disco_accel.step.budget.grant_source import GivenBudget, GrantRising, GrantSource, GrantWithdrawn
from disco_accel.step.budget.grant_watch import POLL_SECONDS, leave, start_watch
from disco_accel.step.budget.plan_maker import PlanMaker
from disco_accel.step.budget.plan_set import Kind, Member, PlanFamily
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.gradients.accumulating_step import AccumulatingStep
from disco_accel.step.update.updated_step import StepWithUpdate

logger = logging.getLogger("disco_accel")

RECENT_STEPS = 4
"""A job wishes for no more memory than its last so many steps could use. Batches of two lengths in turn should not
move it, and a job whose need has ended should not keep others waiting."""

QUICK_SECONDS = 1.0
"""Of a search that a step waits for. The thorough one follows beside the steps."""

SHORT_POLL_SECONDS = 0.002
"""The same where less than a step is waited for."""

PATIENCE_SECONDS = 600.0
"""How long a step waits for a grant that is large enough, before it is an error."""


class Memory(Protocol):
    """The part of a session that holds the plans' memory."""

    lock: threading.RLock

    @property
    def plans(self) -> MutableMapping[Any, CompiledStep]:
        """All that there are, by all that they depend on."""
        ...

    def unload(self) -> None:
        """Free every executor and the arena."""

    def runs(self) -> bool:
        """Whether a step is between its forward and its backward, or in one of them."""
        ...


class MovingBudget:
    """``total``: bytes that plans may take now. ``moving``: whether anything but the config has a say in it."""

    def __init__(self, memory: Memory, source: GrantSource, most: int, host_memory: int) -> None:
        """``most``: bytes of the device that one job may ever want. ``host_memory``: for training on the host."""
        self._memory, self._process = weakref.proxy(memory), os.getpid()
        self.source, self.most, self._host_memory = source, most, host_memory
        self.shared = not isinstance(source, GivenBudget)
        self.moving = self.shared
        self.held = self.moves = 0
        self.last_move_seconds = 0.0
        self.patience = PATIENCE_SECONDS
        self._outside, self._target, self._least, self._wish = 0, 0, 1, most
        self.largest_outside = 0
        """Bytes outside the arena, of the step that has most there."""
        self._families: dict[Hashable, PlanFamily] = {}
        self._of_recipe: dict[int, tuple[Hashable, PlanFamily]] = {}
        self._recent: deque[PlanFamily] = deque(maxlen=RECENT_STEPS)
        self._noted: set[int] = set()
        self.history = BudgetHistory()
        self._told_to_wait = False
        self.maker = PlanMaker(_unless_gone(self, MovingBudget._want))
        if self.shared:
            source.want(1, most)
        self.total = source.granted()
        if self.shared:
            self._note()
            self._stop = start_watch(self, source)

    def unchanged(self) -> bool:
        """Whether the budget is as the last step had it."""
        return self.source.granted() == self.total

    def set(self, nbytes: int) -> None:
        """A budget of the user's, from the next step on."""
        assert isinstance(self.source, GivenBudget)
        self.moving = True
        self.source.nbytes = nbytes

    def follow(self) -> None:
        """Go by the grant as it is now. Between steps, under the session's lock."""
        granted = self.source.granted()
        if granted == self.total:
            return
        before, self.total = self.total, granted
        if granted < self.held:
            self._come_down()
        for family in self._families.values():
            if granted > before or family.fitting(granted) is not None:
                self._ask(family)
        self._note()

    def step_ended(self) -> None:
        """Give memory back that is not granted any more. Under the session's lock."""
        if self.source.granted() < self.held:
            self.follow()

    def _come_down(self) -> None:
        began = time.perf_counter()
        self._memory.unload()
        self._hold(self._outside)
        self.moves += 1
        self.last_move_seconds = time.perf_counter() - began

    def claim(self, outside: int, arena: int) -> None:
        """``outside`` and ``arena`` bytes are about to be used. Raises GrantWithdrawn."""
        before, now = self.held, outside + arena
        if now == before:
            return
        self._hold(now)
        if self.moving and self.source.granted() < now:
            self._hold(min(before, now))
            raise GrantWithdrawn
        self._outside = outside
        self._note()

    def claim_all(self) -> None:
        """All that is granted may be used, by what is measured for a plan. Raises GrantWithdrawn."""
        if self.shared:
            self.claim(self._outside, max(0, self.total - self._outside))

    def give_back(self) -> None:
        """What was claimed for a plan is not used: there is none."""
        if self.shared:
            self._hold(self._outside)

    def _hold(self, nbytes: int) -> None:
        self.held = nbytes
        self.source.hold(nbytes)

    # Plans

    def keep(self, key: Hashable, step: CompiledStep, *, found_again: bool) -> None:
        """``step`` is the first plan under ``key``, by which it is ``found_again``."""
        family = PlanFamily(step, self._host_memory)
        self.largest_outside = max(self.largest_outside, step.budget.outside)
        self._of_recipe[id(step.recipe)] = key, family
        if found_again:
            self._families[key] = family
            if self.shared:
                self.maker.spread(family, self.most)

    def plan(self, key: Hashable) -> CompiledStep | None:
        """The plan under ``key`` for the budget as it is; None if the step is not known. Raises BudgetTooSmall."""
        family = self._families.get(key)
        if family is None:
            return None
        if self.shared:
            self._recent.append(family)
            before = self._wish
            if self._wish_now() != before:
                self._want()
                if self._wish > before:
                    self._let_it_rise(family)
        return self._plan_of(key, family).plain

    def fitting(self, step: CompiledStep) -> CompiledStep:
        """``step``, or where its plan takes more than the budget, the same step by another one: for a step that runs
        again from its inputs. Raises BudgetTooSmall."""
        if not self.moving or step.budget.total <= self.total:
            return step
        member = self._plan_of(*self._of_recipe[id(step.recipe)])
        if isinstance(step, AccumulatingStep):
            # Without a plan that adds, autograd does it.
            of_kind = (member.more[kind] for kind, sample in _kinds(member) if isinstance(sample, AccumulatingStep))
            return next(of_kind, member.plain)
        return member.plain

    def _let_it_rise(self, family: PlanFamily) -> None:
        """Once for each rise of the wish: wait for it no longer than the step is slower without. At worst a step takes
        twice as long; otherwise it and its load of weights would be thrown away by the move behind it."""
        now, then = family.fitting(self.total), family.fitting(self._wish)
        if now is not None and then is not None and now.seconds > then.seconds:
            self._target = then.plain.budget.total
            raise GrantRising(now.seconds - then.seconds)

    def wait_to_rise(self, seconds: float) -> None:
        """Until as much is granted as the step that begins can use, at most so long."""
        until = time.monotonic() + seconds
        while self.source.granted() < self._target and time.monotonic() < until:
            time.sleep(min(SHORT_POLL_SECONDS, seconds))

    def families(self) -> list[PlanFamily]:
        """Of all steps that are found again by their keys."""
        return list(self._families.values())

    def _plan_of(self, key: Hashable, family: PlanFamily) -> Member:
        try:
            member = self._member(family, self._beside_others(family))
        except BudgetTooSmall:
            # Alone it may fit: then the arena is made anew whenever such steps take turns.
            member = self._member(family, self.total)
        if len(member.more) != member.entered or family.dropped:
            self._enter(key, family, member)
        return member

    def _member(self, family: PlanFamily, total: int) -> Member:
        member = family.fitting(total)
        if member is None:
            member = family.make(total, QUICK_SECONDS if self.moving else None)
            if self.moving:
                self._ask(family)
        return member

    def _beside_others(self, family: PlanFamily) -> int:
        """The budget of a plan of ``family`` whose arena any other step may use too, with all that it has outside."""
        key = self.total, self.largest_outside
        if family.beside is None or family.beside[0] != key:
            family.beside = key, family.recipe.budget(*key).total
        return family.beside[1]

    def _enter(self, key: Hashable, family: PlanFamily, member: Member) -> None:
        """The table of plans has those of ``member``, and none that is not kept any more."""
        plans = self._memory.plans
        assert isinstance(key, tuple)
        # First: one for the same budget may have the key of the new one.
        while family.dropped:
            old = family.dropped.pop()
            for each in [k for k, step in plans.items() if getattr(step, "plain", step) is old]:
                plans.pop(each).unload()
        member.entered = len(member.more)
        plans.setdefault((*key, member.plain.budget.total), member.plain)
        for kind, step in list(member.more.items()):
            plans.setdefault((kind[0], id(member.plain), *kind[1:]), step)

    def note_kind(self, step: CompiledStep) -> None:
        """``step``, which does more than a plain one, runs: other budgets get plans of its kind too."""
        if not self.moving or id(step) in self._noted or not isinstance(step, AccumulatingStep | StepWithUpdate):
            return
        self._noted.add(id(step))
        _, family = self._of_recipe[id(step.recipe)]
        key = next(key for key, each in self._memory.plans.items() if each is step)
        kind: Kind = (key[0], *key[2:])
        family.kinds.setdefault(kind, step)
        for member in family.members():
            if member.plain is step.plain:
                member.more.setdefault(kind, step)
        if self.shared:
            self.maker.spread(family, self.most)

    def _ask(self, family: PlanFamily) -> None:
        total = family.worth(self.total)
        if total is not None:
            self.maker.ask(family, total)

    def _want(self) -> None:
        """Tell the source what all families need, as each of them has to run again, and what recent ones can use."""
        least = max((family.least or 1 for family in self.families()), default=1)
        self._least, self._wish = max(self._least, least), self._wish_now()
        if self.shared:
            self.source.want(self._least, max(self._wish, self._least))

    def _wish_now(self) -> int:
        known = [family.wish for family in self._recent.copy() if family.wish is not None]
        return max(known, default=self.most)

    def wait_for(self, error: BudgetTooSmall) -> bool:
        """Wait until so much is granted as ``error`` asks for; False where nobody would grant it, or not in time. Not
        under the session's lock, between steps."""
        if not self.may_wait(error):
            return False
        with self._memory.lock:
            if self.held > self._outside:
                self._come_down()
        self._least = max(self._least, error.needed)
        self._want()
        until = time.monotonic() + self.patience
        while self.source.granted() < error.needed:
            if not self._told_to_wait:
                self._told_to_wait = True
                logger.warning(
                    "memory_budget: shared: this step needs %s, %s are granted: waiting for other jobs to give memory "
                    "back, for up to %.0f s",
                    format_size(error.needed),
                    format_size(self.source.granted()),
                    self.patience,
                )
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def may_wait(self, error: BudgetTooSmall) -> bool:
        """Whether as much as ``error`` asks for may be granted later."""
        return self.shared and error.needed <= self.most

    def shrink_if_idle(self) -> None:
        """Give memory back that is not granted any more, if no step is under way. From any thread."""
        memory = self._memory
        if self.source.granted() >= self.held or not memory.lock.acquire(blocking=False):
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
        self.maker.stop()
        if self.shared:
            self._stop.set()
            self.held = 0
            leave(self.source)

    def _note(self) -> None:
        self.history.note(self.total, self.held)

    def stats(self) -> dict[str, Any]:
        """Bytes granted and held, how often memory was given back, how long that took the last time, budgets that have
        plans, and the history: seconds since ``prepare``, bytes granted, bytes held."""
        if not self.moving:
            return {}
        return {
            "granted_bytes": self.source.granted(),
            "held_bytes": self.held,
            "budget_moves": self.moves,
            "last_move_seconds": self.last_move_seconds,
            "budget_plans": sorted({total for family in self.families() for total in family.totals()}),
            "budget_history": self.history.entries(),
        }


def _kinds(member: Member) -> list[tuple[Kind, CompiledStep]]:
    return list(member.more.items())


def _unless_gone(owner: MovingBudget, method: Callable[[MovingBudget], None]) -> Callable[[], None]:
    reference = weakref.ref(owner)

    def call() -> None:
        own = reference()
        if own is not None:
            method(own)

    return call
