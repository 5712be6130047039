"""BUILDMEMGRAPH (Figure 10): from a TaskGraph to a plan that fits, for variable sizes.

The serial order is walked with two horizons. A vertex gets the memory of its outputs when ``exec_horizon`` reaches it;
copies from the host are placed up to ``alloc_horizon``, as far ahead as memory allows. Every free byte remembers which
vertices must finish before it is reused; these become the memory edges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace

from disco_accel.graphcheck import after_gate
from disco_accel.memgraph import MemGraph, Slot
from disco_accel.plan.evict import Policy
from disco_accel.plan.finish import assemble
from disco_accel.plan.sim_malloc import DeviceMemory, Infeasible, PlanLog, Repairs, taken_release
from disco_accel.plan.stay import Stay, Value
from disco_accel.taskgraph import Ref, TaskGraph, Vertex, VertexKind


def serial_order(graph: TaskGraph) -> tuple[Vertex, ...]:
    """Return the vertices in the order that is planned for: inputs first, and nothing behind the gate before an out.

    A late value arrives only after every ``out`` vertex, so memory freed behind the gate must not serve before it.
    """
    behind = after_gate(graph.vertices)
    inputs = [vertex for vertex in graph.vertices if vertex.kind is VertexKind.INPUT]
    rest = [vertex for vertex in graph.vertices if vertex.kind is not VertexKind.INPUT]
    last_out = max((index for index, vertex in enumerate(rest) if vertex.out), default=-1)
    head, tail = rest[: last_out + 1], rest[last_out + 1 :]
    early = [vertex for vertex in head if vertex.id not in behind]
    return (*inputs, *early, *(vertex for vertex in head if vertex.id in behind), *tail)


def build(
    graph: TaskGraph,
    policy: Policy,
    *,
    lookahead: int | None = None,
    residents: Collection[int] = (),
    cyclic: bool = False,
    repairs: Repairs | None = None,
) -> MemGraph:
    """Return a plan of ``graph`` within the memory of its devices.

    ``lookahead``: how many vertices ahead of execution copies may be placed (None: no limit). ``residents``: ids of
    clean inputs on the device when the step starts; in a ``cyclic`` plan they stay for good. Raises Infeasible.
    """
    return _Builder(graph, policy, lookahead, residents, cyclic, repairs or Repairs()).run()


class _Builder:
    def __init__(
        self,
        graph: TaskGraph,
        policy: Policy,
        lookahead: int | None,
        residents: Collection[int],
        cyclic: bool,
        repairs: Repairs,
    ) -> None:
        self.graph = graph
        self.order = serial_order(graph)
        self.lookahead = len(self.order) if lookahead is None else lookahead
        self.residents = frozenset(residents)
        self.cyclic = cyclic
        self.repairs = repairs
        self.log = PlanLog(self.order)
        self.slots: dict[Ref, Slot] = {}
        self.memories = {device.id: DeviceMemory(device, policy, repairs, self.log) for device in graph.devices}
        self.values = self._values()
        self.reads = {device.id: _Reads(self.order, self.values, device.id) for device in graph.devices}

    def run(self) -> MemGraph:
        """Walk the serial order and return the finished plan."""
        self._place_inputs()
        for position, vertex in enumerate(self.order):
            if vertex.kind is VertexKind.INPUT:
                continue
            for device, memory in self.memories.items():
                memory.exec_horizon = position
                memory.pinned.clear()
                self.reads[device].look_ahead(memory, position + self.lookahead)
            self._execute(position, vertex)
        for device, memory in self.memories.items():
            memory.exec_horizon = len(self.order)
            memory.pinned.clear()
            self.reads[device].look_ahead(memory, len(self.order))
        return assemble(self.graph, self.log, self.slots, self.values, cyclic=self.cyclic)

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
        return values

    def _place_inputs(self) -> None:
        """Give an address to all that is on the device when the step starts; what stays for good lies at the top."""
        inputs = [vertex for vertex in self.order if vertex.kind is VertexKind.INPUT]
        start_here = [v for v in inputs if v.sizes[0] and not v.external and (not v.clean or v.id in self.residents)]

        def stays(vertex: Vertex) -> bool:
            return vertex.late or (vertex.clean and self.cyclic)

        for vertex in sorted(start_here, key=lambda v: not stays(v)):
            memory = self.memories[vertex.device]
            value = self.values[vertex.id, 0]
            window = memory.space.highest_fit(memory.block(value.size))
            if window is None:
                raise Infeasible(0)
            stay = memory.stay_at(value, memory.space.take(window.start, window.end))
            stay.newest = -1
            stay.permanent = stays(vertex)
            value.stay = stay
            self.slots[value.ref] = Slot(vertex.device, stay.addr, value.size)
            if not vertex.clean:
                memory.held[value.ref] = stay
        for vertex in start_here:
            self.memories[vertex.device].retire(self.values[vertex.id, 0])

    def _execute(self, position: int, vertex: Vertex) -> None:
        inputs = [self.values[ref] for ref in dict.fromkeys(vertex.inputs)]
        local = [value for value in inputs if value.size and not value.external]
        for value in local:
            self.memories[value.device].pinned.add(value.ref)
        copies: dict[Ref, Stay] = {}
        for value in local:
            if value.stay is None:
                self.memories[value.device].sim_malloc_reload(value, force=True)
            assert value.stay is not None
            copies[value.ref] = value.stay
        refs = [copies[ref].ref if ref in copies else ref for ref in vertex.inputs]
        release: list[int] = []
        outputs = self._outputs(position, vertex, copies, refs, release)
        self.log.add(replace(vertex, inputs=tuple(refs)), release)
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

    def _outputs(
        self, position: int, vertex: Vertex, copies: dict[Ref, Stay], refs: list[Ref], release: list[int]
    ) -> list[Stay]:
        """Place the outputs of ``vertex``; ``refs`` and ``release`` are completed on the way."""
        memory = self.memories[vertex.device]
        outputs: list[Stay] = []
        for k, size in enumerate(vertex.sizes):
            if size == 0:
                continue
            value = self.values[vertex.id, k]
            over = self._overwritten(position, vertex, copies, refs) if k == 0 else None
            if over is not None:
                stay = Stay(value, value.ref, over.addr, over.block, vertex.id, position, permanent=over.permanent)
                release.extend(over.readers)
            else:
                taken = memory.sim_malloc(size)
                release.extend(taken_release(taken, self.repairs))
                stay = memory.stay_at(value, taken)
                stay.producer = vertex.id
            stay.born = position
            outputs.append(stay)
            self.slots[value.ref] = Slot(vertex.device, stay.addr, size)
        return outputs

    def _overwritten(self, position: int, vertex: Vertex, copies: dict[Ref, Stay], refs: list[Ref]) -> Stay | None:
        """Return the copy that output 0 of ``vertex`` is written over, if any; the device loses its value."""
        if vertex.inplace is not None:
            return self._overwrite(position, vertex, copies, refs)
        memory = self.memories[vertex.device]
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

    def _overwrite(self, position: int, vertex: Vertex, copies: dict[Ref, Stay], refs: list[Ref]) -> Stay:
        assert vertex.inplace is not None
        memory = self.memories[vertex.device]
        value = self.values[vertex.inputs[vertex.inplace]]
        stay = copies[value.ref]
        resident = stay.permanent and value.host == value.ref
        if resident or (value.use_after(position) != value.after_last and (stay.permanent or value.out)):
            stay = memory.sim_malloc_copy(value)
            refs[vertex.inplace] = stay.ref
            return stay
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
