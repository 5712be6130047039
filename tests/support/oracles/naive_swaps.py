"""Swaps scheduled step by step in Python: what ``runtime_ext/plan/swap.cpp`` does in a fraction of the time.

A swappable buffer is *held* up to a position if it was promised to the reader there. One that is held no longer is
*idle* and may be evicted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from disco_accel.graph.check import dependencies
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST, Route
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.timed.kept_gaps import Kept, in_two_steps
from disco_accel.plan.timed.step_buffers import STEP_START, Profile, StepRequirements, SwappableBuffer
from disco_accel.plan.timed.swap_schedule import SwapEvent, SwapSchedule, bytes_twice
from disco_accel.simulate.simulator import Machine
from tests.support.oracles.naive_byte_counter import NEVER, ByteCounter, ResidencyState

_ALWAYS = float("inf")


def schedule_swaps(
    requirements: StepRequirements,
    machine: Machine,
    capacity: Mapping[int, int],
    *,
    at_start: Sequence[int] = (),
    at_end: Sequence[int] = (),
    permanent: Iterable[int] = (),
    kept: Kept,
) -> SwapSchedule:
    """As ``schedule_step`` of a step that repeats."""
    scheduler = _SwapScheduler(requirements, machine, capacity, at_start, at_end, permanent)
    scheduler.reserve(kept, frozenset(at_start))
    return scheduler.run()


def resident_at_boundary(
    requirements: StepRequirements,
    machine: Machine,
    capacity: Mapping[int, int],
    *,
    permanent: Iterable[int],
    kept: Kept,
) -> list[int]:
    """As ``buffers_at_boundary``."""
    scheduler = _SwapScheduler(two_steps(requirements), machine, capacity, (), (), permanent)
    scheduler.boundary = requirements.end
    scheduler.reserve(in_two_steps(kept, requirements.end), frozenset())
    scheduler.run()
    return scheduler.at_boundary


class _DeviceState:
    """One device: its memory, when its link and its compute are free, and its buffers in order of use."""

    def __init__(self, device: int, memory: ByteCounter, unpromised: Profile, uses: list[tuple[int, int]]) -> None:
        self.device = device
        self.memory = memory
        self.unpromised = unpromised
        """Bytes by position that are neither pinned nor promised to a reader."""
        self.uses = uses
        """(Position, buffer), ascending; those before ``next_use`` are provided for."""
        self.deferred: list[int] = []
        """Buffers that are promised to readers and loaded once the step that these belong to starts."""
        self.next_use = 0
        self.short_at = 0
        """A position at which the last use that had to wait found too few bytes: ``unpromised`` never grows."""
        self.position = -1
        self.running = -1
        """The position whose vertex ran last and is not released yet, or -1."""
        self.link_free = 0.0
        self.compute_free = 0.0


class _SwapScheduler:
    def __init__(
        self,
        requirements: StepRequirements,
        machine: Machine,
        capacity: Mapping[int, int],
        at_start: Sequence[int],
        at_end: Sequence[int],
        permanent: Iterable[int],
    ) -> None:
        self.requirements = requirements
        self.buffers = requirements.swappable
        self.machine = machine
        self.boundary: int | None = None
        self.at_boundary: list[int] = []
        self.reserved: dict[tuple[int, int], int] = {}
        """By buffer, and the position behind which it stays: its next use, up to which its bytes are reserved."""
        self.schedule = SwapSchedule()
        self.permanent = frozenset(permanent)
        uses = [[] if i in self.permanent else list(buffer.uses) for i, buffer in enumerate(self.buffers)]
        for i in at_end:
            uses[i].append(requirements.end)
        self.state = ResidencyState(self.buffers, uses)
        for i in self.permanent:
            self.state.resident[i] = True
        self.arrival = [0.0] * len(self.buffers)
        self.evictable_at: dict[int, list[int]] = {}
        """By position: the activations that may leave from there on."""
        for i, buffer in enumerate(self.buffers):
            if not buffer.starts_on_host:
                self.evictable_at.setdefault(buffer.evictable_from, []).append(i)
        self.devices = {device: self._device(device, memory, at_end) for device, memory in capacity.items()}
        for i in at_start:
            self.state.resident[i] = True
            self._memory(i).add_at_start(i)
        self.lanes = machine.lanes(requirements.graph.spaces)
        self.d2h_free = dict.fromkeys(capacity, 0.0)
        self.p2p_free = dict.fromkeys(capacity, 0.0)
        self.ready: dict[int, float] = {}
        """By vertex: the second at which its outputs are written."""

    def _device(self, device: int, capacity: int, at_end: Sequence[int]) -> _DeviceState:
        requirements, state = self.requirements, self.state
        pinned_bytes = requirements.pinned_bytes[device]
        memory = ByteCounter(state, pinned_bytes, capacity, self._evict)
        unpromised = capacity - pinned_bytes - requirements.unevictable_bytes[device]
        rank = {buffer: order for order, buffer in enumerate(at_end)}
        uses = [
            (use, rank.get(i, 0) if use == requirements.end else 0, i)
            for i, buffer in enumerate(self.buffers)
            if buffer.device == device
            for use in state.uses[i]
        ]
        in_order = [(use, i) for use, _, i in sorted(uses)]
        return _DeviceState(device, memory, unpromised, in_order)

    def _memory(self, buffer: int) -> ByteCounter:
        return self.devices[self.buffers[buffer].device].memory

    def run(self) -> SwapSchedule:
        """Run all positions in order, then bring back the buffers that the next step starts with."""
        end = self.requirements.end
        for position in range(end):
            if position == self.boundary:
                self.at_boundary = self._resident()
            self._execute(position)
        for device in self.devices.values():
            self._release_reads(device)
            self._advance(device, end)
            device.compute_free = device.memory.advance(end, device.compute_free)
            self._provide_now(device)
        self.schedule.seconds = max([self.schedule.seconds, *self.d2h_free.values()])
        return self.schedule

    def _resident(self) -> list[int]:
        clean = [i for i, buffer in enumerate(self.buffers) if buffer.may_be_resident and i not in self.permanent]
        return sorted((i for i in clean if self.state.resident[i]), key=self.state.next_use)

    def _execute(self, position: int) -> None:
        requirements = self.requirements
        vertex = requirements.order[position]
        device = self.devices[vertex.space]
        touched = [self.devices[id] for id in requirements.devices[position]]
        begin = 0.0
        for source in dependencies(vertex):
            begin = max(begin, self.ready.get(source, 0.0))
        for each in touched:
            self._release_reads(each)
            self._advance(each, position)
            begin = max(begin, each.memory.advance(position, begin))
            self._load_deferred(each)
            self._provide_now(each)
        for buffer in (*requirements.reads[position], *requirements.read_before.get(position, ())):
            begin = max(begin, self.arrival[buffer])
        transfer = is_transfer(vertex)
        sender = touched[0].device
        route = self.lanes.route(vertex.source, vertex.space)
        begin = max(begin, self._link_free(route, sender, device) if transfer else device.compute_free)
        for buffer in requirements.made.get(position, ()):
            begin = self._allocate_output(device, buffer, begin)
        # Until the vertex starts, its inputs and outputs have their bytes and the link is free: prefetch meanwhile.
        if not transfer:
            self._prefetch(device, begin)
        self.schedule.events.append((SwapEvent.RUN, position))
        end = begin + requirements.seconds[position]
        self.ready[vertex.id] = end
        self.schedule.seconds = max(self.schedule.seconds, end)
        for each in touched:
            each.running = position
        if not transfer:
            device.compute_free = end
        elif route == TO_DEVICE:
            device.link_free = end
        else:
            (self.d2h_free if route == TO_HOST else self.p2p_free)[sender] = end
        for buffer in requirements.written.get(position, ()):
            self.state.on_host_at[buffer] = end
        for buffer in requirements.made.get(position, ()):
            self._offload(buffer, end)
        for buffer in requirements.changed.get(position, ()):
            # The host's copy is out of date from here on; one that never leaves is not read there again.
            if buffer not in self.permanent:
                self._offload(buffer, end)
        self._prefetch(device, device.compute_free)

    def _link_free(self, route: Route, sender: int, receiver: _DeviceState) -> float:
        """When the link that a transfer takes is free."""
        if route == TO_DEVICE:
            return receiver.link_free
        return (self.d2h_free if route == TO_HOST else self.p2p_free)[sender]

    def _allocate_output(self, device: _DeviceState, buffer: int, begin: float) -> float:
        """Take the bytes of an activation that the vertex at hand produces; return when the vertex may start."""
        activation = self.buffers[buffer]
        free = device.memory.allocate(buffer, begin)
        self.state.resident[buffer] = True
        self.state.held_until[buffer] = max(self.state.held_until[buffer], activation.evictable_from - 1)
        return free

    def _offload(self, buffer: int, ready: float) -> None:
        device, home = self.buffers[buffer].device, self.buffers[buffer].home
        seconds = self.lanes.copy_seconds(self.buffers[buffer].size, device, home)
        self.d2h_free[device] = max(self.d2h_free[device], ready) + seconds
        self.state.on_host_at[buffer] = self.d2h_free[device]
        self.schedule.events.append((SwapEvent.OFFLOAD, buffer))

    def _release_reads(self, device: _DeviceState) -> None:
        """The device's last vertex has ended: the buffers it read are idle unless a later reader holds them."""
        last = device.running
        if last < 0:
            return
        self.schedule.events.append((SwapEvent.RELEASE, device.device))
        for index in self.requirements.reads[last]:
            buffer = self.buffers[index]
            if buffer.device != device.device or index in self.permanent or last < buffer.evictable_from:
                continue
            while self.state.next_use(index) <= last:
                self.state.uses_done[index] += 1
            if self.state.held_until[index] <= last and not self._stays(index):
                self._release(device, index)
        device.running = -1

    def reserve(self, kept: Kept, at_start: Collection[int]) -> None:
        """Reserve the bytes of buffers that stay between two uses, so that nothing else is promised them; where they do
        not fit beside what is reserved already, the buffer may leave."""
        for index, positions in kept.items():
            uses, block = self.state.uses[index], self.buffers[index].block
            unpromised = self.devices[self.buffers[index].device].unpromised
            for last in sorted(positions):
                number = bisect_right(uses, last)
                if number == len(uses) or (last == STEP_START and index not in at_start):
                    continue
                if int(unpromised[last + 1 : uses[number] + 1].min()) >= block:
                    unpromised[last + 1 : uses[number] + 1] -= block
                    self.reserved[index, last] = uses[number]

    def _stays(self, index: int) -> bool:
        """Hold the buffer up to its next use if its bytes are reserved from where it is held no longer."""
        use = self.reserved.get((index, self.state.held_until[index]))
        if use is not None:
            self.state.held_until[index] = use
        return use is not None

    def _release(self, device: _DeviceState, index: int) -> None:
        """Make the buffer idle, or evict it at once where nobody reads it again and the user does not keep it."""
        buffer = self.buffers[index]
        done = self.state.next_use(index) == NEVER and not buffer.may_be_resident
        if done and not self.requirements.outlives(buffer):
            self._evict(index)
        else:
            device.memory.release(index)

    def _evict(self, buffer: int) -> None:
        self.state.resident[buffer] = False
        self._memory(buffer).free(buffer)
        self.schedule.events.append((SwapEvent.EVICT, buffer))

    def _advance(self, device: _DeviceState, position: int) -> None:
        """Move to ``position``: activations that become evictable on the way are idle unless a reader holds them."""
        for reached in range(device.position + 1, position + 1):
            for buffer in self.evictable_at.get(reached, ()):
                idle = self.buffers[buffer].device == device.device and self.state.held_until[buffer] < reached
                if idle and not self._stays(buffer):
                    self._release(device, buffer)
        device.position = position

    def _load_deferred(self, device: _DeviceState) -> None:
        """Load what was promised before its step had started, or before it was written at home, as soon as that has."""
        ready = [index for index in device.deferred if self.buffers[index].evictable_from <= device.position]
        if ready:
            for index in ready:
                begin = max(device.link_free, self.state.on_host_at[index], device.compute_free)
                self._reload(device, index, device.memory.allocate(index, begin))
            device.deferred = [index for index in device.deferred if not self.state.resident[index]]

    def _provide_now(self, device: _DeviceState) -> None:
        """Reload or hold every buffer that the position at hand reads. Raises Infeasible."""
        while device.next_use < len(device.uses) and device.uses[device.next_use][0] <= device.position:
            if not self._want(device, _ALWAYS):
                raise Infeasible(device.position)

    def _prefetch(self, device: _DeviceState, until: float) -> None:
        """Use the link for coming readers until the given second."""
        while device.next_use < len(device.uses) and self._want(device, until):
            pass
        device.link_free = max(device.link_free, until)

    def _want(self, device: _DeviceState, until: float) -> bool:
        """Provide for the next use: hold its buffer or reload it; False if it has to wait, and all later ones with it.

        Invariant: ``unpromised`` is at no position below zero, so whatever is promised up to a use stays on the device
        beside the pinned bytes, and no eviction ever hits a promised buffer. Uses are provided for in order of
        position: a later one that overtook might take the bytes without which an earlier one cannot be served.
        """
        use, index = device.uses[device.next_use]
        buffer = self.buffers[index]
        held = self.state.held_until[index]
        if held >= use or use < device.position or (self.state.resident[index] and self._stays(index)):
            device.next_use += 1
            return True
        resident = self.state.resident[index]
        too_early = device.position < buffer.evictable_from
        # Up to ``held``, and up to where an activation is evictable, its bytes are counted already.
        begin = max(device.position, buffer.evictable_from, held + 1)
        if begin <= device.short_at <= use and device.unpromised[device.short_at] < buffer.block:
            return False
        fewest = begin + int(device.unpromised[begin : use + 1].argmin())
        if device.unpromised[fewest] < buffer.block:
            device.short_at = fewest
            return False
        if not resident and too_early and buffer.starts_on_host and held < 0:
            device.deferred.append(index)
        if not resident and not too_early:
            if device.link_free >= until:
                return False
            start = max(device.link_free, self.state.on_host_at[index])
            self._reload(device, index, device.memory.allocate(index, start))
        device.unpromised[begin : use + 1] -= buffer.block
        self.state.held_until[index] = use
        device.next_use += 1
        return True

    def _continues(self, buffer: int) -> bool:
        """Whether one copy brings the buffer with the one that was loaded last, behind which it lies in its value."""
        if not self.buffers[buffer].begin:
            return False
        for event, subject in reversed(self.schedule.events):
            if event is SwapEvent.RELOAD:
                return subject == buffer - 1
            if event is not SwapEvent.EVICT:
                return False
        return False

    def _reload(self, device: _DeviceState, buffer: int, begin: float) -> None:
        size = self.buffers[buffer].size
        seconds = self.lanes.copy_seconds(size, self.buffers[buffer].home, device.device)
        if begin <= device.link_free and self._continues(buffer):
            seconds -= self.machine.link(TO_DEVICE).latency
        device.link_free = begin + seconds
        self.arrival[buffer] = device.link_free
        self.schedule.seconds = max(self.schedule.seconds, device.link_free)
        self.state.resident[buffer] = True
        self.schedule.reloaded += size
        self.schedule.events.append((SwapEvent.RELOAD, buffer))


