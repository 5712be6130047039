"""BUILDMEMGRAPH (Figure 10): from a TaskGraph to a plan that fits, for variable sizes.

The serial order is walked with two horizons. A vertex gets the memory of its outputs when ``exec_horizon`` reaches it;
copies from the host are placed up to ``alloc_horizon``, as far ahead as memory allows. Every free byte remembers which
vertices must finish before it is reused; these become the memory edges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from disco_accel.eviction import Policy
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.order import serial_order
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import (
    arrives_at_gate,
    handed_out_at_gate,
    host_copy_exists,
    is_foreign,
    is_handed_out,
    may_leave,
    overwrites,
)
from disco_accel.plan.buildmemgraph.residents import Residents
from disco_accel.plan.buildmemgraph.sim_malloc import DeviceMemory, Repairs, release_of
from disco_accel.plan.common.assemble import assemble
from disco_accel.plan.common.device_copy import DeviceCopy, FreeBlock, ValueState
from disco_accel.plan.common.plan_log import PlanLog
from disco_accel.plan.infeasible import Infeasible


def build(
    graph: TaskGraph,
    policy: Policy,
    *,
    lookahead: int | None = None,
    residents: Residents | None = None,
    cyclic: bool = False,
    repairs: Repairs | None = None,
    outs_apart: bool = False,
    slack: float | None = None,
) -> MemGraph:
    """Return a plan of ``graph`` within the memory of its devices.

    ``lookahead``: how many vertices ahead of execution reloads may be placed (None: no limit). ``residents``: clean
    inputs on the device when the step starts; a ``cyclic`` plan reloads them by its end. ``outs_apart``: values that
    are handed out, and may not be moved before that, get bytes of their own from the start. ``slack``: share of the
    memory that look-ahead leaves free, so that outputs find bytes that nobody has used for long; None: none, and
    outputs lie as low as they can. Raises Infeasible.
    """
    options = _Options(lookahead, residents or Residents(), cyclic, repairs or Repairs(), outs_apart, slack)
    return _Builder(graph, policy, options).run()


_KEPT_SHARE = 16
"""Kept outputs are reserved bytes for the whole step if these are no more than one part in so many of the memory."""


def failing_position(
    graph: TaskGraph,
    policy: Policy,
    *,
    lookahead: int | None,
    residents: Residents,
    cyclic: bool,
    outs_apart: bool = False,
    slack: float | None = None,
    until: int | None = None,
) -> int | None:
    """Return the serial position at which ``build`` fails, None if it does not, without making a plan.

    ``until``: the last position to look at (None: the end), which saves the work behind it.
    """
    try:
        _Builder(graph, policy, _Options(lookahead, residents, cyclic, Repairs(), outs_apart, slack)).walk(until)
    except Infeasible as error:
        return error.position
    return None


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of ``build``: see there."""

    lookahead: int | None
    residents: Residents
    cyclic: bool
    repairs: Repairs
    outs_apart: bool
    slack: float | None


