"""The plans of one captured step for several budgets: which of them to run, and which are worth making."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from disco_accel.errors import BudgetTooSmall
from disco_accel.execute.executor import arena_bytes
from disco_accel.graph.taskgraph import OpCall
from disco_accel.measure.fused_kernels import Fusing
from disco_accel.plan import Machine
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.simulate.simulator import simulate
from disco_accel.step.compile.budget_parts import Budget, bytes_on_host, require_host_memory
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.pipeline import PlannerSettings, plan_if_it_fits
from disco_accel.step.gradients.accumulating_step import AccumulatingStep
from disco_accel.step.update.updated_step import StepWithUpdate, home_by_gate

MOST = 8
"""Plans of one step that are kept. A tiny Llama between its minimum and all of its memory has no more than five whose
times differ by ``_APART``."""

_AS_FAST = 1.005
"""Of plans that take at most so many times the seconds of the fastest, the one for least memory runs."""

_APART = 1.05
"""A budget between two others gets a plan of its own where their plans differ by more than this in simulated time."""

_NARROW = 0.05
"""No plan is made for a budget that is nearer to its neighbours than this part of the largest."""

Kind = tuple[Hashable, ...]
"""The work of a step beside the plain one: its key in the table of plans without the plain step's identity."""

MoreThanPlain = AccumulatingStep | StepWithUpdate


@dataclass
class Member:
    """``plain``: the step's plan for one budget, of ``seconds`` in simulated time; ``more``: plans in the same arena
    that also add up gradients, or update weights."""

    plain: CompiledStep
    seconds: float
    more: dict[Kind, MoreThanPlain] = field(default_factory=dict)
    without: set[Kind] = field(default_factory=set)
    """Kinds that were tried."""
    entered: int = -1
    """How many of ``more`` the session's table of plans has."""