def two_steps(requirements: StepRequirements) -> StepRequirements:
    """Return the step twice in a row. Buffers that may be resident are shared; the others of the second step are listed
    last."""
    n, count = requirements.end, len(requirements.swappable)
    buffers: list[SwappableBuffer] = []
    second_step: list[SwappableBuffer] = []
    second_index = {}
    for index, buffer in enumerate(requirements.swappable):
        uses = [use + n for use in buffer.uses]
        if buffer.may_be_resident:
            writes = [*buffer.writes, *(write + n for write in buffer.writes)]
            buffers.append(replace(buffer, uses=buffer.uses + uses, writes=writes))
        else:
            buffers.append(buffer)
            second_index[index] = count + len(second_step)
            producer = buffer.producer + n
            second_step.append(replace(buffer, uses=uses, producer=producer, evictable_from=buffer.evictable_from + n))
    reads = [[second_index.get(buffer, buffer) for buffer in read] for read in requirements.reads]
    made: dict[int, list[int]] = {}
    for position, outputs in requirements.made.items():
        made[position + n] = [second_index[i] for i in outputs]
    changed = {position + n: buffers for position, buffers in requirements.changed.items()}
    # Only buffers that are not shared by both steps are used at home.
    written, read_before = (
        {position + n: [second_index[i] for i in buffers] for position, buffers in table.items()}
        for table in (requirements.written, requirements.read_before)
    )
    return replace(
        requirements,
        order=requirements.order * 2,
        seconds=requirements.seconds * 2,
        pinned=[],
        swappable=buffers + second_step,
        reads=requirements.reads + reads,
        devices=requirements.devices * 2,
        made={**requirements.made, **made},
        changed={**requirements.changed, **changed},
        written={**requirements.written, **written},
        read_before={**requirements.read_before, **read_before},
        pinned_bytes=bytes_twice(requirements.pinned_bytes, n),
        unevictable_bytes=bytes_twice(requirements.unevictable_bytes, n),
        derived={},
    )
