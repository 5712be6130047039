"""The needs of a step for device memory, position by position of its serial order, before anything has an offset.

*Pinned* buffers hold their bytes from their producer to their last reader. *Swappable* ones have a copy on the host, so
that they may leave the device between two uses. They are inputs that the host has when the step starts, and activations
whose idle gaps are worth an offload. An input that changes over steps has to be written back to the host after a change
before it may leave.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from disco_accel.errors import PlanError
from disco_accel.graph.check import called
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.home_uses import HomeUses, host_devices
from disco_accel.graph.last_graphs import kept_for_last_graphs
from disco_accel.graph.order import serial_order
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import (
    arrives_at_gate,
    changes_over_steps,
    handed_out_at_gate,
    host_copy_exists,
    is_foreign,
    is_handed_out,
    lasting_versions,
    must_survive_step,
    never_changes,
    outlives_step,
    overwrites,
)
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.timed.leaving_values import hold_until_transferred
from disco_accel.plan.timed.step_buffers import PinnedBuffer, StepRequirements, SwappableBuffer
from disco_accel.simulate.simulator import Machine

GUESSED_BANDWIDTH = 1e12
"""Bytes per second that a kernel of unknown duration is taken to write."""


def requirements_of(
    graph: TaskGraph,
    machine: Machine,
    min_gap_ratio: float | None,
    not_offloaded: Collection[int] = (),
    range_bytes: int | None = None,
    whole: Collection[int] = (),
) -> StepRequirements:
    """Return the needs of ``graph``.

    ``min_gap_ratio``: an activation is swappable only if one of its idle gaps is at least this many times its two
    copies (None: no activation is). ``not_offloaded``: kernels whose outputs are not swappable in any case.
    ``range_bytes``: values that never change, but for inputs ``whole``, are swapped in ranges of about so many bytes
    (None: as a whole). Raises
    Infeasible for in-place writes to values that would have to be copied first. Raises PlanError for a version that is
    wanted after it has been overwritten, of a value that changes over steps.
    """
    uses = _uses_of(graph)
    lanes = machine.lanes(graph.spaces)
    seconds = [_guessed_seconds(vertex) or lanes.seconds(vertex) for vertex in uses.order]
    alignments = {device.id: device.alignment for device in graph.devices}
    requirements = StepRequirements(graph, uses.inputs, uses.order, seconds, alignments)
    collector = _Collector(requirements, uses, machine, min_gap_ratio, not_offloaded)
    collector.ranges = range_bytes, whole
    collector.collect()
    return requirements


def check_overwrites(graph: TaskGraph) -> None:
    """Raise PlanError for a value that is wanted after a kernel has overwritten it: it would have to be copied first,
    which BUILDMEMGRAPH does and the timed planner does not."""
    order = serial_order(graph)
    by_id = {vertex.id: vertex for vertex in order}
    last = {ref: vertex for vertex in order for ref in vertex.inputs}
    written_at_home = HomeUses.of(graph).written
    for vertex in order:
        for output, ref in overwrites(vertex):
            if (vertex.id, output) in written_at_home:
                continue
            source = by_id[ref[0]]
            frozen = host_copy_exists(source) and not changes_over_steps(source)
            if last[ref] is not vertex or is_handed_out(source) or frozen:
                raise PlanError(
                    f"{called(vertex)}: inplace: {called(source)} is wanted after it has been overwritten; let the "
                    "other readers run before, or write to memory of its own"
                )


def may_be_split(vertex: Vertex, range_bytes: int) -> bool:
    """Whether ``vertex`` is an input that ranges of ``range_bytes`` are made of, if nothing else forbids it."""
    return never_changes(vertex) and vertex.sizes[0] >= 2 * range_bytes


def _guessed_seconds(vertex: Vertex) -> float:
    """Return how long a kernel without a duration takes, guessed from its outputs; 0 for all else."""
    guessed = vertex.kind is VertexKind.KERNEL and vertex.duration is None
    return sum(vertex.sizes) / GUESSED_BANDWIDTH if guessed else 0.0


@dataclass(frozen=True)
class _Uses:
    """Of a graph in its serial order. ``readers``: positions that read each value, ascending. ``states``: input that
    changes over steps → its versions."""

    inputs: tuple[Vertex, ...]
    order: tuple[Vertex, ...]
    vertices: dict[int, Vertex]
    position: dict[int, int]
    readers: dict[Ref, list[int]]
    overwritten: set[Ref]
    states: Mapping[Ref, list[Ref]]
    state_versions: set[Ref]


@kept_for_last_graphs
def _uses_of(graph: TaskGraph) -> _Uses:
    serial = serial_order(graph)
    inputs = tuple(vertex for vertex in serial if vertex.kind is VertexKind.INPUT)
    order = serial[len(inputs) :]
    readers: dict[Ref, list[int]] = {}
    for position, vertex in enumerate(order):
        for ref in dict.fromkeys(vertex.inputs):
            readers.setdefault(ref, []).append(position)
    states = lasting_versions(serial)
    return _Uses(
        *(inputs, order),
        vertices={vertex.id: vertex for vertex in serial},
        position={vertex.id: position for position, vertex in enumerate(order)},
        readers=readers,
        overwritten={ref for vertex in order for _, ref in overwrites(vertex)},
        states=states,
        state_versions={version for versions in states.values() for version in versions},
    )


class _Collector:
    """Fills ``requirements`` in one walk over the serial order."""

    def __init__(
        self,
        requirements: StepRequirements,
        uses: _Uses,
        machine: Machine,
        min_gap_ratio: float | None,
        not_offloaded: Collection[int],
    ) -> None:
        self.requirements = requirements
        self.not_offloaded = not_offloaded
        self.machine = machine
        self.min_gap_ratio = min_gap_ratio
        self.ranges: tuple[int | None, Collection[int]] = (None, ())
        self.vertices, self.position, self.readers = uses.vertices, uses.position, uses.readers
        self.overwritten, self.states, self.state_versions = uses.overwritten, uses.states, uses.state_versions
        self.home_uses = HomeUses.of(replace(requirements.graph, vertices=requirements.vertices))
        self.home_readers: dict[Ref, list[int]] = {}
        """Positions that read each value at home; ``readers`` has the others alone."""
        if self.home_uses.hosts:
            self._split_readers()
        self.starts = [0.0]
        """Seconds of compute before each position."""
        self.pinned_of: dict[Ref, PinnedBuffer] = {}

    def _split_readers(self) -> None:
        """Sort out the positions that read values at home."""
        order, everywhere, self.readers = self.requirements.order, self.readers, {}
        for ref, positions in everywhere.items():
            for position in positions:
                at_home = self.home_uses.at_home(order[position], ref)
                (self.home_readers if at_home else self.readers).setdefault(ref, []).append(position)

    def collect(self) -> None:
        """Sort every value into pinned or swappable buffers and add up their bytes."""
        requirements = self.requirements
        requirements.reads = [[] for _ in requirements.order]
        requirements.devices = [self._touched(vertex) for vertex in requirements.order]
        requirements.pinned_bytes, requirements.unevictable_bytes = (
            {device.id: np.zeros(requirements.end + 1, np.int64) for device in requirements.graph.devices}
            for _ in range(2)
        )
        beside = self._copies_to_and_from_the_host()
        for seconds, is_beside in zip(requirements.seconds, beside, strict=True):
            self.starts.append(self.starts[-1] + (0.0 if is_beside else seconds))
        self._order_at_home()
        for vertex in requirements.inputs:
            self._add_input(vertex)
        for position, vertex in enumerate(requirements.order):
            self._add_outputs(position, vertex)
        hold_until_transferred(requirements, self.pinned_of, beside, self.starts)
        for pinned in requirements.pinned:
            requirements.pinned_bytes[pinned.device][max(0, pinned.first) : pinned.last + 1] += pinned.block
        for index, buffer in enumerate(requirements.swappable):
            if not buffer.starts_on_host:
                stays = slice(buffer.producer, buffer.evictable_from)
                requirements.unevictable_bytes[buffer.device][stays] += buffer.block
            readers = {position for version in buffer.versions for position in self.readers.get(version, ())}
            for position in sorted(readers):
                requirements.reads[position].append(index)
            for position in buffer.writes:
                requirements.changed.setdefault(position, []).append(index)

    def _copies_to_and_from_the_host(self) -> list[bool]:
        """Return by position whether it is a copy between a device and the host, beside which kernels run."""
        hosts = host_devices(self.requirements.graph.devices)
        return [
            is_transfer(vertex) and not hosts.isdisjoint((vertex.space, vertex.source))
            for vertex in self.requirements.order
        ]

    def _touched(self, vertex: Vertex) -> tuple[int, ...]:
        if is_transfer(vertex):
            return tuple(dict.fromkeys((vertex.source, vertex.space)))
        return (vertex.space,)

    def _add_input(self, vertex: Vertex) -> None:
        requirements, ref = self.requirements, (vertex.id, 0)
        if is_foreign(vertex) or not vertex.sizes[0] or self.home_uses.never_moves(vertex):
            return
        block = requirements.block(vertex.sizes[0], vertex.space)
        readers = self.readers.get(ref, [])
        if host_copy_exists(vertex):
            versions = self.states.get(ref, [ref])
            if not self.home_uses.written.isdisjoint(versions):
                self._add_written_at_home(vertex, block, versions)
                return
            if ref in self.overwritten and len(versions) == 1:
                raise Infeasible(0)
            self._check_not_read_at_home(vertex, versions)
            writes = self._writes(versions)
            uses = sorted({position for version in versions for position in self.readers.get(version, ())})
            if uses:
                for begin, size in self._ranges(vertex):
                    block = requirements.block(size, vertex.space)
                    buffer = SwappableBuffer(ref, vertex.space, block, size, uses, True, home=vertex.source)
                    buffer.writes, buffer.versions, buffer.outlives_step = writes, versions, outlives_step(vertex)
                    buffer.begin, buffer.is_range = begin, size < vertex.sizes[0]
                    requirements.swappable.append(buffer)
            return
        lasts = must_survive_step(vertex) or arrives_at_gate(vertex)
        last = requirements.end if lasts else max(readers, default=0)
        self._pin(PinnedBuffer(vertex.space, block, [ref], -1, last))

    def _ranges(self, vertex: Vertex) -> list[tuple[int, int]]:
        """Return where the ranges begin in which the input is swapped, and the bytes of each: about equally many."""
        size, (range_bytes, whole) = vertex.sizes[0], self.ranges
        if range_bytes is None or vertex.id in whole or not may_be_split(vertex, range_bytes):
            return [(0, size)]
        order = self.requirements.order
        if any(order[position].kind is not VertexKind.KERNEL for position in self.readers[vertex.id, 0]):
            return [(0, size)]
        step = self.requirements.block(-(-size // (size // range_bytes)), vertex.space)
        return [(begin, min(step, size - begin)) for begin in range(0, size, step)]

    def _order_at_home(self) -> None:
        """Note which kernels use values at home that others write over there. Raises PlanError if one is wanted after
        that."""
        order = self.requirements.order
        for versions in self.states.values():
            for version, following in pairwise(versions if self.home_uses.written.intersection(versions) else ()):
                source, writer = self.vertices[version[0]], self.position[following[0]]
                if is_handed_out(source):
                    raise PlanError(_handed_out_and_overwritten(source, order[writer]))
                readers = [position for position in self.home_readers[version] if position != writer]
                if readers and readers[-1] > writer:
                    raise PlanError(_read_too_late(order[readers[-1]], order[writer]))
                self.requirements.used_before.setdefault(writer, []).extend(order[each].id for each in readers)

    def _check_not_read_at_home(self, vertex: Vertex, versions: Sequence[Ref]) -> None:
        """Raise PlanError if a kernel of a host device reads a value that kernels of its own device change."""
        if len(versions) == 1:
            return
        changes = self.vertices[versions[1][0]]
        for position in (position for version in versions for position in self.home_readers.get(version, ())):
            reader = self.requirements.order[position]
            raise PlanError(
                f"{called(reader)}: reads {called(vertex)} at its home, which {called(changes)} changes on device "
                f"{vertex.space}; let a transfer take it to device {reader.space}"
            )

    def _add_written_at_home(self, vertex: Vertex, block: int, versions: Sequence[Ref]) -> None:
        """Add the one version, of a value that kernels of a host device change at home, that kernels of its own device
        read. Raises PlanError if these read several, or read one when the next is at home."""
        read = [version for version in versions if self.readers.get(version)]
        if not read:
            return
        if len(read) > 1:
            first, second = (self.requirements.order[self.readers[version][0]] for version in read[:2])
            raise PlanError(
                f"{called(vertex)}: {called(first)} and {called(second)} read two versions of it, which the host "
                "changes between them; let all readers on its device run before the first change, or behind the last"
            )
        requirements, (version,) = self.requirements, read
        place = versions.index(version)
        uses = list(self.readers[version])
        index = len(requirements.swappable)
        ready = self.position[version[0]] + 1 if place else 0
        if place + 1 < len(versions):
            overwritten_at = self.position[versions[place + 1][0]]
            if uses[-1] > overwritten_at:
                raise PlanError(_read_too_late(requirements.order[uses[-1]], requirements.order[overwritten_at]))
            requirements.read_before.setdefault(overwritten_at, []).append(index)
        buffer = SwappableBuffer(version, vertex.space, block, vertex.sizes[0], uses, True, evictable_from=ready)
        buffer.versions, buffer.outlives_step = [version], False
        requirements.swappable.append(buffer)
        if place:
            requirements.written.setdefault(ready - 1, []).append(index)

    def _add_outputs(self, position: int, vertex: Vertex) -> None:
        requirements = self.requirements
        for k, size in enumerate(vertex.sizes):
            ref = (vertex.id, k)
            if not size or ref in self.state_versions or is_foreign(vertex):
                continue
            block = requirements.block(size, vertex.space)
            readers = self.readers.get(ref, ())
            # In the order of the step: the last reader is the last of them.
            last = requirements.end if is_handed_out(vertex) else readers[-1] if readers else position
            if (
                not (vertex.inplace and k in dict(vertex.inplace))
                and not handed_out_at_gate(vertex)
                and self._add_activation(position, vertex, ref, block, readers)
            ):
                continue
            overwritten = self._overwritten(position, vertex, k, block)
            if overwritten is None:
                self._pin(PinnedBuffer(vertex.space, block, [ref], position, last))
            else:
                overwritten.values.append(ref)
                overwritten.last = max(overwritten.last, last)
                self.pinned_of[ref] = overwritten

    def _pin(self, buffer: PinnedBuffer) -> None:
        self.pinned_of[buffer.values[0]] = buffer
        self.requirements.pinned.append(buffer)

    def _overwritten(self, position: int, vertex: Vertex, output: int, block: int) -> PinnedBuffer | None:
        """Return the buffer that ``output`` of ``vertex`` is written over, if any."""
        ref = dict(overwrites(vertex)).get(output) if vertex.inplace else None
        if ref is not None:
            if ref not in self.pinned_of or not self._is_last_reader(position, ref):
                raise Infeasible(position)
            return self.pinned_of[ref]
        if output or vertex.inplace:
            return None
        for p in vertex.may_inplace:
            ref = vertex.inputs[p]
            buffer = self.pinned_of.get(ref)
            everywhere = all(q in vertex.may_inplace for q, other in enumerate(vertex.inputs) if other == ref)
            fits = buffer is not None and buffer.device == vertex.space and buffer.block == block
            if fits and everywhere and self._is_last_reader(position, ref):
                source = self.vertices[ref[0]]
                if not arrives_at_gate(source) and source.sizes[ref[1]] >= vertex.sizes[0]:
                    return buffer
        return None

    def _writes(self, versions: Sequence[Ref]) -> list[int]:
        """Return the positions that write the versions of a state but the first. Raises PlanError if one is wanted once
        the next has taken its place: in the order that is planned there is no memory for both."""
        writes = [self.position[producer] for producer, _ in versions[1:]]
        for version, overwritten_at in zip(versions, writes, strict=False):
            source, writer = self.vertices[version[0]], self.requirements.order[overwritten_at]
            if self.readers[version][-1] > overwritten_at:
                raise PlanError(_read_too_late(self.requirements.order[self.readers[version][-1]], writer))
            if is_handed_out(source):
                raise PlanError(_handed_out_and_overwritten(source, writer))
        last = self.vertices[versions[-1][0]]
        if handed_out_at_gate(last) and writes:
            raise PlanError(
                f"{called(last)}: out: changes a value that lives over steps, which cannot be handed out at the gate; "
                "let it be kept to the end (keep)"
            )
        return writes

    def _is_last_reader(self, position: int, ref: Ref) -> bool:
        source = self.vertices[ref[0]]
        return self.readers[ref][-1] == position and not is_handed_out(source)

    def _add_activation(self, position: int, vertex: Vertex, ref: Ref, block: int, readers: Sequence[int]) -> bool:
        """Make the output swappable if an idle gap of it is long enough; return whether it is."""
        if self.min_gap_ratio is None or ref in self.overwritten or vertex.id in self.not_offloaded:
            return False
        requirements, size = self.requirements, vertex.sizes[ref[1]]
        offload = self.machine.link(TO_HOST).seconds(size, vertex.space)
        reload = self.machine.link(TO_DEVICE).seconds(size, vertex.space)
        offloaded = self.starts[position + 1] + offload
        # Before its offload has ended an eviction would free nothing, so readers until then need no reload.
        evictable = max(position + 1, min(bisect_left(self.starts, offloaded), requirements.end))
        uses = list(readers[bisect_left(readers, evictable) :])
        times = [
            offloaded,
            *(self.starts[use] for use in uses),
            *([self.starts[-1]] if must_survive_step(vertex) else []),
        ]
        gaps = (after - before for before, after in pairwise(times))
        if not any(gap > self.min_gap_ratio * (offload + reload) for gap in gaps):
            return False
        activation = SwappableBuffer(ref, vertex.space, block, size, uses, False, position, evictable, versions=[ref])
        requirements.made.setdefault(position, []).append(len(requirements.swappable))
        requirements.swappable.append(activation)
        return True


def _read_too_late(late: Vertex, writer: Vertex) -> str:
    return (
        f"{called(late)}: reads what {called(writer)} overwrites before it in the serial order; let the second run "
        "after the first"
    )


def _handed_out_and_overwritten(source: Vertex, writer: Vertex) -> str:
    return f"{called(source)}: is handed out, but {called(writer)} overwrites it in the same step"
