"""Choices by the step program that a local search goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from disco_accel.plan.timed.drafts import Choice, DraftOptions, permanent_buffers
from disco_accel.plan.timed.kept_gaps import Kept, SolvedProgram, kept_by
from disco_accel.plan.timed.step_buffers import STEP_START, StepRequirements

_LARGE = 8
"""A value of one part in so many of the memory, or more, has few places where it can lie: it is kept first."""


def program_choices(
    program: SolvedProgram, requirements: StepRequirements, capacity: Mapping[int, int]
) -> Iterator[Choice]:
    """Yield choices for ``requirements`` of one device, within ``capacity``, that keep what the program keeps: by
    parts, large values whole first, or all values whole first; and one that keeps large values alone."""
    memory = max(capacity.values())
    small = tuple(permanent_buffers(requirements, capacity, DraftOptions(None, 0.0)))
    for whole_from in (None, memory // _LARGE, 0):
        kept = kept_by(program, requirements, memory, whole_from=whole_from)
        yield Choice(small, float("inf"), kept=kept)
        if whole_from:
            sizes: dict[int, int] = {}
            for buffer in requirements.swappable:
                sizes[buffer.ref[0]] = sizes.get(buffer.ref[0], 0) + buffer.size
            large = {i: each for i, each in kept.items() if sizes[requirements.swappable[i].ref[0]] >= whole_from}
            if large:
                yield Choice(_beside(requirements, capacity, large, small), float("inf"), kept=large)


def _beside(
    requirements: StepRequirements, capacity: Mapping[int, int], kept: Kept, permanent: Sequence[int]
) -> tuple[int, ...]:
    """Return what of ``permanent`` fits at every position beside what is ``kept``; the last used come first."""
    device, memory = next(iter(capacity.items()))
    buffers = requirements.swappable
    room = memory - requirements.pinned_bytes[device] - requirements.unevictable_bytes[device]
    apart = set(permanent)
    for i, buffer in enumerate(buffers):
        for use in buffer.uses if i not in apart else ():
            room[use] -= buffer.block
    for i, positions in kept.items():
        stops = [*buffers[i].uses, requirements.end + 1]
        for last in positions - {STEP_START}:
            end = min(stop for stop in stops if stop > last)
            room[last + 1 : end] -= buffers[i].block
        if STEP_START in positions:
            room[: stops[0]] -= buffers[i].block
    left = int(room.min())
    fitting = []
    for i in reversed(permanent):
        if buffers[i].block <= left:
            left -= buffers[i].block
            fitting.append(i)
    return tuple(reversed(fitting))
