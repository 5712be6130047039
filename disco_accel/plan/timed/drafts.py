"""One draft of a step: the buffers that are permanent, those that it begins with, and its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from disco_accel.graph.taskgraph import Ref
from disco_accel.graph.values import may_leave
from disco_accel.plan.buildmemgraph.residents import SMALL
from disco_accel.plan.timed.kept_gaps import Kept
from disco_accel.plan.timed.step_buffers import Profile, StepRequirements
from disco_accel.plan.timed.swap_schedule import SwapEvent, SwapSchedule, buffers_at_boundary, schedule_step
from disco_accel.simulate.simulator import Machine


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The options of one draft.

    ``min_gap_ratio``: an activation is swappable only if one of its idle gaps is at least this many times its two
    copies (None: none is). ``resident_share``: the share of the memory, beside pinned bytes at their peak, for buffers
    that never leave. ``outliers_permanent``: among these, unusually large values come first. ``low_peak_order``: the
    serial order with a lower live peak. ``program_gaps``: buffers stay through the gaps between their uses that
    the step program would keep them through, instead of the ``resident_share``."""

    min_gap_ratio: float | None
    resident_share: float
    outliers_permanent: bool = False
    low_peak_order: bool = False
    program_gaps: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """A ``schedule`` of ``requirements``, with buffers on the device ``at_start``.

    ``permanent``: buffers that never leave; ``kept``: those that stay between two uses; ``retries``: how often earlier
    versions of the draft found no offsets."""

    requirements: StepRequirements
    schedule: SwapSchedule
    at_start: tuple[int, ...]
    permanent: tuple[int, ...]
    kept: Kept
    retries: int = 0

    @property
    def offloaded(self) -> int:
        """Bytes of activations that come back from the host, each counted once."""
        back = {subject for event, subject in self.schedule.events if event is SwapEvent.RELOAD}
        buffers = self.requirements.swappable
        return sum(buffers[i].size for i in back if not buffers[i].starts_on_host)


def draft_of(
    requirements: StepRequirements,
    machine: Machine,
    capacity: Mapping[int, int],
    permanent: tuple[int, ...],
    kept: Kept,
    *,
    cyclic: bool,
    wished_alone: bool = False,
) -> Draft:
    """Return a draft within ``capacity`` bytes by device; a ``cyclic`` one ends with the buffers that it begins with.

    Which buffers these are shows the middle of two steps in a row. ``wished_alone``: they are those that should start
    at an offset, as many as fit, and no others. Raises Infeasible."""
    rest = dict(capacity)
    for i in permanent:
        rest[requirements.swappable[i].device] -= requirements.swappable[i].block
    if cyclic and wished_alone:
        wished = {i for i, buffer in enumerate(requirements.swappable) if buffer.at >= 0}
        at_start = _that_fit(requirements, rest, wished.difference(permanent), (0, requirements.end))
    elif cyclic:
        at_start = buffers_at_boundary(requirements, machine, rest, permanent=permanent, kept=kept)
    else:
        at_start = _first_used(requirements, rest, permanent)
    schedule = schedule_step(
        requirements,
        machine,
        rest,
        at_start=at_start,
        at_end=at_start if cyclic else (),
        permanent=permanent,
        repeats=cyclic,
        kept=kept,
    )
    return Draft(requirements, schedule, tuple(at_start), permanent, kept)


def seconds_if_all_resident(requirements: StepRequirements, machine: Machine, devices: Iterable[int]) -> float:
    """Return the seconds of a step in this order with memory for everything, where all that may be resident is."""
    plenty = dict.fromkeys(devices, 1 << 60)
    loaded = [i for i, buffer in enumerate(requirements.swappable) if buffer.may_be_resident]
    return schedule_step(requirements, machine, plenty, permanent=loaded).seconds