class PlanSet:
    """All that is known of one captured step's plans. ``minimum``: bytes of the smallest budget with a plan;
    ``max_useful``: of the smallest with which it is fastest; None where not known. One thread adds while another
    chooses."""

    def __init__(self, first: CompiledStep, host_memory: int) -> None:
        """``first``: the plan that was made at capture. ``host_memory``: bytes that training may take on the host."""
        self.outside = first.budget.outside
        """Bytes that the step has on the device outside of its arena."""
        self.beside: tuple[tuple[int, int], int] | None = None
        """The budget of a plan that shares its arena, for a whole budget and bytes outside of others' arenas."""
        self.minimum: int | None = None
        self.max_useful: int | None = None
        self.kinds: dict[Kind, MoreThanPlain] = {}
        """One step of each kind that was run."""
        self.dropped: list[CompiledStep] = []
        """Plain steps that are not kept any more."""
        self.runs: dict[str, OpCall] = {}
        """Of its plans' graphs, whose kernels are being compiled."""
        self.hasty: int | None = None
        """The budget that a longer search is to be made for."""
        self.settled: set[int] = set()
        """Budgets that a thorough search has been through."""
        self._host_memory, self._first, self._lock = host_memory, first, threading.Lock()
        self._members: dict[int, Member] = {}
        self._chosen: tuple[int, Member] | None = None
        self.add(first)
        self.settled.add(first.budget.total)

    def runs_to_compile(self) -> dict[str, OpCall]:
        """The runs of the plans whose kernels nobody has measured, as of ``Fusing.unknown``."""
        found: dict[str, OpCall] = {}
        if self.fusing is not None:
            for member in self.members():
                found |= self.fusing.unknown(member.plain.graph)
        return found

    @property
    def fusing(self) -> Fusing | None:
        """Kernels that its plans may use."""
        return self._first.settings.fusing

    def fitting(self, total: int) -> Member | None:
        """The plan to run within ``total`` bytes: the fastest, or one as fast that takes less. None: none fits."""
        chosen = self._chosen
        if chosen is not None and chosen[0] == total:
            return chosen[1]
        with self._lock:
            fit = [self._members[each] for each in sorted(self._members) if each <= total]
            if not fit:
                return None
            enough = _AS_FAST * min(member.seconds for member in fit)
            best = next(member for member in fit if member.seconds <= enough)
            self._chosen = total, best
            return best

    def add(self, plain: CompiledStep) -> Member:
        """Keep ``plain``, unless one for the same budget is as fast; returns the one that is kept."""
        took = simulate(plain.plan, self._first.settings.machine or Machine()).makespan
        total = plain.budget.total
        with self._lock:
            before = self._members.get(total)
            if before is not None and before.seconds <= took:
                return before
            if before is not None:
                self.dropped.append(before.plain)
            self._members[total] = member = Member(plain, took)
            used = self._chosen
            self._chosen = None
            keep = {min(self._members), max(self._members), total, used[1].plain.budget.total if used else total}
            for other in [each for each in self._members if each not in keep][: max(0, len(self._members) - MOST)]:
                self.dropped.append(self._members.pop(other).plain)
                self.settled.discard(other)
        return member

    def totals(self) -> list[int]:
        """Budgets that have a plan, in order."""
        with self._lock:
            return sorted(self._members)

    def members(self) -> list[Member]:
        """The plans, by budget."""
        with self._lock:
            return [self._members[total] for total in sorted(self._members)]

    def make(self, total: int, seconds: float | None = None, elsewhere: PlanningProcess | None = None) -> Member:
        """Plan the step for ``total`` bytes and keep it. ``seconds``: of a search that a step waits for, which gives
        the other kinds their plans too; ``elsewhere``: the process of a search that no step waits for.

        Raises:
            BudgetTooSmall: with ``needed`` and ``given`` as whole budgets.
            ConfigError: host memory is too small for the values that are offloaded then.
        """
        if self.minimum is not None and total < self.minimum:
            raise BudgetTooSmall(self.minimum, total, "memory_budget: the step")
        try:
            planned = self._planned(total, seconds=seconds, elsewhere=elsewhere)
        except BudgetTooSmall as error:
            self.minimum = error.needed
            raise
        first = self._first
        offloaded, rounded = bytes_on_host(planned.plan), first.settings.rounded
        require_host_memory(self._host_memory, planned.graph, offloaded, rounded, first.captured.copies)
        if seconds is None:
            self.settled.add(total)
        member = self.add(planned)
        if seconds is not None:
            for kind in list(self.kinds):
                self.make_more(member, kind, seconds)
        return member

    def make_more(
        self, member: Member, kind: Kind, seconds: float | None = None, elsewhere: PlanningProcess | None = None
    ) -> None:
        """Plan a step of ``kind`` in the arena of ``member``, if there is one."""
        sample, plain = self.kinds[kind], member.plain
        # A plan with updates may be made for a part of the arena.
        budget = plain.budget.with_arena(plain.budget.arena * _arena(sample) // _arena(sample.plain))
        settings = replace(self._settings(seconds), boundary=plain.settings_beside.boundary)
        planned = plan_if_it_fits(sample.captured, budget, settings, elsewhere)
        if planned is None or plain.host_bytes(planned.plan) > self._host_memory:
            return
        if not isinstance(sample, StepWithUpdate) or home_by_gate(planned.plan):
            member.more[kind] = sample.with_plan(planned, plain=plain, budget=plain.budget, clean=plain.clean)

    def measure(self) -> None:
        """Before a thread beside the steps plans: measure what it may have to know."""
        if self._first.rows is not None:
            self._first.rows.measure()

    def find_limits(self, most: int, elsewhere: PlanningProcess) -> None:
        """Find ``minimum`` and ``max_useful``, of at most ``most`` bytes, and plans for both. Searches for seconds."""
        if self.minimum is None:
            try:
                self._planned(1, elsewhere=elsewhere)
            except BudgetTooSmall as error:
                self.minimum = error.needed
        if self.minimum is not None and self.minimum not in self.settled:
            self.make(self.minimum, elsewhere=elsewhere)
        graph = self._first.captured.graph
        align = max(device.alignment for device in graph.devices)
        everything = sum(-(-size // align) * align for vertex in graph.vertices for size in vertex.sizes)
        budget = self.budget(most)
        plan = self._planned(min(most, budget.total_for(everything)), elsewhere=elsewhere).plan
        used = max(arena_bytes(plan, device.id) for device in plan.devices if not device.is_host_device)
        self.max_useful = min(most, budget.total_for(used))
        if self.max_useful not in self.settled:
            self.make(self.max_useful, elsewhere=elsewhere)

    def budget(self, total: int, others: int = 0) -> Budget:
        """The parts of ``total`` bytes, with ``others`` as of ``Budget``."""
        return self._first.budget.within(total, others)

    def _planned(
        self, total: int, *, seconds: float | None = None, elsewhere: PlanningProcess | None = None
    ) -> CompiledStep:
        """The step by a plan within ``total`` bytes, found within ``seconds`` if they are given. Raises as
        ``planned_within``."""
        if elsewhere is None:
            self.measure()
        return self._first.planned_within(total, self._settings(seconds), elsewhere)

    def _settings(self, seconds: float | None) -> PlannerSettings:
        """Those of a search of at most ``seconds``, if they are given."""
        settings = self._first.settings
        if seconds is None:
            return settings
        limit = settings.plan_seconds
        return replace(settings, plan_seconds=seconds if limit is None else min(seconds, limit))

    def next_total(self) -> int | None:
        """The budget between ``minimum`` and ``max_useful`` whose plan tells most; None: none is worth making."""
        members = self.members()
        if len(members) >= MOST or self.max_useful is None:
            return None
        best: tuple[float, int] | None = None
        for low, high in pairwise(members):
            below, above = low.plain.budget.total, high.plain.budget.total
            middle = (below + above) // 2
            gain = low.seconds / max(high.seconds, 1e-12)
            wide = above - below > 2 * _NARROW * self.max_useful and middle not in self.settled
            if wide and gain > _APART and (best is None or gain > best[0]):
                best = gain, middle
        return None if best is None else best[1]

    def worth(self, total: int) -> int | None:
        """The budget, at most ``total``, that should have a plan beside those that are kept; None: none."""
        total = total if self.max_useful is None else min(total, self.max_useful)
        if total in self.settled or (self.minimum is not None and total < self.minimum):
            return None
        low = [m for m in self.members() if m.plain.budget.total <= total]
        high = [m for m in self.members() if m.plain.budget.total > total]
        if not low or low[-1].plain.budget.total not in self.settled:
            return total
        near = total - low[-1].plain.budget.total <= _NARROW * total / 2
        as_fast = bool(high) and min(m.seconds for m in low) <= _AS_FAST * min(m.seconds for m in high)
        return None if near or as_fast else total


def _arena(step: CompiledStep) -> int:
    return next(device.memory for device in step.graph.devices if not device.is_host_device)