class _Builder:
    def __init__(self, graph: TaskGraph, policy: Policy, options: _Options) -> None:
        residents, repairs = options.residents, options.repairs
        self.outs_apart = options.outs_apart
        self.graph = graph
        self.order = serial_order(graph)
        self.lookahead = len(self.order) if options.lookahead is None else options.lookahead
        stays = frozenset(v.id for v in graph.vertices if host_copy_exists(v) and not may_leave(v))
        self.permanent = frozenset(residents.permanent) | stays if options.cyclic else frozenset()
        self.residents = frozenset(residents.visiting) | frozenset(residents.permanent) | stays
        self.cyclic = options.cyclic
        self.repairs = repairs
        self.log = PlanLog(self.order)
        self.slots: dict[Ref, Slot] = {}
        self.reserved: dict[Ref, DeviceCopy] = {}
        self.memories = {
            device.id: DeviceMemory(device, policy, repairs, self.log, options.slack) for device in graph.devices
        }
        self.values = self._values()
        self.uses = {device.id: _UsesByPosition(self.values, device.id) for device in graph.devices}

    def run(self) -> MemGraph:
        """Walk the serial order and return the finished plan."""
        self.walk()
        return assemble(self.graph, self.log, self.slots, cyclic=self.cyclic)

    def walk(self, until: int | None = None) -> None:
        """Walk the serial order, up to position ``until`` if given, and log the plan."""
        self._place_inputs()
        last = len(self.order)
        devices = [(memory, self.uses[device]) for device, memory in self.memories.items()]
        for position, vertex in enumerate(self.order):
            if vertex.kind is VertexKind.INPUT:
                continue
            for memory, uses in devices:
                memory.exec_horizon = position
                memory.pinned.clear()
                horizon, version = memory.alloc_horizon, memory.free_list.version
                # Where the last look-ahead found no room and nothing was freed since, another one finds none either.
                if horizon <= last and not (horizon >= position and uses.failed == (horizon, version)):
                    uses.look_ahead(memory, position + self.lookahead)
            self._execute(position, vertex)
            if position == until:
                return
        for device, memory in self.memories.items():
            memory.exec_horizon = len(self.order)
            memory.pinned.clear()
            self.uses[device].look_ahead(memory, len(self.order))
        if any(value.resident_offset is not None and value.copy is None for value in self.values.values()):
            raise Infeasible(len(self.order))

    def _values(self) -> dict[Ref, ValueState]:
        end = len(self.order)
        values: dict[Ref, ValueState] = {}
        for vertex in self.order:
            for k, size in enumerate(vertex.sizes):
                ref = (vertex.id, k)
                values[ref] = ValueState(
                    ref, size, vertex.space, is_foreign(vertex), handed_out_at_gate(vertex), [], end + 1
                )
                if host_copy_exists(vertex):
                    values[ref].host, values[ref].home = ref, vertex.source
        for position, vertex in enumerate(self.order):
            for ref in dict.fromkeys(vertex.inputs):
                values[ref].uses.append(position)
        if self.repairs.end_vertex:
            for vertex in self.order:
                if is_handed_out(vertex):
                    for k in range(len(vertex.sizes)):
                        # The host keeps a clean input without being asked.
                        if values[vertex.id, k].host is None:
                            values[vertex.id, k].uses.append(end)
        if self.cyclic:
            for resident in sorted(self.residents - self.permanent):
                values[resident, 0].uses.append(end)
        return values

    def _place_inputs(self) -> None:
        """Give an address to every input that is on the device when the step starts; permanent ones lie at the top."""
        inputs = [vertex for vertex in self.order if vertex.kind is VertexKind.INPUT]
        present = [
            v
            for v in inputs
            if v.sizes[0] and not is_foreign(v) and (not host_copy_exists(v) or v.id in self.residents)
        ]

        def is_permanent(vertex: Vertex) -> bool:
            return arrives_at_gate(vertex) or (host_copy_exists(vertex) and vertex.id in self.permanent)

        if self.outs_apart:
            self._reserve([vertex for vertex in self.order if handed_out_at_gate(vertex)])
        elif self.cyclic and self.residents - self.permanent:
            self._reserve_kept()
        for vertex in sorted(present, key=lambda v: (not is_permanent(v), not host_copy_exists(v))):
            memory = self.memories[vertex.space]
            value = self.values[vertex.id, 0]
            fit = memory.free_list.highest_fit(memory.aligned(value.size))
            if fit is None:
                raise Infeasible(0)
            copy = memory.copy_in(value, memory.free_list.allocate(fit.start, fit.end))
            copy.last_use = -1
            copy.permanent = is_permanent(vertex)
            value.copy = copy
            if host_copy_exists(vertex) and self.cyclic and not copy.permanent:
                value.resident_offset = copy.addr
                memory.lowest_resident_offset = min(memory.lowest_resident_offset, copy.addr)
                memory.has_resident_offsets = True
            self.slots[value.ref] = Slot(vertex.space, copy.addr)
            if not host_copy_exists(vertex):
                memory.held[value.ref] = copy
        for vertex in present:
            self.memories[vertex.space].retire(self.values[vertex.id, 0])

    def _reserve_kept(self) -> None:
        """Reserve bytes for kept outputs for the whole step, if they are small.

        Allocated when they are made, they might lie on the offset of a resident that must come back.
        """
        for device, memory in self.memories.items():
            kept = [vertex for vertex in self.order if is_handed_out(vertex) and vertex.space == device]
            total = sum(memory.aligned(value.size) for value in self._reservable(kept))
            if total * _KEPT_SHARE <= memory.free_list.bytes:
                self._reserve(kept)

    def _reservable(self, vertices: Iterable[Vertex]) -> list[ValueState]:
        """Return the outputs of ``vertices`` that are not written over an input."""
        return [
            self.values[vertex.id, k]
            for vertex in vertices
            for k, size in enumerate(vertex.sizes)
            if size and vertex.kind is not VertexKind.INPUT and k not in dict(vertex.inplace)
        ]

    def _reserve(self, vertices: Iterable[Vertex]) -> None:
        for value in self._reservable(vertices):
            memory = self.memories[value.device]
            fit = memory.free_list.highest_fit(memory.aligned(value.size))
            if fit is None:
                raise Infeasible(0)
            copy = memory.copy_in(value, memory.free_list.allocate(fit.start, fit.end))
            copy.permanent = True
            self.reserved[value.ref] = copy

    def _execute(self, position: int, vertex: Vertex) -> None:
        inputs = [self.values[ref] for ref in dict.fromkeys(vertex.inputs)]
        local = [value for value in inputs if value.size and not value.external]
        for value in local:
            self.memories[value.device].pinned.add(value.ref)
        copies: dict[Ref, DeviceCopy] = {}
        self._bring(local, copies)
        over = self._overwritten(position, vertex, copies) if vertex.sizes[0] else None
        outputs, release = self._outputs(position, vertex, local, copies, over)
        refs = [copies[ref].ref if ref in copies else ref for ref in vertex.inputs]
        if over is not None and vertex.inplace:
            refs[vertex.inplace[0][1]] = over.ref
        planned = tuple(refs)
        self.log.add(vertex if planned == vertex.inputs else replace(vertex, inputs=planned), release)
        for value in inputs:
            value.next += 1
        for value in local:
            copy = copies[value.ref]
            copy.readers.append(vertex.id)
            copy.last_use = position
            copy.reserved_blocks = []
            if value.copy is copy:
                self.memories[value.device].retire(value)
        memory = self.memories[vertex.space]
        for copy in outputs:
            copy.value.copy = copy
            if not copy.permanent:
                memory.held[copy.value.ref] = copy
            memory.retire(copy.value)

    def _bring(self, values: Sequence[ValueState], copies: dict[Ref, DeviceCopy]) -> None:
        """Load those of ``values`` that are not on their device, and enter the copy of each in ``copies``."""
        for value in values:
            if value.copy is None:
                try:
                    self._load(value)
                except Infeasible:
                    self._load_after_compacting(value, values, copies)
            assert value.copy is not None
            copies[value.ref] = value.copy

    def _load(self, value: ValueState) -> None:
        memory = self.memories[value.device]
        if not memory.sim_malloc_reload(value, force=True):
            raise Infeasible(memory.exec_horizon)

    def _load_after_compacting(
        self, value: ValueState, inputs: Sequence[ValueState], copies: dict[Ref, DeviceCopy]
    ) -> None:
        """Load ``value`` when other ``inputs`` of the vertex lie between free bytes: these leave and are reloaded."""
        others = [other for other in inputs if other.device == value.device and other.copy is not None]
        self.memories[value.device].compact(others, ())
        self._load(value)
        for other in others:
            if other.copy is None:
                self._load(other)
            assert other.copy is not None
            copies[other.ref] = other.copy

    def _outputs(
        self,
        position: int,
        vertex: Vertex,
        inputs: Sequence[ValueState],
        copies: dict[Ref, DeviceCopy],
        over: DeviceCopy | None,
    ) -> tuple[list[DeviceCopy], list[int]]:
        """Allocate the outputs of ``vertex``, output 0 ``over`` an input.

        Returns the copies, and the ids of the vertices that must finish before they are written.
        """
        release: list[int] = []
        outputs: list[DeviceCopy] = []
        unplaced: list[ValueState] = []
        for k, size in enumerate(vertex.sizes):
            value = self.values[vertex.id, k]
            if k == 0 and over is not None:
                copy = DeviceCopy(value, value.ref, over.addr, over.aligned_size, vertex.id, position, over.permanent)
                copy.made_at = position
                outputs.append(copy)
                release.extend(over.readers)
            elif value.ref in self.reserved:
                outputs.append(self.reserved[value.ref])
            elif size:
                unplaced.append(value)
        allocated = self._allocate_outputs(vertex, unplaced, inputs, copies)
        for value, blocks in zip(unplaced, allocated, strict=True):
            release.extend(release_of(blocks, self.repairs))
            outputs.append(self.memories[vertex.space].copy_in(value, blocks))
        for copy in outputs:
            copy.producer = vertex.id
            self.slots[copy.value.ref] = Slot(vertex.space, copy.addr)
        return outputs, release

    def _allocate_outputs(
        self, vertex: Vertex, outputs: Sequence[ValueState], inputs: Sequence[ValueState], copies: dict[Ref, DeviceCopy]
    ) -> list[list[FreeBlock]]:
        """Allocate ``outputs``; if the vertex's own inputs lie between the free bytes, these leave and are reloaded."""
        memory = self.memories[vertex.space]
        allocated: list[list[FreeBlock]] = []
        try:
            for value in outputs:
                allocated.append(memory.sim_malloc(value.size, until_end=is_handed_out(vertex)))
        except Infeasible:
            for blocks in allocated:
                memory.free_list.free(blocks)
            present = [value for value in inputs if value.device == vertex.space and value.copy is copies[value.ref]]
            allocated = memory.compact(present, [value.size for value in outputs])
            self._bring(present, copies)
        return allocated

    def _overwritten(self, position: int, vertex: Vertex, copies: Mapping[Ref, DeviceCopy]) -> DeviceCopy | None:
        """Return the copy that output 0 of ``vertex`` is written over, if any; the device loses its value."""
        if vertex.inplace:
            return self._overwrite(position, vertex, copies)
        memory = self.memories[vertex.space]
        if (vertex.id, 0) in self.reserved or (is_handed_out(vertex) and memory.has_resident_offsets):
            # Kept to the end, it might lie on the offset of a resident that must come back.
            return None
        for p in vertex.may_inplace:
            value = self.values[vertex.inputs[p]]
            copy = copies.get(value.ref)
            everywhere = all(q in vertex.may_inplace for q, ref in enumerate(vertex.inputs) if ref == value.ref)
            last = value.use_after(position) == value.after_last
            if copy is None or copy.permanent or not everywhere or not last or value.size < vertex.sizes[0]:
                continue
            memory.held.pop(value.ref, None)
            value.copy = None
            value.reserved = False
            return copy
        return None

    def _overwrite(self, position: int, vertex: Vertex, copies: Mapping[Ref, DeviceCopy]) -> DeviceCopy:
        memory = self.memories[vertex.space]
        [(_, overwritten)] = overwrites(vertex)
        value = self.values[overwritten]
        copy = copies[value.ref]
        resident = copy.permanent and value.host == value.ref
        if resident or (value.use_after(position) != value.after_last and (copy.permanent or value.out)):
            return memory.sim_malloc_copy(value)
        if value.use_after(position) != value.after_last and value.host is None:
            memory.sim_malloc_offload(value)
        memory.held.pop(value.ref, None)
        value.copy = None
        value.reserved = False
        return copy


