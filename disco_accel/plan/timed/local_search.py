"""Local search over what a draft of a small graph holds on to.

The simulation gives up what is used furthest ahead, whatever its size; shares make weights permanent evenly. Here
single decisions of the best drafts are changed, one after the other: whether a buffer is permanent, is on the device
when a step starts, or stays through a gap between two uses; and, where buffers lie above the memory, where the draft
leaves some free. A change stays unless the step is longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from disco_accel.plan.timed.drafts import Choice, Draft
from disco_accel.plan.timed.less_memory import Cut
from disco_accel.plan.timed.step_buffers import STEP_START, StepRequirements, SwappableBuffer

_PERMANENT, _AT_START = 0.15, 0.2
"""How often a change is of what is permanent, and of what is there at the start; else of what is kept in a gap."""

_CUT = 0.2
"""How often, where buffers lie above the memory, a change is to leave some of it free there."""

_PENALTY = 3.0
"""How much longer a step becomes, as a share of itself, by giving up all of its memory: above what it would, or the
search ends with drafts that lie a hair's breadth above it. It grows to this as work is spent."""

_MARGIN = 1.01
"""A plan may be faster than its draft by so much: a copy may start before the kernel in front of it in the draft."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What came of giving a draft offsets: ``seconds`` of its plan if it has one, ``over`` the memory if not."""

    seconds: float
    over: Cut | None
    share: float = 0.0
    """Of the memory: how much the highest buffer lies above it."""


class Drafter(Protocol):
    """What the search asks for of each draft; both count as work."""

    def redraft(self, requirements: StepRequirements, choice: Choice, reserve: float) -> Draft | None:
        """Return the draft of a choice with a share of the memory in reserve, None if there is none."""
        ...

    def packed(self, draft: Draft) -> Packing:
        """Give the draft offsets, and keep its plan if that is the fastest so far."""
        ...

    def with_less(self, draft: Draft, over: Cut, part: int) -> StepRequirements | None:
        """Return the draft's requirements less a ``part``-th of what lies over the memory."""
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """A draft with a share of the memory in ``reserve``."""

    draft: Draft
    reserve: float


@dataclass(frozen=True, slots=True)
class State:
    """A draft, and what came of giving it offsets."""

    draft: Draft
    packing: Packing
    reserve: float


class LocalSearch:
    """Changes drafts one decision at a time; what it does is a function of them alone."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._random = random.Random(0)

    def begin(self, start: Start) -> State:
        """Return where a search from a draft begins."""
        draft = start.draft
        draft = replace(draft, choice=replace(draft.choice, at_start=tuple(draft.at_start)))
        return State(draft, self._drafter.packed(draft), start.reserve)

    def cost(self, state: State, share: float = 1.0) -> float:
        """Return the seconds of the plan, or about those of one with less memory, with a ``share`` of the penalty."""
        if state.packing.over is None:
            return state.packing.seconds
        return state.draft.schedule.seconds * (1 + share * _PENALTY * state.packing.share)

    def descend(self, state: State, spent: Callable[[], float]) -> State:
        """Change the draft again and again until all is ``spent``, which is a share; return the last state."""
        while (share := spent()) < 1.0:
            changed = self._changed(state)
            if changed is None:
                continue
            requirements, choice = changed
            other = self._drafter.redraft(requirements, choice, state.reserve)
            if other is None:
                continue
            schedule, before = other.schedule, state.draft.schedule
            cost = self.cost(state, share)
            if requirements is state.draft.requirements and schedule.events == before.events:
                # The same for now, but another place to go on from.
                state = replace(state, draft=other)
            elif schedule.seconds < _MARGIN * cost:
                then = State(other, self._drafter.packed(other), state.reserve)
                state = then if self.cost(then, share) <= cost else state
        return state

    def _changed(self, state: State) -> tuple[StepRequirements, Choice] | None:
        draft, choice = state.draft, state.draft.choice
        requirements, at_start = draft.requirements, choice.at_start or ()
        kind = self._random.random()
        if state.packing.over is not None and self._random.random() < _CUT:
            less = self._drafter.with_less(draft, state.packing.over, self._random.choice((1, 2, 4)))
            return None if less is None else (less, choice)
        if not requirements.swappable:
            return None
        weights = [buffer.block**0.5 for buffer in requirements.swappable]
        (index,) = self._random.choices(range(len(weights)), weights)
        buffer = requirements.swappable[index]
        if kind < _PERMANENT + _AT_START and not buffer.may_be_resident:
            kind = 1.0
        if kind < _PERMANENT:
            without = tuple(i for i in at_start if i != index)
            return requirements, replace(choice, permanent=_toggled(choice.permanent, index), at_start=without)
        if index in choice.permanent:
            return None
        if kind < _PERMANENT + _AT_START:
            by_use = sorted(_toggled(at_start, index), key=lambda i: (requirements.swappable[i].uses[:1], i))
            return requirements, replace(choice, at_start=tuple(by_use))
        gap = self._random.choice(list(_gaps(buffer)))
        kept = dict(choice.kept)
        kept[index] = kept.get(index, frozenset()) ^ {gap}
        return requirements, replace(choice, kept={i: each for i, each in kept.items() if each})


def _toggled(indices: Sequence[int], index: int) -> tuple[int, ...]:
    rest = tuple(i for i in indices if i != index)
    return rest if len(rest) < len(indices) else (*rest, index)


def _gaps(buffer: SwappableBuffer) -> Iterator[int]:
    """Yield the positions behind which the buffer may be kept."""
    if buffer.may_be_resident:
        yield STEP_START
    if not buffer.starts_on_host:
        yield buffer.evictable_from - 1
    yield from buffer.uses
