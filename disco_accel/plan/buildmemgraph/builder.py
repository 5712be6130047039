"""BUILDMEMGRAPH (Figure 10): from a TaskGraph to a plan that fits, for variable sizes.

The serial order is walked with two horizons. A vertex gets the memory of its outputs when ``exec_horizon`` reaches it;
copies from the host are placed up to ``alloc_horizon``, as far ahead as memory allows. Every free byte remembers which
vertices must finish before it is reused; these become the memory edges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.order import serial_order
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.plan.buildmemgraph.eviction import Policy
from disco_accel.plan.buildmemgraph.residents import Residents
from disco_accel.plan.buildmemgraph.sim_malloc import DeviceMemory, Repairs, taken_release
from disco_accel.plan.common.assemble import assemble
from disco_accel.plan.common.device_copy import Piece, Stay, Value
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

    ``lookahead``: how many vertices ahead of execution copies may be placed (None: no limit). ``residents``: clean
    inputs on the device when the step starts; a ``cyclic`` plan brings them back by its end. ``outs_apart``: what is
    handed out, and may not be moved before that, has its place beside all others from the start. ``slack``: share of
    the memory that look-ahead leaves free, so that outputs find bytes that nobody has used for long; None: none, and
    outputs lie as low as they can. Raises Infeasible.
    """
    kind = _Kind(lookahead, residents or Residents(), cyclic, repairs or Repairs(), outs_apart, slack)
    return _Builder(graph, policy, kind).run()


_KEPT_SHARE = 16
"""Kept outputs get places for the whole step if they take no more than one part in so many of the memory."""


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
        _Builder(graph, policy, _Kind(lookahead, residents, cyclic, Repairs(), outs_apart, slack)).walk(until)
    except Infeasible as error:
        return error.position
    return None


@dataclass(frozen=True, slots=True)
class _Kind:
    """The kind of plan that is asked for: see ``build``."""

    lookahead: int | None
    residents: Residents
    cyclic: bool
    repairs: Repairs
    outs_apart: bool
    slack: float | None


