"""The timed planner: swaps are scheduled first, offsets follow.

A step is simulated in time with a counter of bytes (``swap_schedule``). First two steps in a row are, whose middle
shows which buffers are on the device at a step boundary; then one step from there. Several options are drafted. The
fastest drafts get offsets (``packing``); one that does not fit is drafted again with less memory. The plan that is
fastest in simulation wins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property

from disco_accel.graph.check import largest_need
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import DRAFTED, FINISHED, PLACED, REPLAYED, SOLVED, SearchWork
from disco_accel.plan.timed.draft_queue import _DraftQueue
from disco_accel.plan.timed.drafts import (
    Draft,
    DraftOptions,
    draft_of,
    permanent_at_boundary,
    permanent_buffers,
    seconds_if_all_resident,
)
from disco_accel.plan.timed.kept_gaps import Kept, kept_gaps
from disco_accel.plan.timed.less_memory import with_less_memory
from disco_accel.plan.timed.replay import live_ranges_of
from disco_accel.plan.timed.requirement_kinds import _Kind, _RequirementKinds
from disco_accel.plan.timed.requirements import may_be_split
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.plan.timed.step_buffers import Profile, StepRequirements
from disco_accel.plan.timed.swap_schedule import SwapSchedule
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.sizes import MAX_SIZE

_WASTE_TRIED_AT = 1
"""Which of the other shares is tried even where the best draft is good enough, if that reloads anything: it may take
as long and reload less."""

_KEEPS_UP = 1.003
"""A draft that takes at most so many times a step with memory for everything does not wait for the link."""

_GOOD = 1.003
"""A draft that takes at most so many times as long as a step with memory for everything is good enough."""

_ANY = 1e9
"""As ``_GOOD`` where any plan will do: with infinity a search without a draft would be good enough, and end."""

_DRAFTING_SHARE = 0.5
"""Share of the work, or of the user's time, after which no more options are drafted: drafts need offsets."""

_LEAST_CUT = 1 / 256
"""A redraft gives up at least this share of the memory, times the number of redrafts: buffers come and go as a whole,
so less may change nothing."""


def build_timed(
    graph: TaskGraph,
    machine: Machine,
    *,
    cyclic: bool,
    work: SearchWork | None = None,
    settings: TimedSettings | None = None,
    not_offloaded: Collection[int] = (),
    any_plan: bool = False,
) -> MemGraph:
    """Return the fastest plan found before ``work`` is over. Raises Infeasible if there is none by then.

    ``not_offloaded``: kernels whose outputs stay on their device. ``any_plan``: the first plan found will do.
    """
    settings = settings or TimedSettings()
    search = _DraftSearch(graph, machine, cyclic, work or SearchWork(), settings, not_offloaded, any_plan=any_plan)
    search.run()
    search.assign_offsets()
    if search.makespan > search.floor and not search.over():
        # A draft that was good enough may have lost by its offsets.
        search.floor = 0.0
        search.run()
        search.assign_offsets()
    search.run_in_ranges()
    return search.result()


def build_at_boundary(
    graph: TaskGraph,
    machine: Machine,
    boundary: Mapping[int, int],
    *,
    good: float,
    work: SearchWork,
    alone: bool = True,
) -> MemGraph:
    """Return the fastest cyclic plan found whose step begins with no inputs but those of ``boundary``, each at its
    offset, as many as fit. Not ``alone``: with any inputs, of which those of ``boundary`` are at their offsets; no
    others stay for ever. The search ends with a plan that takes ``good`` seconds or less. Raises Infeasible if there is
    none before ``work`` is over."""
    settings = replace(TimedSettings(), low_peak_order=False)
    search = _DraftSearch(graph, machine, True, work, settings, (), boundary=boundary)
    search.kinds.wished_alone = alone
    search.floor = max(search.floor, good)
    search.queue = _DraftQueue(search.floor)
    search.run()
    search.assign_offsets()
    search.run_in_ranges()
    return search.result()


def build_in_ranges(
    graph: TaskGraph, machine: Machine, share: float, *, cyclic: bool, work: SearchWork, settings: TimedSettings
) -> MemGraph:
    """Return the fastest plan found with weights in ranges of about ``share`` of the memory, though one with whole
    weights may be faster. Raises Infeasible if there is none before ``work`` is over."""
    search = _DraftSearch(graph, machine, cyclic, work, settings, ())
    search.range_bytes = int(share * max(search.draft_capacity.values()))
    search.run()
    search.assign_offsets()
    return search.result()


