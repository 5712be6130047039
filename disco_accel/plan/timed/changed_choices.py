"""The drafts of a small graph that a local search goes on from, and what it may cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import DRAFTED, PLACED, REPLAYED, SOLVED, Work
from disco_accel.plan.timed.choice_starts import program_choices
from disco_accel.plan.timed.drafts import Choice, Draft, draft_of
from disco_accel.plan.timed.kept_gaps import SolvedProgram, solved_program
from disco_accel.plan.timed.less_memory import Cut, cuts_of, with_less_memory
from disco_accel.plan.timed.local_search import LocalSearch, Packing, Start, State
from disco_accel.plan.timed.replay import live_ranges_of
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.plan.timed.step_buffers import StepRequirements
from disco_accel.simulate.machine import Machine

_LEAST_WORK = 0.1
"""Seconds of work that count as spent by the search, at least."""

_TO_BEGIN = 0.4
"""Share of the work that finds out where to begin."""

_PLACED = PLACED / 3
"""Seconds for an offset among few buffers."""

_ROUNDS = 20
"""Rounds of a packing, of which there are many here."""


@dataclass
class ChoiceDrafter:
    """Drafts of ``graph``, packed. ``keep``: takes a plan and its draft, and returns the plan's seconds."""

    graph: TaskGraph
    machine: Machine
    cyclic: bool
    settings: TimedSettings
    work: Work
    keep: Callable[[MemGraph, Draft], float]
    solved: dict[int, SolvedProgram | None] = field(default_factory=dict)
    """By the ``id`` of a graph in some order: the step program there."""

    @cached_property
    def capacity(self) -> dict[int, int]:
        """Bytes by device."""
        return self.less(0.0)

    def less(self, reserve: float) -> dict[int, int]:
        """Return the bytes by device less a share of them."""
        return {
            device.id: int((1 - reserve) * device.memory) // device.alignment * device.alignment
            for device in self.graph.devices
        }

    def redraft(self, requirements: StepRequirements, choice: Choice, reserve: float) -> Draft | None:
        """See ``Drafter``."""
        steps = 1 if choice.at_start is not None else 3
        uses = sum(len(buffer.uses) for buffer in requirements.swappable if buffer.is_range)
        self.work.add(DRAFTED, steps * (requirements.end + uses))
        self.work.drafts += 1
        try:
            return draft_of(requirements, self.machine, self.less(reserve), choice, self.cyclic)
        except Infeasible:
            return None

    def packed(self, draft: Draft) -> Packing:
        """See ``Drafter``."""
        live = live_ranges_of(
            draft.requirements, draft.schedule, draft.choice.permanent, draft.at_start, self.cyclic, ends_early=True
        )
        live.repacking_rounds = min(_ROUNDS, self.settings.repacking_rounds)
        self.work.add(REPLAYED, draft.requirements.end)
        over = live.assign_offsets(self.capacity, lowest=False)
        self.work.add(_PLACED, live.tried)
        if not over:
            return Packing(self.keep(live.plan(self.cyclic), draft), None)
        share = max(int(profile.max()) / self.capacity[device] for device, profile in over.items())
        return Packing(float("inf"), over, share)

    def with_less(self, draft: Draft, over: Cut, part: int) -> StepRequirements | None:
        """See ``Drafter``."""
        cut = {device: profile // part for device, profile in over.items()}
        least = {device: memory // self.settings.least_cut for device, memory in self.capacity.items()}
        return with_less_memory(draft, cuts_of(cut, least)[0], self.capacity)

    def choices(self, requirements: StepRequirements, reserve: float) -> list[Choice]:
        """Return the choices by the step program; none where it has no answer."""
        order = id(requirements.graph)
        if order not in self.solved:
            self.work.add(SOLVED, requirements.end)
            self.solved[order] = solved_program(requirements, self.machine, max(self.capacity.values()))
        program = self.solved[order]
        return [] if program is None else list(program_choices(program, requirements, self.less(reserve)))


def change_choices(
    drafter: ChoiceDrafter, drafts: Iterable[Draft], kinds: Sequence[StepRequirements], spent: float
) -> None:
    """Change the choices of the best drafts: of the given ones, and of those of ``kinds`` of requirements that keep
    what the step program keeps. All of it costs about ``work_in_changes`` times the work that the search has ``spent``,
    or what it was allowed if that is less."""
    settings, work = drafter.settings, drafter.work
    began = work.spent
    budget = settings.work_in_changes * min(max(spent, _LEAST_WORK), work.allowed(len(drafter.graph.vertices)))
    if budget <= 0 or work.late():
        return
    search = LocalSearch(drafter)
    starts = _starts(drafter, drafts, kinds, began + budget * _TO_BEGIN)
    begins: list[State] = []
    for start in starts:
        if begins and (work.spent > began + budget * _TO_BEGIN or work.late()):
            break
        begins.append(search.begin(start))
    begins.sort(key=search.cost)
    for left, state in zip(range(settings.choices_changed, 0, -1), begins, strict=False):
        now = work.spent
        part = max(0.0, began + budget - now) / left
        search.descend(state, partial(_spent, work, now, part))


def _spent(work: Work, since: float, part: float) -> float:
    return 1.0 if work.late() or part <= 0 else (work.spent - since) / part


def _starts(
    drafter: ChoiceDrafter, drafts: Iterable[Draft], kinds: Sequence[StepRequirements], stop: float
) -> Iterator[Start]:
    """Yield the fastest drafts, each also with some memory in reserve, up to where the work is at ``stop``."""
    given = list(drafts)
    yield from (Start(draft, 0.0) for draft in given)
    numbered = [_NumberedDraft(draft, None) for draft in given]
    by_kind: list[tuple[float, int]] = []
    for number, requirements in enumerate(kinds):
        made = _drafts_by_program(drafter, requirements, slice(0, 1), stop)
        by_kind += [(each.draft.schedule.seconds, number) for each in made]
        numbered += made
    for _, number in sorted(by_kind)[: drafter.settings.choices_changed]:
        numbered += _drafts_by_program(drafter, kinds[number], slice(1, None), stop)
    numbered.sort(key=lambda each: each.draft.schedule.seconds)
    seen: set[tuple[float, int]] = set()
    for each in numbered:
        draft = each.draft
        if (draft.schedule.seconds, draft.schedule.reloaded) in seen:
            continue
        seen.add((draft.schedule.seconds, draft.schedule.reloaded))
        if each.number is not None:
            yield Start(draft, 0.0)
        for reserve in drafter.settings.reserves_changed:
            choices = [draft.choice]
            if each.number is not None:
                choices = drafter.choices(draft.requirements, reserve)[each.number : each.number + 1]
            for choice in choices:
                with_reserve = drafter.redraft(draft.requirements, choice, reserve)
                if with_reserve is not None:
                    yield Start(with_reserve, reserve)


@dataclass(frozen=True, slots=True)
class _NumberedDraft:
    """A draft, and the number of its choice among those by the step program, if it is one of them."""

    draft: Draft
    number: int | None


def _drafts_by_program(
    drafter: ChoiceDrafter, requirements: StepRequirements, which: slice, stop: float
) -> list[_NumberedDraft]:
    numbered = []
    for number, choice in list(enumerate(drafter.choices(requirements, 0.0)))[which]:
        if drafter.work.spent > stop or drafter.work.late():
            break
        draft = drafter.redraft(requirements, choice, 0.0)
        if draft is not None:
            numbered.append(_NumberedDraft(draft, number))
    return numbered