class _Builder:
    def __init__(self, graph: TaskGraph, policy: Policy, kind: _Kind) -> None:
        residents, repairs = kind.residents, kind.repairs
        self.outs_apart = kind.outs_apart
        self.graph = graph
        self.order = serial_order(graph)
        self.lookahead = len(self.order) if kind.lookahead is None else kind.lookahead
        self.permanent = frozenset(residents.permanent if kind.cyclic else ())
        self.residents = frozenset(residents.visiting) | frozenset(residents.permanent)
        self.cyclic = kind.cyclic
        self.repairs = repairs
        self.log = PlanLog(self.order)
        self.slots: dict[Ref, Slot] = {}
        self.reserved: dict[Ref, Stay] = {}
        self.memories = {
            device.id: DeviceMemory(device, policy, repairs, self.log, kind.slack) for device in graph.devices
        }
        self.values = self._values()
        self.reads = {device.id: _Reads(self.order, self.values, device.id) for device in graph.devices}

    def run(self) -> MemGraph:
        """Walk the serial order and return the finished plan."""
        self.walk()
        return assemble(self.graph, self.log, self.slots, self.values, cyclic=self.cyclic)

    def walk(self, until: int | None = None) -> None:
        """Walk the serial order, up to position ``until`` if given, and log the plan."""
        self._place_inputs()
        last = len(self.order)
        fronts = [(memory, self.reads[device]) for device, memory in self.memories.items()]
        for position, vertex in enumerate(self.order):
            if vertex.kind is VertexKind.INPUT:
                continue
            for memory, reads in fronts:
                memory.exec_horizon = position
                memory.pinned.clear()
                horizon = memory.alloc_horizon
                if horizon <= last and not (horizon >= position and reads.failed == (horizon, memory.space.version)):
                    reads.look_ahead(memory, position + self.lookahead)
            self._execute(position, vertex)
            if position == until:
                return
        for device, memory in self.memories.items():
            memory.exec_horizon = len(self.order)
            memory.pinned.clear()
            self.reads[device].look_ahead(memory, len(self.order))
        if any(value.home is not None and value.stay is None for value in self.values.values()):
            raise Infeasible(len(self.order))

    def _values(self) -> dict[Ref, Value]:
        end = len(self.order)
        values: dict[Ref, Value] = {}
        for vertex in self.order:
            for k, size in enumerate(vertex.sizes):
                ref = (vertex.id, k)
                values[ref] = Value(ref, size, vertex.device, vertex.external, vertex.out, [], end + 1)
                if vertex.kind is VertexKind.INPUT and vertex.clean:
                    values[ref].host = ref
        for position, vertex in enumerate(self.order):
            for ref in dict.fromkeys(vertex.inputs):
                values[ref].uses.append(position)
        if self.repairs.end_vertex:
            for vertex in self.order:
                if vertex.keep or vertex.out:
                    for k in range(len(vertex.sizes)):
                        # The host keeps a clean input without being asked.
                        if values[vertex.id, k].host is None:
                            values[vertex.id, k].uses.append(end)
        if self.cyclic:
            for resident in sorted(self.residents - self.permanent):
                values[resident, 0].uses.append(end)
        return values

    def _place_inputs(self) -> None:
        """Give an address to all that is on the device when the step starts; what stays for good lies at the top."""
        inputs = [vertex for vertex in self.order if vertex.kind is VertexKind.INPUT]
        start_here = [v for v in inputs if v.sizes[0] and not v.external and (not v.clean or v.id in self.residents)]

        def stays(vertex: Vertex) -> bool:
            return vertex.late or (vertex.clean and vertex.id in self.permanent)

        if self.outs_apart:
            self._reserve([vertex for vertex in self.order if vertex.out])
        elif self.cyclic and self.residents - self.permanent:
            self._reserve_kept()
        for vertex in sorted(start_here, key=lambda v: (not stays(v), not v.clean)):
            memory = self.memories[vertex.device]
            value = self.values[vertex.id, 0]
            window = memory.space.highest_fit(memory.block(value.size))
            if window is None:
                raise Infeasible(0)
            stay = memory.stay_at(value, memory.space.take(window.start, window.end))
            stay.newest = -1
            stay.permanent = stays(vertex)
            value.stay = stay
            if vertex.clean and self.cyclic and not stay.permanent:
                value.home = stay.addr
                memory.home_floor = min(memory.home_floor, stay.addr)
                memory.has_homes = True
            self.slots[value.ref] = Slot(vertex.device, stay.addr, value.size)
            if not vertex.clean:
                memory.held[value.ref] = stay
        for vertex in start_here:
            self.memories[vertex.device].retire(self.values[vertex.id, 0])

    def _reserve_kept(self) -> None:
        """Give small kept outputs a place of their own for the whole step: later they might block a resident's home."""
        kept = [vertex for vertex in self.order if vertex.keep or vertex.out]
        for device, memory in self.memories.items():
            here = [vertex for vertex in kept if vertex.device == device]
            blocks = (memory.block(value.size) for value in self._reservable(here))
            if sum(blocks) * _KEPT_SHARE <= memory.space.bytes:
                self._reserve(here)

    def _reservable(self, vertices: Iterable[Vertex]) -> list[Value]:
        """Return the outputs of ``vertices`` that are not written over an input."""
        return [
            self.values[vertex.id, k]
            for vertex in vertices
            for k, size in enumerate(vertex.sizes)
            if size and vertex.kind is not VertexKind.INPUT and (vertex.inplace is None or k)
        ]

    def _reserve(self, vertices: Iterable[Vertex]) -> None:
        for value in self._reservable(vertices):
            memory = self.memories[value.device]
            window = memory.space.highest_fit(memory.block(value.size))
            if window is None:
                raise Infeasible(0)
            stay = memory.stay_at(value, memory.space.take(window.start, window.end))
            stay.permanent = True
            self.reserved[value.ref] = stay

    def _execute(self, position: int, vertex: Vertex) -> None:
        inputs = [self.values[ref] for ref in dict.fromkeys(vertex.inputs)]
        local = [value for value in inputs if value.size and not value.external]
        for value in local:
            self.memories[value.device].pinned.add(value.ref)
        copies: dict[Ref, Stay] = {}
        self._bring(local, copies)
        over = self._overwritten(position, vertex, copies) if vertex.sizes[0] else None
        outputs, release = self._outputs(position, vertex, local, copies, over)
        refs = [copies[ref].ref if ref in copies else ref for ref in vertex.inputs]
        if over is not None and vertex.inplace is not None:
            refs[vertex.inplace] = over.ref
        planned = tuple(refs)
        self.log.add(vertex if planned == vertex.inputs else replace(vertex, inputs=planned), release)
        for value in inputs:
            value.next += 1
        for value in local:
            stay = copies[value.ref]
            stay.readers.append(vertex.id)
            stay.newest = position
            stay.taken = []
            if value.stay is stay:
                self.memories[value.device].retire(value)
        memory = self.memories[vertex.device]
        for stay in outputs:
            stay.value.stay = stay
            if not stay.permanent:
                memory.held[stay.value.ref] = stay
            memory.retire(stay.value)

    def _bring(self, values: Sequence[Value], copies: dict[Ref, Stay]) -> None:
        """Make sure that ``values`` are on their devices and note where in ``copies``."""
        for value in values:
            if value.stay is None:
                try:
                    self._load(value)
                except Infeasible:
                    self._make_place(value, values, copies)
            assert value.stay is not None
            copies[value.ref] = value.stay

    def _load(self, value: Value) -> None:
        memory = self.memories[value.device]
        if not memory.sim_malloc_reload(value, force=True):
            raise Infeasible(memory.exec_horizon)

    def _make_place(self, value: Value, inputs: Sequence[Value], copies: dict[Ref, Stay]) -> None:
        """Load ``value`` where others of ``inputs`` lie in the way: they leave and come back."""
        here = [other for other in inputs if other.device == value.device and other.stay is not None]
        self.memories[value.device].compact(here, ())
        self._load(value)
        for other in here:
            if other.stay is None:
                self._load(other)
            assert other.stay is not None
            copies[other.ref] = other.stay

    def _outputs(
        self, position: int, vertex: Vertex, inputs: Sequence[Value], copies: dict[Ref, Stay], over: Stay | None
    ) -> tuple[list[Stay], list[int]]:
        """Place the outputs of ``vertex``, output 0 ``over`` an input; return them and who must finish first."""
        release: list[int] = []
        outputs: list[Stay] = []
        free: list[Value] = []
        for k, size in enumerate(vertex.sizes):
            value = self.values[vertex.id, k]
            if k == 0 and over is not None:
                outputs.append(
                    Stay(value, value.ref, over.addr, over.block, vertex.id, position, over.permanent, born=position)
                )
                release.extend(over.readers)
            elif value.ref in self.reserved:
                outputs.append(self.reserved[value.ref])
            elif size:
                free.append(value)
        for value, taken in zip(free, self._rooms(vertex, free, inputs, copies), strict=True):
            release.extend(taken_release(taken, self.repairs))
            outputs.append(self.memories[vertex.device].stay_at(value, taken))
        for stay in outputs:
            stay.producer = vertex.id
            self.slots[stay.value.ref] = Slot(vertex.device, stay.addr, stay.value.size)
        return outputs, release

    def _rooms(
        self, vertex: Vertex, outputs: Sequence[Value], inputs: Sequence[Value], copies: dict[Ref, Stay]
    ) -> list[list[Piece]]:
        """Take room for ``outputs``; if the vertex's own inputs lie in the way, they make place and come back."""
        memory = self.memories[vertex.device]
        rooms: list[list[Piece]] = []
        try:
            for value in outputs:
                rooms.append(memory.sim_malloc(value.size, stays=vertex.keep or vertex.out))
        except Infeasible:
            for taken in rooms:
                memory.space.give(taken)
            here = [value for value in inputs if value.device == vertex.device and value.stay is copies[value.ref]]
            rooms = memory.compact(here, [value.size for value in outputs])
            self._bring(here, copies)
        return rooms

    def _overwritten(self, position: int, vertex: Vertex, copies: Mapping[Ref, Stay]) -> Stay | None:
        """Return the copy that output 0 of ``vertex`` is written over, if any; the device loses its value."""
        if vertex.inplace is not None:
            return self._overwrite(position, vertex, copies)
        memory = self.memories[vertex.device]
        if (vertex.id, 0) in self.reserved or ((vertex.keep or vertex.out) and memory.has_homes):
            # Kept to the end, it would block the way home of whatever lives there.
            return None
        for p in vertex.may_inplace:
            value = self.values[vertex.inputs[p]]
            stay = copies.get(value.ref)
            everywhere = all(q in vertex.may_inplace for q, ref in enumerate(vertex.inputs) if ref == value.ref)
            last = value.use_after(position) == value.after_last
            if stay is None or stay.permanent or not everywhere or not last or value.size < vertex.sizes[0]:
                continue
            memory.held.pop(value.ref, None)
            value.stay = None
            value.reserved = False
            return stay
        return None

    def _overwrite(self, position: int, vertex: Vertex, copies: Mapping[Ref, Stay]) -> Stay:
        assert vertex.inplace is not None
        memory = self.memories[vertex.device]
        value = self.values[vertex.inputs[vertex.inplace]]
        stay = copies[value.ref]
        resident = stay.permanent and value.host == value.ref
        if resident or (value.use_after(position) != value.after_last and (stay.permanent or value.out)):
            return memory.sim_malloc_copy(value)
        if value.use_after(position) != value.after_last and value.host is None:
            memory.sim_malloc_offload(value)
        memory.held.pop(value.ref, None)
        value.stay = None
        value.reserved = False
        return stay