class DraftedGraph:
    """The drafts of one graph, and on demand the plan that the fastest becomes."""

    def __init__(self, search: _DraftSearch, host_memory: int) -> None:
        self._search = search
        fits = bool(search.drafted) and search.best_draft().offloaded <= host_memory
        self.seconds = search.fastest() if fits else float("inf")
        """Of the fastest draft, infinite if there is none, or if it offloads too much: a guess at a plan's that takes
        no offsets."""
        self.keeps_up = self.seconds <= _KEEPS_UP * search.ideal
        """Whether the draft takes little longer than a step with memory for everything."""

    def plan(self, work: SearchWork) -> MemGraph:
        """Give the fastest drafts offsets. Raises Infeasible if none fits before ``work`` is over."""
        self._search.work = work
        self._search.assign_offsets()
        return self._search.result()


def drafted(
    graph: TaskGraph,
    machine: Machine,
    *,
    cyclic: bool,
    work: SearchWork,
    settings: TimedSettings,
    not_offloaded: Collection[int] = (),
    reserve: float = 0.0,
    any_plan: bool = False,
    host_memory: int = MAX_SIZE,
) -> DraftedGraph:
    """Return the drafts of ``graph`` that ``settings`` ask for; arguments as of ``build_timed``. ``reserve``: share of
    the memory beside the largest kernel that drafts do without, and offsets may take: large values leave gaps.
    ``host_memory``: bytes for values that are offloaded."""
    search = _DraftSearch(graph, machine, cyclic, work, settings, not_offloaded, reserve, any_plan)
    search.run()
    return DraftedGraph(search, host_memory)


