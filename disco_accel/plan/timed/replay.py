"""From a schedule of swaps to the vertices of a plan and the live ranges of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.plan.timed.live_ranges import LiveRange, LiveRanges
from disco_accel.plan.timed.step_buffers import StepRequirements, SwappableBuffer
from disco_accel.plan.timed.swap_schedule import SwapEvent, SwapSchedule


def live_ranges_of(
    requirements: StepRequirements,
    schedule: SwapSchedule,
    permanent: Sequence[int],
    at_start: Sequence[int],
    cyclic: bool,
) -> LiveRanges:
    """Return the live ranges of ``schedule``, still without offsets; ``permanent`` buffers never leave."""
    replay = _Replay(requirements, schedule, permanent, at_start, cyclic)
    replay.run()
    return replay.live


class _Replay:
    def __init__(
        self,
        requirements: StepRequirements,
        schedule: SwapSchedule,
        permanent: Sequence[int],
        at_start: Sequence[int],
        cyclic: bool,
    ) -> None:
        runs = (event is SwapEvent.RUN for event, _ in schedule.events)
        positions = [0, *accumulate(runs, initial=0)]
        self.live = LiveRanges(requirements, positions, len(schedule.events) + 1)
        self.cyclic = cyclic
        self.resident = (*permanent, *at_start)
        self.events = schedule.events
        self.tick = 0
        self.current: dict[int, LiveRange] = {}
        """By swappable buffer: its live range at the moment."""
        self.readers: dict[Ref, list[int]] = {}
        """Readers of values that are not swappable."""
        self.host: dict[int, Ref] = {i: buffer.ref for i, buffer in enumerate(self.buffers) if buffer.starts_on_host}
        """By swappable buffer: the value that the host has a copy of."""
        self.loads: dict[int, list[int]] = {}
        """By buffer that changes over steps: the reloads of the version that its home holds at the moment."""
        self.written_now: dict[Ref, int] = {v: i for i, b in enumerate(self.buffers) for v in b.versions[1:]}
        """By version that a kernel writes over the one before: its buffer."""
        self.traits = {vertex.id: vertex.traits for vertex in requirements.inputs}
        vertices = (*requirements.inputs, *requirements.order)
        self.next_id = max((vertex.id for vertex in vertices), default=-1) + 1
        self.needed_offloads = self._needed_offloads()
        self.released = self._release_ticks()

    @property
    def requirements(self) -> StepRequirements:
        return self.live.requirements

    @property
    def buffers(self) -> Sequence[SwappableBuffer]:
        return self.live.requirements.swappable

    def run(self) -> None:
        """Go through all events."""
        for index in self.resident:
            self._open(index, self._resident(index), 0)
            self.current[index].at = self.buffers[index].at
        first = dict(self.current)
        ticks: dict[int, int] = {-1: 0}
        for tick, (event, subject) in enumerate(self.events, start=1):
            self.tick = tick
            if event is SwapEvent.RUN:
                ticks[subject] = tick
                self._run(subject, tick)
            elif event is SwapEvent.RELOAD:
                reload = self._swap_in(subject, self.host[subject])
                self.loads.setdefault(subject, []).append(reload)
                self._open(subject, (reload, 0), tick)
                self.current[subject].is_reload = True
            elif event is SwapEvent.EVICT:
                live = self.current.pop(subject)
                if self._was_made_here(live, subject):
                    # Its bytes are not free before its offload has ended.
                    live.end = max(live.end, tick)
            elif event is SwapEvent.OFFLOAD and tick in self.needed_offloads:
                self._offload(subject)
        for index, live in self.current.items():
            if self._was_made_here(live, index) or (self.cyclic and index in first):
                live.end = self.live.end
                if index in first and live is not first[index]:
                    live.at_step_start = first[index]
                    live.join(first[index])
        self._add_pinned(ticks)
        self.live.all.sort(key=lambda live: live.begin)
        self.live.merged = self._merged()

    def _merged(self) -> dict[int, int]:
        """Return the reloads that are part of the one before them, by id, with the id of the first of these. They load
        adjacent ranges, with no vertex between them. They get offsets together, have the same readers, and both or
        neither begin the next step."""
        merged: dict[int, int] = {}
        before: tuple[int, int] | None = None
        """The last reload, and its buffer, if nothing ran since."""
        reload_at = {live.begin: live for live in self.live.all if live.is_reload}
        for tick, (event, subject) in enumerate(self.events, start=1):
            if event is SwapEvent.RELOAD:
                live = reload_at[tick]
                ref, readers = live.values[0]
                if before is not None and self.buffers[subject].begin and before[1] == subject - 1:
                    former = self.live.by_value[before[0], 0]
                    both = (former.at_step_start is None) == (live.at_step_start is None)
                    # Ranges of one value lie side by side only where a kernel finds both in one piece.
                    both = both and former.anchor() is live.anchor()
                    if both and former.device == live.device and former.values[0][1] == readers:
                        merged[ref[0]] = merged.get(before[0], before[0])
                before = ref[0], subject
            elif event is not SwapEvent.EVICT:
                before = None
        return merged

    def _add_pinned(self, ticks: Mapping[int, int]) -> None:
        for pinned in self.requirements.pinned:
            values = [(ref, self.readers.get(ref, [])) for ref in pinned.values]
            end = self.released.get((pinned.last, pinned.device), self.live.end)
            live = LiveRange(pinned.device, pinned.block, ticks[pinned.first], end, values)
            self.live.all.append(live)
            self.live.by_value.update(dict.fromkeys(pinned.values, live))

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

    def _was_made_here(self, live: LiveRange, index: int) -> bool:
        """Whether a kernel wrote the bytes, so that they are no copy of the host's."""
        ref = live.values[-1][0]
        return ref in self.written_now or (ref == self.buffers[index].ref and not self.buffers[index].starts_on_host)

    def _offload(self, index: int) -> None:
        live = self.current[index]
        offload = self._swap_out(index, live.values[-1][0])
        live.values[-1][1].append(offload)
        if self.buffers[index].starts_on_host:
            # It goes home, over what the reloads so far have read there.
            self.live.waits_at_home[offload] = self.loads.pop(index, [])
        self.host[index] = (offload, 0)

    def _needed_offloads(self) -> set[int]:
        """Return the ticks of the offloads whose copy on the host is used, in this step or by the next one.

        An activation's is where it is reloaded, or kept and evicted. A buffer that changes over steps needs one where
        its bytes are freed before the next change. It needs one at the end of the step, unless the next step finds it
        on the device and never reads its home."""
        needed = set()
        last: dict[int, int] = {}
        changed: set[int] = set()
        loaded_unchanged: set[int] = set()
        for tick, (event, index) in enumerate(self.events, start=1):
            if event is SwapEvent.OFFLOAD:
                last[index] = tick
            elif event is SwapEvent.RUN:
                for written in self.requirements.changed.get(index, ()):
                    changed.add(written)
                    last.pop(written, None)
            elif event in (SwapEvent.RELOAD, SwapEvent.EVICT):
                buffer = self.buffers[index]
                if buffer.starts_on_host:
                    if event is SwapEvent.RELOAD and index not in changed:
                        loaded_unchanged.add(index)
                    used = True
                else:
                    used = event is SwapEvent.RELOAD or self.requirements.outlives(buffer)
                if used and index in last:
                    needed.add(last[index])
        resident = set(self.resident) if self.cyclic else set()
        needed |= {last[index] for index in changed if index in last and index not in resident - loaded_unchanged}
        return needed

    def _resident(self, index: int) -> Ref:
        """Return the name of the buffer's copy that is on the device when the step starts."""
        buffer = self.buffers[index]
        if not buffer.is_range:
            return buffer.ref
        traits = self.traits[buffer.ref[0]]
        vertex = Vertex(
            self.next_id,
            VertexKind.INPUT,
            buffer.device,
            "resident",
            (buffer.ref,),
            (buffer.size,),
            traits=traits,
            begin=buffer.begin,
        )
        self.next_id += 1
        self.live.resident_ranges.append(vertex)
        return vertex.id, 0

    def _open(self, index: int, ref: Ref, tick: int) -> None:
        """Begin a live range of a swappable buffer."""
        buffer = self.buffers[index]
        live = LiveRange(buffer.device, buffer.block, tick, tick + 1, [(ref, [])], begin_in_value=buffer.begin)
        self.current[index] = live
        self.live.all.append(live)
        self.live.by_value[ref] = live

    def _swap_in(self, index: int, value: Ref) -> int:
        buffer = self.buffers[index]
        return self._copy("reload", value, buffer.size, buffer.home, buffer.device, buffer.begin)

    def _swap_out(self, index: int, value: Ref) -> int:
        buffer = self.buffers[index]
        return self._copy("offload", value, buffer.size, buffer.device, buffer.home, buffer.begin)

    def _copy(self, op: str, value: Ref, size: int, source: int, target: int, begin: int) -> int:
        vertex = Vertex(self.next_id, VertexKind.COPY, target, op, (value,), (size,), begin=begin, source=source)
        self.next_id += 1
        self.live.planned.append(vertex)
        self.live.ticks.append(self.tick)
        return vertex.id

    def _run(self, position: int, tick: int) -> None:
        vertex = self.requirements.order[position]
        copies: dict[Ref, Ref] = {}
        """By value of the task graph: the copy on the device that the vertex reads in its place."""
        further: list[Ref] = []
        first: dict[Ref, LiveRange] = {}
        for index in self.requirements.reads[position]:
            live = self.current[index]
            buffer = self.buffers[index]
            if buffer.is_range:
                # Its call finds the whole value where the first range is.
                first.setdefault(buffer.ref, live).join(live)
            ref, readers = live.values[-1]
            if buffer.begin:
                further.append(ref)
            else:
                copies.update(dict.fromkeys(buffer.versions, ref))
            readers.append(vertex.id)
            live.end = self.released.get((position, live.device), self.live.end)
        for ref in dict.fromkeys(vertex.inputs):
            if ref not in copies:
                self.readers.setdefault(ref, []).append(vertex.id)
        overwritten = self.requirements.read_before.get(position, ())
        loads = [load for index in overwritten for load in self.loads.get(index, ())]
        if users := [*loads, *self.requirements.used_before.get(position, ())]:
            self.live.waits_at_home[vertex.id] = users
        inputs = (*(copies.get(ref, ref) for ref in vertex.inputs), *further)
        self.live.planned.append(replace(vertex, inputs=inputs))
        self.live.ticks.append(self.tick)
        for index in self.requirements.made.get(position, ()):
            self._open(index, self.buffers[index].ref, tick)
        for output, _ in vertex.inplace:
            if (vertex.id, output) in self.written_now:
                live = self.current[self.written_now[vertex.id, output]]
                live.values.append(((vertex.id, output), []))
                self.live.by_value[vertex.id, output] = live