def permanent_buffers(
    requirements: StepRequirements, capacity: Mapping[int, int], options: DraftOptions
) -> Iterable[int]:
    """Yield the buffers that never leave, of those that may be resident: all if everything that starts on the host
    fits, else those that have to stay, small ones and a share of the others.

    The share is spread evenly over the step, by first use, so that between two permanent buffers the link has the time
    of the first for the reload that comes next."""
    buffers = requirements.swappable
    stays = {vertex.id for vertex in requirements.inputs if not may_leave(vertex)}
    for device, memory in capacity.items():
        from_host = [i for i, buffer in enumerate(buffers) if buffer.starts_on_host and buffer.device == device]
        blocks = {i: buffers[i].block for i in from_host}
        clean = [i for i in from_host if buffers[i].may_be_resident]
        room = memory - int((requirements.pinned_bytes[device] + requirements.unevictable_bytes[device]).max())
        if sum(blocks.values()) <= room:
            yield from clean
            continue
        first = [i for i in clean if buffers[i].size < SMALL]
        if sum(blocks[i] for i in first) * 4 > room:
            first = []
        first = list(dict.fromkeys([*(i for i in clean if buffers[i].ref[0] in stays), *first]))
        left = int(options.resident_share * room) - sum(blocks[i] for i in first)
        if options.outliers_permanent:
            for i in outliers(requirements, device):
                if i not in first and blocks[i] <= left:
                    first.append(i)
                    left -= blocks[i]
        yield from first
        apart = set(first)
        others: dict[Ref, list[int]] = {}
        for i in sorted((i for i in clean if i not in apart), key=lambda i: (buffers[i].uses[0], i)):
            others.setdefault(buffers[i].ref, []).append(i)
        total = sum(blocks[i] for ranges in others.values() for i in ranges)
        fraction = max(0.0, left / total) if total else 0.0
        # Error diffusion: every value earns its share, and one is taken whenever half of it has been earned.
        credit = 0.0
        rest = []
        for ranges in others.values():
            block = sum(blocks[i] for i in ranges)
            credit += fraction * block
            if credit >= block / 2 and block <= left:
                credit -= block
                left -= block
                yield from ranges
            else:
                rest.append(ranges)
        yield from _first_ranges(rest, blocks, left)


def permanent_at_boundary(requirements: StepRequirements, permanent: Iterable[int]) -> Iterable[int]:
    """Yield those of ``permanent`` that may be there when a step starts, where some buffers have an offset for that:
    these, and those that have to stay."""
    buffers = requirements.swappable
    stays = {vertex.id for vertex in requirements.inputs if not may_leave(vertex)}
    wished = any(buffer.at >= 0 for buffer in buffers)
    for i in permanent:
        if not wished or buffers[i].at >= 0 or buffers[i].ref[0] in stays:
            yield i


def _first_ranges(values: Sequence[Sequence[int]], blocks: Mapping[int, int], room: int) -> list[int]:
    """Return ranges for ``room`` bytes, of one value: a place that is not free as a whole is in the way of others."""
    for ranges in values:
        taken = []
        for i in ranges[:-1]:
            if blocks[i] > room:
                break
            room -= blocks[i]
            taken.append(i)
        if taken:
            return taken
    return []


def outliers(requirements: StepRequirements, device: int) -> list[int]:
    """Return the buffers, ranges included, of values that are more than twice as large as nine in ten of those that may
    be resident, the largest first."""
    ranges: dict[Ref, list[int]] = {}
    for i, buffer in enumerate(requirements.swappable):
        if buffer.may_be_resident and buffer.device == device:
            ranges.setdefault(buffer.ref, []).append(i)
    blocks = {ref: sum(requirements.swappable[i].block for i in each) for ref, each in ranges.items()}
    if not blocks:
        return []
    usual = sorted(blocks.values())[len(blocks) * 9 // 10]
    large = sorted((ref for ref, block in blocks.items() if block > 2 * usual), key=lambda ref: -blocks[ref])
    return [i for ref in large for i in ranges[ref]]


def spare_bytes(draft: Draft, capacity: Mapping[int, int]) -> dict[int, Profile]:
    """Return by device and position the bytes that are left beside the needs of the vertex there."""
    requirements, permanent = draft.requirements, set(draft.permanent)
    spare = {
        device: memory - requirements.pinned_bytes[device] - requirements.unevictable_bytes[device]
        for device, memory in capacity.items()
    }
    for i in permanent:
        spare[requirements.swappable[i].device] -= requirements.swappable[i].block
    for position, read in enumerate(requirements.reads):
        for i in read:
            if i not in permanent:
                spare[requirements.swappable[i].device][position] -= requirements.swappable[i].block
    return {device: np.maximum(profile, 0) for device, profile in spare.items()}


def _first_used(requirements: StepRequirements, capacity: Mapping[int, int], permanent: Sequence[int]) -> list[int]:
    """Return the buffers that may be resident, by first use, that fit beside the bytes that are live at the start."""
    never_leave = set(permanent)
    clean = (i for i, buffer in enumerate(requirements.swappable) if buffer.may_be_resident and i not in never_leave)
    return _that_fit(requirements, capacity, clean, (0,))


def _that_fit(
    requirements: StepRequirements, capacity: Mapping[int, int], buffers: Iterable[int], positions: Iterable[int]
) -> list[int]:
    """Return those of ``buffers``, by first use, that fit beside the bytes that are live at all of ``positions``."""
    pinned, unevictable = requirements.pinned_bytes, requirements.unevictable_bytes
    left = {
        device: memory - max(int(pinned[device][at] + unevictable[device][at]) for at in positions)
        for device, memory in capacity.items()
    }
    at_start = []
    for i in sorted(buffers, key=lambda i: (requirements.swappable[i].uses[0], i)):
        buffer = requirements.swappable[i]
        if buffer.block <= left[buffer.device]:
            left[buffer.device] -= buffer.block
            at_start.append(i)
    return at_start