class _DraftSearch:
    """Drafts with different options, and the best ``plan`` with its ``makespan``."""

    def __init__(
        self,
        graph: TaskGraph,
        machine: Machine,
        cyclic: bool,
        work: SearchWork,
        settings: TimedSettings,
        not_offloaded: Collection[int],
        reserve: float = 0.0,
        any_plan: bool = False,
        boundary: Mapping[int, int] | None = None,
    ) -> None:
        self.graph = graph
        self.settings = settings
        self.work = work
        self.machine = machine
        self.cyclic = cyclic
        self.draft_capacity = {
            device.id: (device.memory - _part_of_spare(reserve, graph, device)) // device.alignment * device.alignment
            for device in graph.devices
        }
        """Bytes of ``capacity`` for drafts: all but ``reserve``, a share of the memory beside the largest kernel."""
        self.kinds = _RequirementKinds(graph, machine, not_offloaded, boundary or {})
        self.programs: dict[_Kind, Kept | None] = {}
        self.attempted: set[tuple[DraftOptions, int | None, tuple[int, ...]]] = set()
        self.drafted: list[tuple[Draft, DraftOptions]] = []
        self.range_bytes: int | None = None
        """About how many bytes the ranges have in which weights are drafted (None: they are drafted as a whole)."""
        self.floor = (_ANY if any_plan else _GOOD) * self.ideal
        self.queue = _DraftQueue(self.floor)
        self.plan: MemGraph | None = None
        self.makespan = float("inf")

    @cached_property
    def capacity(self) -> dict[int, int]:
        """Bytes by device."""
        return {device.id: device.memory // device.alignment * device.alignment for device in self.graph.devices}

    @cached_property
    def ideal(self) -> float:
        """Seconds of a step in this order if nothing ever had to leave."""
        requirements = self._requirements(None) or self._requirements(self.settings.min_gap_ratios[-1])
        return 0.0 if requirements is None else seconds_if_all_resident(requirements, self.machine, self.capacity)

    def over(self, share: float = 1.0) -> bool:
        """Whether the search has had ``share`` of its work, or of the user's time."""
        return self.work.over(len(self.graph.vertices), share)

    def result(self) -> MemGraph:
        """Return the fastest plan found. Raises Infeasible if there is none."""
        if self.plan is None:
            raise Infeasible(0)
        return self.plan

    def run(self) -> None:
        """Draft, one option after the other, each on top of the best combination so far (coordinate descent).

        Invariant: ``best`` only ever gets faster, so the order decides which plan is found. Gap ratios come first
        because the others depend on which activations are swappable. No option is tried once a draft is within the
        floor, except those that may save reloads without costing time."""
        settings = self.settings
        first_share, *other_shares = settings.resident_shares
        for ratio in settings.min_gap_ratios:
            self.attempt(DraftOptions(ratio, first_share))
        self._attempt_by_program()
        if self.drafted and settings.low_peak_order:
            self.attempt(replace(self.best(), low_peak_order=True), limited=True)
        for number, share in enumerate(other_shares):
            wasteful = number == _WASTE_TRIED_AT and bool(self.drafted) and self.best_schedule().reloaded > 0
            self.attempt(replace(self.best(), resident_share=share), limited=True, even_if_good=wasteful)
        if settings.outliers_permanent:
            self.attempt(replace(self.best(), outliers_permanent=True), limited=True)

    def _attempt_by_program(self) -> None:
        """Draft with the gaps of the step program, if the graph is large enough for it."""
        if len(self.graph.vertices) >= self.settings.program_gaps_from and self.drafted:
            self.attempt(replace(self.best(), program_gaps=True), even_if_spent=True)

    def run_in_ranges(self) -> None:
        """Draft anew with weights in ranges, of one size after the other, and give the drafts offsets.

        The plan so far stays unless one of these is faster. Ranges that have to lie side by side are harder to place: a
        search with them from the start may find no offsets."""
        memory = max(self.draft_capacity.values())
        best = self.best()
        small = len(self.graph.vertices) <= self.settings.descend_in_ranges_up_to
        for share in self.settings.range_shares if small else (self.settings.large_range_share,):
            if self.plan is None or self.makespan <= self.floor:
                return
            self.range_bytes = int(share * memory)
            if not self._in_ranges():
                continue
            # What was found with weights as a whole neither ends this search nor is what it goes on from.
            self.queue.clear()
            self.drafted = []
            self.attempt(best)
            if small:
                self.run()
            else:
                self._attempt_by_program()
            # No plan is faster than its draft.
            if self.fastest() >= self.makespan:
                continue
            self.assign_offsets()

    def _in_ranges(self) -> bool:
        """Whether any value is swapped in ranges of ``range_bytes``."""
        # Few are as large in a small step, whose requirements would be collected in vain.
        if self.range_bytes is None or not any(may_be_split(v, self.range_bytes) for v in self.graph.vertices):
            return False
        probe = self._requirements(None) or self._requirements(self.settings.min_gap_ratios[-1])
        return probe is not None and any(each.is_range for each in probe.swappable)

    def assign_offsets(self) -> None:
        """Give drafts offsets, the most promising first, until none can be faster than the best plan."""
        while self.queue and self.makespan > self.floor and not self.over():
            draft = self.queue.pop()
            # Offsets only add waits, so no plan is faster than its draft.
            if draft.schedule.seconds >= self.makespan:
                continue
            live = live_ranges_of(draft.requirements, draft.schedule, draft.permanent, draft.at_start, self.cyclic)
            self.work.add(REPLAYED, draft.requirements.end)
            rounds = self.settings.repacking_rounds
            over = live.assign_offsets(self.capacity, lowest=not draft.schedule.reloaded, rounds=rounds)
            self.work.add(PLACED, live.tried)
            if over:
                self._redraft(draft, over)
            else:
                self._keep_if_faster(live.plan(self.cyclic))

    def _keep_if_faster(self, plan: MemGraph) -> None:
        self.work.add(FINISHED, len(plan.vertices))
        makespan = simulate(plan, self.machine).makespan
        if makespan < self.makespan:
            self.plan, self.makespan = plan, makespan

    def _redraft(self, draft: Draft, over: Mapping[int, Profile]) -> None:
        """Draft once more with less memory where the packing was above it."""
        if draft.retries >= self.settings.redrafts:
            return
        part = _LEAST_CUT * (draft.retries + 1)
        requirements = with_less_memory(
            draft, over, {d: int(part * m) for d, m in self.capacity.items()}, self.capacity
        )
        if requirements is None:
            return
        kept = self._solve(requirements) if draft.kept else {}
        self._draft(requirements, draft.permanent, kept or {}, draft.retries + 1)

    def _draft(
        self, requirements: StepRequirements, permanent: tuple[int, ...], kept: Kept, retries: int = 0
    ) -> Draft | None:
        """Draft, and queue the draft unless its schedule was there before; None if it is infeasible."""
        self.work.add(DRAFTED, 3 * (requirements.end + _uses_of_ranges(requirements)))
        self.work.drafts += 1
        try:
            draft = draft_of(
                requirements,
                self.machine,
                self.draft_capacity,
                permanent,
                kept,
                cyclic=self.cyclic,
                wished_alone=self.kinds.wished_alone,
            )
        except Infeasible:
            return None
        draft = replace(draft, retries=retries)
        self.queue.add(draft)
        return draft

    def fastest(self) -> float:
        """Return the seconds of the best draft so far."""
        return self.best_schedule().seconds if self.drafted else float("inf")

    def best_draft(self) -> Draft:
        """Return the fastest draft so far, the one that reloads least of those that are good enough."""
        return min((draft for draft, _ in self.drafted), key=lambda draft: self.queue.rank(draft.schedule))

    def best_schedule(self) -> SwapSchedule:
        """Return the schedule of that draft."""
        return self.best_draft().schedule

    def best(self) -> DraftOptions:
        """Return the options of the best draft so far that goes by shares, not by the step program's gaps."""
        best = self._fastest_of(drafted for drafted in self.drafted if not drafted[1].program_gaps)
        return best[1] if best else DraftOptions(self.settings.min_gap_ratios[-1], self.settings.resident_shares[0])

    def _fastest_of(self, drafted: Iterable[tuple[Draft, DraftOptions]]) -> tuple[Draft, DraftOptions] | None:
        return min(drafted, key=lambda each: self.queue.rank(each[0].schedule), default=None)

    def attempt(
        self,
        options: DraftOptions,
        limited: bool = False,
        even_if_good: bool = False,
        even_if_spent: bool = False,
    ) -> None:
        """Draft with these options unless the search has gone on for long enough."""
        spent = self.over(_DRAFTING_SHARE) and (limited or self.drafted)
        good = self.fastest() <= self.floor and not even_if_good
        if good or (spent and not even_if_spent) or self.work.late(_DRAFTING_SHARE):
            return
        requirements = self._requirements(options.min_gap_ratio, options.low_peak_order)
        if requirements is None:
            return
        kept: Kept = {}
        if options.program_gaps:
            options = replace(options, resident_share=0.0, outliers_permanent=False)
            solved = self._kept_gaps(options)
            if solved is None:
                return
            kept = solved
        chosen = permanent_buffers(requirements, self.draft_capacity, options)
        permanent = tuple(permanent_at_boundary(requirements, chosen))
        # Which buffers are permanent is all that a share and the outliers decide.
        attempt = replace(options, resident_share=0.0, outliers_permanent=False), self.range_bytes, permanent
        if attempt in self.attempted:
            return
        self.attempted.add(attempt)
        draft = self._draft(requirements, permanent, kept)
        if draft is not None:
            self.drafted.append((draft, options))

    def _kept_gaps(self, options: DraftOptions) -> Kept | None:
        """Gaps through which the step program keeps the buffers of a draft with these options."""
        kind = options.low_peak_order, options.min_gap_ratio, self.range_bytes
        requirements = self.kinds.get(*kind)
        if kind not in self.programs and requirements is not None:
            self.programs[kind] = self._solve(requirements)
        return self.programs[kind]

    def _solve(self, requirements: StepRequirements) -> Kept | None:
        self.work.add(SOLVED, requirements.end)
        solved = kept_gaps(requirements, self.machine, max(self.draft_capacity.values()))
        return solved[1] if solved else None

    def _requirements(self, ratio: float | None, low_peak_order: bool = False) -> StepRequirements | None:
        return self.kinds.get(low_peak_order, ratio, self.range_bytes)


def _part_of_spare(share: float, graph: TaskGraph, device: Space) -> int:
    """``share`` of the memory beside the largest kernel."""
    return int(share * max(0, device.memory - largest_need(graph, device.id)[0])) if share else 0


def _uses_of_ranges(requirements: StepRequirements) -> int:
    """How often a kernel waits for a range of a value."""
    return sum(len(buffer.uses) for buffer in requirements.swappable if buffer.is_range)
