"""From a schedule of swaps to the vertices of a plan and the live ranges of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.graph.values import must_survive_step
from disco_accel.plan.timed.live_ranges import LiveRange, LiveRanges
from disco_accel.plan.timed.requirements import StepRequirements
from disco_accel.plan.timed.swap_schedule import SwapEvent, SwapSchedule


def live_ranges_of(
    requirements: StepRequirements,
    schedule: SwapSchedule,
    permanent: Sequence[int],
    at_start: Sequence[int],
    cyclic: bool,
) -> LiveRanges:
    """Return the live ranges of ``schedule``, still without offsets; ``permanent`` buffers never leave."""
    replay = _Replay(requirements, schedule)
    replay.run(permanent, at_start, cyclic)
    runs = (event is SwapEvent.RUN for event, _ in schedule.events)
    positions = [0, *accumulate(runs, initial=0)]
    return LiveRanges(requirements, replay.planned, replay.ranges, replay.by_value, positions, replay.ticks, replay.end)


class _Replay:
    def __init__(self, requirements: StepRequirements, schedule: SwapSchedule) -> None:
        self.requirements = requirements
        self.buffers = requirements.swappable
        self.events = schedule.events
        self.end = len(schedule.events) + 1
        self.planned: list[Vertex] = []
        self.ticks: list[int] = []
        self.tick = 0
        self.ranges: list[LiveRange] = []
        self.by_value: dict[Ref, LiveRange] = {}
        self.current: dict[int, LiveRange] = {}
        """By swappable buffer: its live range at the moment."""
        self.readers: dict[Ref, list[int]] = {}
        """Readers of values that are not swappable."""
        self.host: dict[int, Ref] = {i: buffer.ref for i, buffer in enumerate(self.buffers) if buffer.clean}
        """By swappable buffer: the value that the host has a copy of."""
        vertices = (*requirements.inputs, *requirements.order)
        self.next_id = max((vertex.id for vertex in vertices), default=-1) + 1
        self.offloaded = self._needed_offloads()
        self.released = self._release_ticks()

    def run(self, permanent: Sequence[int], at_start: Sequence[int], cyclic: bool) -> None:
        """Go through all events."""
        for index in (*permanent, *at_start):
            self._open(index, self.buffers[index].ref, 0)
        first = dict(self.current)
        ticks: dict[int, int] = {-1: 0}
        for tick, (event, subject) in enumerate(self.events, start=1):
            self.tick = tick
            if event is SwapEvent.RUN:
                ticks[subject] = tick
                self._run(subject, tick)
            elif event is SwapEvent.RELOAD:
                self._open(subject, (self._copy(VertexKind.RELOAD, subject, self.host[subject]), 0), tick)
                self.current[subject].scheduled = tick
            elif event is SwapEvent.EVICT:
                live = self.current.pop(subject)
                if live.values[-1][0] == self.buffers[subject].ref and not self.buffers[subject].clean:
                    # Its bytes are not free before its offload has ended.
                    live.end = tick
            elif event is SwapEvent.OFFLOAD and subject in self.offloaded:
                live = self.current[subject]
                offload = self._copy(VertexKind.OFFLOAD, subject, live.values[-1][0])
                live.values[-1][1].append(offload)
                self.host[subject] = (offload, 0)
        for index, live in self.current.items():
            if not self.buffers[index].clean or (cyclic and index in first):
                live.end = self.end
                if index in first and live is not first[index]:
                    live.at_step_start = first[index]
        self._add_pinned(ticks)
        self.ranges.sort(key=lambda live: live.begin)

    def _add_pinned(self, ticks: Mapping[int, int]) -> None:
        for pinned in self.requirements.pinned:
            values = [(ref, self.readers.get(ref, [])) for ref in pinned.values]
            end = self.released.get((pinned.last, pinned.device), self.end)
            live = LiveRange(pinned.device, pinned.block, ticks[pinned.first], end, values)
            self.ranges.append(live)
            self.by_value.update(dict.fromkeys(pinned.values, live))

    def _release_ticks(self) -> dict[tuple[int, int], int]:
        """Return by position and device the tick at which that position's vertex is known to have ended."""
        running: dict[int, int] = {}
        released = {}
        for tick, (event, subject) in enumerate(self.events, start=1):
            if event is SwapEvent.RUN:
                running.update(dict.fromkeys(self.requirements.devices[subject], subject))
            elif event is SwapEvent.RELEASE:
                released[running[subject], subject] = tick
        return released

    def _needed_offloads(self) -> set[int]:
        """Return the activations whose host copy is used: they are reloaded, or kept and evicted."""
        needed = set()
        for event, index in self.events:
            if event in (SwapEvent.RELOAD, SwapEvent.EVICT) and not self.buffers[index].clean:
                producer = self.requirements.order[self.buffers[index].producer]
                if event is SwapEvent.RELOAD or must_survive_step(producer):
                    needed.add(index)
        return needed

    def _open(self, index: int, ref: Ref, tick: int) -> None:
        """Begin a live range of a swappable buffer."""
        buffer = self.buffers[index]
        live = LiveRange(buffer.device, buffer.block, tick, tick + 1, [(ref, [])])
        self.current[index] = live
        self.ranges.append(live)
        self.by_value[ref] = live

    def _copy(self, kind: VertexKind, index: int, source: Ref) -> int:
        buffer = self.buffers[index]
        vertex = Vertex(self.next_id, kind, buffer.device, kind.name.lower(), (source,), (buffer.size,))
        self.next_id += 1
        self.planned.append(vertex)
        self.ticks.append(self.tick)
        return vertex.id

    def _run(self, position: int, tick: int) -> None:
        vertex = self.requirements.order[position]
        copies: dict[Ref, Ref] = {}
        """By value of the task graph: the copy on the device that the vertex reads in its place."""
        for index in self.requirements.reads[position]:
            live = self.current[index]
            ref, readers = live.values[-1]
            if live.scheduled >= 0 and live.first_read < 0:
                live.first_read = tick
            copies[self.buffers[index].ref] = ref
            readers.append(vertex.id)
            live.end = self.released.get((position, live.device), self.end)
        for ref in dict.fromkeys(vertex.inputs):
            if ref not in copies:
                self.readers.setdefault(ref, []).append(vertex.id)
        self.planned.append(replace(vertex, inputs=tuple(copies.get(ref, ref) for ref in vertex.inputs)))
        self.ticks.append(self.tick)
        for index in self.requirements.made.get(position, ()):
            self._open(index, self.buffers[index].ref, tick)