class _UsesByPosition:
    """The values of one device that are read, by the position that reads them; the virtual end vertex included."""

    def __init__(self, values: Mapping[Ref, ValueState], device: int) -> None:
        by_position: dict[int, list[ValueState]] = {}
        for value in values.values():
            if value.device == device and value.size and not value.external:
                for position in value.uses:
                    by_position.setdefault(position, []).append(value)
        self.positions = sorted(by_position)
        self.values = [by_position[position] for position in self.positions]
        self.failed = (-1, -1)
        """The horizon and the free list's version at which the last look-ahead found no room."""

    def look_ahead(self, memory: DeviceMemory, limit: int) -> None:
        """Advance ``alloc_horizon`` up to ``limit`` while the values missing there are reloaded without eviction."""
        memory.alloc_horizon = max(memory.alloc_horizon, memory.exec_horizon)
        if self.failed == (memory.alloc_horizon, memory.free_list.version):
            return
        # Invariant: every value that a position from exec_horizon to before alloc_horizon reads is on the device or not
        # made yet. Evicting one or revoking its reservation moves the horizon back to its next use.
        index = bisect_left(self.positions, memory.alloc_horizon)
        while index < len(self.positions) and self.positions[index] <= limit:
            memory.alloc_horizon = self.positions[index]
            for value in self.values[index]:
                missing = value.copy is None and (value.host is not None or value.cached is not None)
                if missing and not memory.sim_malloc_reload(value, force=False):
                    self.failed = (memory.alloc_horizon, memory.free_list.version)
                    return
            index += 1
        memory.alloc_horizon = limit + 1