class _Reads:
    """Who reads what on one device, by position; the virtual end vertex included."""

    def __init__(self, order: Sequence[Vertex], values: dict[Ref, Value], device: int) -> None:
        by_position: dict[int, list[Value]] = {}
        for value in values.values():
            if value.device == device and value.size and not value.external:
                for position in value.uses:
                    by_position.setdefault(position, []).append(value)
        self.positions = sorted(by_position)
        self.values = [by_position[position] for position in self.positions]
        self.failed = (-1, -1)

    def look_ahead(self, memory: DeviceMemory, limit: int) -> None:
        """Advance ``alloc_horizon`` up to ``limit`` while what the vertices there miss finds room without eviction."""
        memory.alloc_horizon = max(memory.alloc_horizon, memory.exec_horizon)
        if self.failed == (memory.alloc_horizon, memory.space.version):
            return
        index = bisect_left(self.positions, memory.alloc_horizon)
        while index < len(self.positions) and self.positions[index] <= limit:
            memory.alloc_horizon = self.positions[index]
            for value in self.values[index]:
                missing = value.stay is None and (value.host is not None or value.cached is not None)
                if missing and not memory.sim_malloc_reload(value, force=False):
                    self.failed = (memory.alloc_horizon, memory.space.version)
                    return
            index += 1
        memory.alloc_horizon = limit + 1
