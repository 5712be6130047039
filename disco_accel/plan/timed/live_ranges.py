"""Live ranges of a scheduled step: which bytes are taken from when to when, and at which offsets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from disco_accel.graph.copies import swaps_in
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.taskgraph import Ref, Vertex
from disco_accel.plan.common.assemble import assemble
from disco_accel.plan.common.device_copy import PlannedVertex
from disco_accel.plan.common.plan_log import PlanLog
from disco_accel.plan.timed.packing import LiveBuffer, LivePart, pack
from disco_accel.plan.timed.step_buffers import Profile, StepRequirements


@dataclass(slots=True, eq=False)
class LiveRange:
    """``block`` bytes of ``device`` from tick ``begin`` up to tick ``end`` for one value or a chain of them.

    ``values`` are named as in the plan, each with the ids of its readers; a tick is a place in the order of events, and
    0 the start. ``is_reload``: whether a reload takes the bytes. ``at_step_start``: the live range with which the step
    begins, if this one has to end it at the same offset. ``begin_in_value``: of a range of a value; ``joined``: another
    range that has its place relative to this one's, since a kernel reads both. ``at``: the offset that it has before
    the others get theirs (-1: none).
    """

    device: int
    block: int
    begin: int
    end: int
    values: list[tuple[Ref, list[int]]] = field(default_factory=list)
    offset: int = -1
    is_reload: bool = False
    at_step_start: LiveRange | None = None
    begin_in_value: int = 0
    joined: LiveRange | None = None
    at: int = -1

    def anchor(self) -> LiveRange:
        """Return the one that stands for all ranges which are joined with this one."""
        anchor = self
        while anchor.joined is not None:
            anchor = anchor.joined
        if self is not anchor:
            self.joined = anchor
        return anchor

    def join(self, other: LiveRange) -> None:
        """Have the two lie in memory as they lie in their value."""
        mine, theirs = self.anchor(), other.anchor()
        if mine is not theirs:
            theirs.joined = mine

    @property
    def last_users(self) -> list[int]:
        """Ids of the vertices that must finish before the bytes are written again; none if the bytes were never used
        in this step."""
        ref, readers = self.values[-1]
        return readers or ([] if self.begin == 0 and len(self.values) == 1 else [ref[0]])


@dataclass
class LiveRanges:
    """All live ranges of a scheduled step.

    ``planned``: the vertices but for inputs, in order. ``all``: every live range by begin. ``by_value``: the live range
    of each value, as it is named in the plan. ``positions``: by tick, the next vertex of the serial order. ``ticks``:
    the tick of each of ``planned``. ``end``: the tick behind the last. ``waits_at_home``: by offload of a value that
    changes over steps, the ids of the users of the version before. ``resident_ranges``: inputs that the plan adds for
    ranges that are there when the step starts. ``merged``: reload that is part of an earlier one → that one. ``tried``:
    how many offsets were looked for."""

    requirements: StepRequirements
    positions: list[int]
    end: int
    planned: list[Vertex] = field(default_factory=list)
    all: list[LiveRange] = field(default_factory=list)
    by_value: dict[Ref, LiveRange] = field(default_factory=dict)
    ticks: list[int] = field(default_factory=list)
    waits_at_home: dict[int, list[int]] = field(default_factory=dict)
    resident_ranges: list[Vertex] = field(default_factory=list)
    merged: Mapping[int, int] = field(default_factory=dict)
    tried: int = 0

    def assign_offsets(self, capacity: Mapping[int, int], *, lowest: bool, rounds: int) -> dict[int, Profile]:
        """Give every live range an offset; return by device and position the bytes above ``capacity``, nothing if all
        fit.

        ``lowest``: look for the lowest packing even if a higher one would fit; ``rounds`` of packing as of ``pack``."""
        over = {}
        for device, memory in capacity.items():
            beyond = self._pack(device, memory, 0 if lowest else memory, rounds)
            if beyond:
                over[device] = self._by_position(beyond)
        for live in self.all:
            if live.at_step_start is not None:
                live.offset = live.at_step_start.offset
        return over

    def _pack(self, device: int, memory: int, limit: int, rounds: int) -> list[tuple[int, int, int]]:
        """Pack the live ranges of ``device``; return how many bytes lie above ``memory``, from which to which tick.

        A live range that ends the step is the second lifespan of the one it started with, so that both get the same
        offset."""
        groups: dict[int, list[LiveRange]] = {}
        for live in self.all:
            if live.device == device and live.at_step_start is None:
                groups.setdefault(id(live.anchor()), []).append(live)
        at_end = {id(live.at_step_start): live for live in self.all if live.at_step_start is not None}
        buffers = []
        for group in groups.values():
            first = min(live.begin_in_value for live in group)
            parts = (
                LivePart(live.begin_in_value - first, live.block, _lifespans(live, at_end.get(id(live))))
                for live in group
            )
            buffers.append(LiveBuffer(tuple(parts), group[0].at))
        packed = pack(buffers, limit, rounds)
        self.tried += packed.tried * len(buffers)
        for group, offset in zip(groups.values(), packed.offsets, strict=True):
            first = min(live.begin_in_value for live in group)
            for live in group:
                live.offset = offset + live.begin_in_value - first
        if packed.height <= memory:
            return []
        above = []
        for buffer, offset in zip(buffers, packed.offsets, strict=True):
            for part in buffer.parts:
                beyond = offset + part.offset + part.size - memory
                if beyond > 0:
                    above += [(beyond, begin, end) for begin, end in part.lifespans]
        return above

    def _copy_of(self, live: LiveRange) -> int:
        """Return the vertex that writes ``live`` first."""
        producer = live.values[0][0][0]
        return self.merged.get(producer, producer)

    def _with_merged(self, vertex: Vertex) -> Vertex:
        """Return ``vertex`` with the bytes of the reloads that are merged into it, or with one input for them."""
        if vertex.id in self.sizes:
            return replace(vertex, sizes=(self.sizes[vertex.id],))
        if self.merged and any(ref[0] in self.merged for ref in vertex.inputs):
            return replace(vertex, inputs=tuple(ref for ref in vertex.inputs if ref[0] not in self.merged))
        return vertex

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of each reload that others are merged into."""
        size = {vertex.id: vertex.sizes[0] for vertex in self.planned if swaps_in(vertex)}
        sizes = {first: size[first] for first in self.merged.values()}
        for vertex, first in self.merged.items():
            sizes[first] += size[vertex]
        return sizes

    def _by_position(self, above: Iterable[tuple[int, int, int]]) -> Profile:
        """Return by position the most bytes of ``above``, each from one tick to another."""
        over = np.zeros(self.requirements.end + 1, np.int64)
        for beyond, begin, end in above:
            stretch = slice(self.positions[begin], self.positions[end - 1] + 1)
            over[stretch] = np.maximum(over[stretch], beyond)
        return over

    def plan(self, cyclic: bool) -> MemGraph:
        """Return the plan. A vertex waits for the last users of the bytes that it is the first to write."""
        requirements = self.requirements
        log = PlanLog((*requirements.inputs, *self.resident_ranges, *requirements.order))
        # A merged reload takes its bytes when the last of them are free.
        reloads: dict[int, int] = {}
        for live in self.all:
            if live.is_reload:
                first = self.merged.get(live.values[0][0][0], live.values[0][0][0])
                reloads[first] = max(reloads.get(first, 0), live.begin)
        planned = [self._with_merged(vertex) for vertex in self.planned]
        by_tick = sorted(
            (i for i in range(len(planned)) if planned[i].id not in self.merged),
            key=lambda i: reloads.get(planned[i].id, self.ticks[i]),
        )
        log.planned = [PlannedVertex(planned[i]) for i in by_tick]
        waits = {offload: list(users) for offload, users in self.waits_at_home.items()}
        occupants: dict[int, _LastOccupants] = {device: _LastOccupants() for device in requirements.pinned_bytes}
        for live in sorted(self.all, key=lambda live: reloads.get(self._copy_of(live), live.begin)):
            producer = self._copy_of(live)
            for former in occupants[live.device].replace(live):
                waits.setdefault(producer, []).extend(user for user in former.last_users if user != producer)
            # Within a chain, each value is written over the one before: its producer waits for that one's readers.
            for (_, readers), (ref, _) in pairwise(live.values):
                waits.setdefault(ref[0], []).extend(reader for reader in readers if reader != ref[0])
        log.memory_edges = {vertex: tuple(dict.fromkeys(others)) for vertex, others in waits.items()}
        slots = {
            ref: Slot(live.device, live.offset) for ref, live in self.by_value.items() if ref[0] not in self.merged
        }
        return assemble(requirements.graph, log, slots, cyclic=cyclic)


