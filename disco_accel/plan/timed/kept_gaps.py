"""Swappable buffers that stay on the device between two uses, because the step program keeps them.

The program over time (``plan/bound/step_program.py``), in the serial order, says which part of each value a shortest
step keeps through each gap between two uses. A draft holds these from use to use instead of evicting the buffer with
the furthest next use. The two differ where the memory is fullest, around the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from disco_accel.graph.taskgraph import Ref
from disco_accel.plan.bound.device_facts import DeviceFacts
from disco_accel.plan.bound.ordered_starts import Precedence
from disco_accel.plan.bound.step_program import StepProgram, gaps
from disco_accel.plan.timed.step_buffers import STEP_START, StepRequirements
from disco_accel.simulate.machine import Machine

Kept = Mapping[int, frozenset[int]]
"""By swappable buffer: the positions behind which it stays on the device up to its next use, ``STEP_START`` for the
time before its first."""

_LOAD_COST = 1e-3
"""Of equally long steps the one with the fewest loads; it may be longer by a thousandth of its loads."""


def kept_gaps(requirements: StepRequirements, machine: Machine, memory: int) -> tuple[float, Kept] | None:
    """Return the seconds of a shortest step within ``memory`` bytes, and the gaps through which it keeps buffers (None:
    there are several devices, or no answer).

    Of a value in ranges the program's share is kept, from the value's begin on; a whole one is kept all or not at all.
    """
    graph = requirements.graph
    if len(graph.devices) > 1:
        return None
    facts = DeviceFacts(graph, machine, graph.devices[0].id, memory)
    for withheld in requirements.withheld_bytes.values():
        facts.needed = facts.needed + withheld[: facts.end]
    every = range(requirements.end)
    before = [[position - 1] if position else [] for position in every]
    in_order = Precedence([*before, []], [*every, requirements.end], [*requirements.seconds, 0.0])
    solved = StepProgram(facts, in_order).kept_parts(_LOAD_COST)
    if solved is None:
        return None
    seconds, parts = solved
    return seconds, _that_fit(_each_gap(requirements, facts, parts), requirements, memory)


def _that_fit(every: Iterable[_Gap], requirements: StepRequirements, memory: int) -> Kept:
    device = requirements.graph.devices[0].id
    room = memory - requirements.pinned_bytes[device] - requirements.unevictable_bytes[device]
    for buffer in requirements.swappable:
        for use in buffer.uses:
            room[use] -= buffer.block
    kept: dict[int, set[int]] = {}
    for gap in sorted(every, key=lambda gap: (-gap.part, gap.buffer, gap.begin)):
        block = requirements.swappable[gap.buffer].block
        through = room[gap.begin + 1 : gap.end], room[: gap.until]
        if gap.part > 0 and all(int(each.min(initial=block)) >= block for each in through):
            for each in through:
                each -= block
            kept.setdefault(gap.buffer, set()).add(gap.begin)
            if gap.around:
                kept[gap.buffer].add(STEP_START)
    return {i: frozenset(each) for i, each in kept.items()}


@dataclass(frozen=True, slots=True)
class _Gap:
    """The gap of a buffer behind position ``begin``, before position ``end``; one ``around`` the step's boundary goes
    on before position ``until``. ``part``: the share of its bytes that the program keeps."""

    buffer: int
    begin: int
    end: int
    part: float
    around: bool = False
    until: int = 0


def _each_gap(
    requirements: StepRequirements, facts: DeviceFacts, parts: Mapping[tuple[int, int], float]
) -> Iterator[_Gap]:
    ranges: dict[Ref, list[int]] = {}
    for i, buffer in enumerate(requirements.swappable):
        ranges.setdefault(buffer.ref, []).append(i)
    for ref, indices in ranges.items():
        value = facts.values.get(ref)
        if value is None or not value.uses:
            continue
        of_gaps = [parts.get((id(value), number), 1.0) for number, _ in enumerate(gaps(value))]
        in_all = sum(requirements.swappable[i].size for i in indices)
        for i in indices:
            buffer = requirements.swappable[i]
            # The ranges at the begin of a value are those that stay.
            shares = [min(1.0, max(0.0, (part * in_all - buffer.begin) / buffer.size)) for part in of_gaps]
            if buffer.starts_on_host:
                for begin, end, part in zip(buffer.uses, buffer.uses[1:], shares, strict=False):
                    yield _Gap(i, begin, end, part)
                if len(shares) == len(buffer.uses):
                    yield _Gap(i, buffer.uses[-1], requirements.end + 1, shares[-1], True, buffer.uses[0])
                continue
            if len(shares) < len(buffer.uses):
                continue
            # An activation may leave from ``evictable_from`` on, and readers before that are not among its uses.
            stops = [buffer.evictable_from - 1, *buffer.uses]
            for begin, end, part in zip(stops[:-1], buffer.uses, shares[len(shares) - len(buffer.uses) :], strict=True):
                yield _Gap(i, begin, end, part)


def in_two_steps(kept: Kept, end: int) -> Kept:
    """Return ``kept`` for a step of ``end`` positions twice in a row, which begins with nothing on the device."""
    return {i: frozenset(p + shift for p in each if p != STEP_START for shift in (0, end)) for i, each in kept.items()}