def _lifespans(live: LiveRange, at_end: LiveRange | None) -> tuple[tuple[int, int], ...]:
    return tuple((each.begin, each.end) for each in (live, at_end) if each is not None)


class _LastOccupants:
    """The live range that each byte of an arena belonged to last: disjoint address ranges, ascending."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ranges: list[tuple[int, int, LiveRange]] = []

    def replace(self, live: LiveRange) -> list[LiveRange]:
        """Give the bytes of ``live`` to it and return the live ranges that had them."""
        begin, end = live.offset, live.offset + live.block
        low = bisect_right(self.starts, begin)
        if low and self.ranges[low - 1][1] > begin:
            low -= 1
        high = low
        replacement: list[tuple[int, int, LiveRange]] = []
        former: list[LiveRange] = []
        while high < len(self.ranges) and self.ranges[high][0] < end:
            start, stop, other = self.ranges[high]
            former.append(other)
            if start < begin:
                replacement.append((start, begin, other))
            if stop > end:
                replacement.append((end, stop, other))
            high += 1
        replacement.append((begin, end, live))
        replacement.sort(key=lambda occupied: occupied[0])
        self.ranges[low:high] = replacement
        self.starts[low:high] = [start for start, _, _ in replacement]
        return list(dict.fromkeys(former))
