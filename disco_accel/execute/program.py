"""MemGraph to the engine's flat tables: addresses of values, calls of kernels, ends of copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from disco_accel.errors import ExecutionError
from disco_accel.execute.addresses import Addresses, Memory
from disco_accel.execute.planned_states import PlannedStates, planned_states
from disco_accel.execute.varying_kernels import _EncodedCall
from disco_accel.graph.carried_values import taskgraph_of
from disco_accel.graph.check import after_gate
from disco_accel.graph.copies import is_resident_range, is_transfer, ranged_values, swaps_out
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import NAME_OF, TO_HOST, routes
from disco_accel.graph.taskgraph import OpCall, Ref, TaskGraph, Vertex, VertexKind, is_fused, tensor_args
from disco_accel.graph.values import (
    arrives_at_gate,
    changes_over_steps,
    handed_out_at_gate,
    host_copy_exists,
    is_foreign,
    outlives_step,
)
from disco_accel.measure.record import OpRecord
from disco_accel.native.engine_class import OpTable
from disco_accel.native.engine_numbers import (
    COPIED_COLUMNS,
    EDGE_COLUMNS,
    VERTEX_COLUMNS,
    CopyLane,
    ResultMode,
    VertexFlag,
)
from disco_accel.native.op_encoding import (
    Encoded,
    dispatcher_overload,
    encode_args,
    encode_fused_call,
    encode_out_call,
    encode_spec,
    label,
)
from disco_accel.threads import interrupts_wait


@dataclass(frozen=True, slots=True)
class Tables:
    """The parts of an engine. int64 with the columns of ``native/engine_numbers.py``: ``vertices``, ``edges`` of
    positions, and ``copied``. ``externals``: id of an external INPUT, or of a transfer to the user's memory, to its
    storage number in the op table. ``planned`` allocations of one step. ``states`` of the plan."""

    vertices: torch.Tensor
    edges: torch.Tensor
    externals: Mapping[int, int]
    copied: torch.Tensor
    planned: int
    states: PlannedStates


class _Storages:
    """Storages of a plan's values by their numbers in the op table ``ops``; kernels of host devices use some values at
    their homes."""

    def __init__(self, graph: MemGraph, ops: OpTable, addresses: Addresses) -> None:
        self._ops, self._addresses = ops, addresses
        on_host = any(device.is_host_device for device in graph.devices)
        task = taskgraph_of(graph) if on_host else TaskGraph(graph.name, (), ())
        self._uses, self._task = HomeUses.of(task), {vertex.id: vertex for vertex in task.vertices}
        self._held = ranged_values(graph)
        self._numbers: dict[tuple[Ref, int], int] = {}
        self._homes: dict[int, int] = {}
        self.externals: dict[int, int] = {}
        """Id of a vertex whose memory is the user's → its storage."""

    def home_read(self, vertex: int, position: int) -> int | None:
        """The INPUT at whose home a kernel uses its input at ``position``; None if it does so in its device's arena."""
        reader = self._task.get(vertex)
        if reader is None or position >= len(reader.inputs) or not self._uses.at_home(reader, reader.inputs[position]):
            return None
        return self._uses.homes[reader.inputs[position]][0]

    def home_written(self, ref: Ref) -> int | None:
        """The INPUT at whose home a kernel writes its output ``ref``; None if it does so in its device's arena."""
        return self._uses.homes[ref][0] if ref in self._uses.written else None

    def put(self, vertex: Vertex) -> None:
        """Entries of the op table from now on are on the device of ``vertex``."""
        if vertex.space in self._uses.hosts:
            self._ops.set_host()
            return
        arena = self._addresses.memory.devices.get(vertex.space)
        if arena is None:
            raise ExecutionError(f"vertex {vertex.id} is on device {vertex.space}, of which there is no memory")
        self._ops.set_device(str(arena.device))

    def add_external(self, vertex: Vertex) -> int:
        self.put(vertex)
        storage = int(self._ops.add_external(vertex.sizes[0]))
        self.externals[vertex.id] = self._numbers[(vertex.id, 0), 0] = storage
        return storage

    def read(self, vertex: Vertex, position: int) -> int:
        """The storage that a kernel reads its input at ``position`` from."""
        home = self.home_read(vertex.id, position)
        if home is not None:
            return self._home_storage(home)
        return self._storage(vertex.inputs[position], self._ranges_behind(vertex, vertex.inputs[position]))

    def written(self, vertex: Vertex, output: int) -> int:
        """The storage that a kernel writes its output to."""
        home = self.home_written((vertex.id, output))
        return self._storage((vertex.id, output)) if home is None else self._home_storage(home)

    def _ranges_behind(self, vertex: Vertex, first: Ref) -> int:
        """Bytes that a kernel reads of a value behind its ``first`` range. Raises ExecutionError unless all ranges lie
        in a row."""
        if not self._held.get(first):
            return 0
        vertices = self._addresses.vertices
        further = [ref for ref in vertex.inputs if vertices[ref[0]].begin and self._held[ref] == self._held[first]]
        address, end = self._addresses.of(first, 0), vertices[first[0]].sizes[first[1]]
        for ref in sorted(set(further), key=lambda ref: vertices[ref[0]].begin):
            source = vertices[ref[0]]
            if source.begin != end or self._addresses.of(ref, 0) != address + end:
                raise ExecutionError(f"vertex {vertex.id} reads ranges of {self._held[first]} that do not lie in a row")
            end += source.sizes[0]
        if end != vertices[self._held[first][0]].sizes[self._held[first][1]]:
            raise ExecutionError(f"vertex {vertex.id} reads {end} bytes of {self._held[first]}, which has more")
        return end - vertices[first[0]].sizes[first[1]]

    def _home_storage(self, vertex: int) -> int:
        storage = self._homes.get(vertex)
        if storage is None:
            home = self._addresses.home_of(vertex)
            storage = self._homes[vertex] = self._ops.add_fixed(home.data_ptr(), home.numel())
        return storage

    def _storage(self, ref: Ref, behind: int = 0) -> int:
        """The storage of ``ref`` and of ``behind`` bytes that follow it."""
        storage = self._numbers.get((ref, behind))
        if storage is None:
            nbytes = self._addresses.vertices[ref[0]].sizes[ref[1]]
            storage = self._ops.add_fixed(self._addresses.of(ref, nbytes) if nbytes else 0, nbytes + behind)
            self._numbers[ref, behind] = storage
        return storage


def lower(
    graph: MemGraph,
    calls: Mapping[int, OpCall],
    records: Mapping[int, OpRecord],
    memory: Memory,
    ops: OpTable,
    shortest: Mapping[int, tuple[OpCall, OpRecord]],
) -> Tables:
    """Fill the op table ``ops`` for ``graph`` and return the tables. ``shortest``: of kernels that depend on a length,
    at the shortest. Raises ExecutionError naming the vertex whose memory or call is missing. Ctrl-C waits for it."""
    with interrupts_wait():
        return _Lowering(graph, calls, records, memory, ops, shortest).run()


class _Lowering:
    """One pass over a MemGraph."""

    def __init__(
        self,
        graph: MemGraph,
        calls: Mapping[int, OpCall],
        records: Mapping[int, OpRecord],
        memory: Memory,
        ops: OpTable,
        shortest: Mapping[int, tuple[OpCall, OpRecord]],
    ) -> None:
        self._graph, self._calls, self._records, self._ops = graph, calls, records, ops
        self._shortest = shortest
        self._addresses = Addresses(graph.slots, {v.id: v for v in graph.vertices}, memory)
        self._storages = _Storages(graph, ops, self._addresses)
        self._positions = {v.id: i for i, v in enumerate(graph.vertices)}
        self._devices = {device.id: i for i, device in enumerate(graph.devices)}
        self._route = routes(graph.spaces)
        self._copied: list[tuple[int, int, int]] = []
        self._planned = 0
        self._states = planned_states(graph)
        self._behind_gate = after_gate(graph.vertices, (*graph.data_edges, *graph.memory_edges))

    def run(self) -> Tables:
        rows = [self._row(vertex) for vertex in self._graph.vertices]
        index = self._positions
        edges = {(index[u], index[v]) for u, v in (*self._graph.data_edges, *self._graph.memory_edges)}
        for vertex in self._graph.vertices:
            edges.update((index[producer], index[vertex.id]) for producer, _ in vertex.inputs)
        # An input that is in place when the step begins holds nobody up; only a late one does.
        waits = [(u, v) for u, v in sorted(edges) if rows[u][0] != VertexKind.INPUT or rows[u][-1] & VertexFlag.LATE]
        return Tables(
            torch.tensor(rows, dtype=torch.int64).reshape(-1, len(VERTEX_COLUMNS)),
            torch.tensor(waits, dtype=torch.int64).reshape(-1, len(EDGE_COLUMNS)),
            self._storages.externals,
            torch.tensor(self._copied, dtype=torch.int64).reshape(-1, len(COPIED_COLUMNS)),
            self._planned,
            self._states,
        )

    def _row(self, vertex: Vertex) -> tuple[int, ...]:
        flags = VertexFlag.LATE if arrives_at_gate(vertex) else VertexFlag(0)
        if handed_out_at_gate(vertex) and vertex.kind is not VertexKind.INPUT:
            flags |= VertexFlag.OUT
        if self._states.version and self._states.changes(vertex):
            flags |= VertexFlag.CHANGES
            if self._reaches_host(vertex):
                flags |= VertexFlag.OUT
        device, lane = self._lane(vertex)
        op, dst, src, nbytes, ns = -1, 0, 0, 0, 0
        if vertex.kind is VertexKind.INPUT:
            dst, src, nbytes = self._input(vertex)
        elif vertex.kind is VertexKind.KERNEL:
            op = self._kernel(vertex)
            # The engine counts kernels in fractions of a millisecond: what is longer than a second is long.
            ns = round(1e9 * min(vertex.duration or 0.0, 1.0))
        else:
            nbytes = vertex.sizes[0]
            dst, src = self._copy(vertex) if nbytes else (0, 0)
        return int(vertex.kind), device, lane, op, dst, src, nbytes, ns, int(flags)

    def _reaches_host(self, vertex: Vertex) -> bool:
        """Whether the vertex writes a host-updated state home, where a caller with the outputs finds it."""
        if not swaps_out(vertex) or vertex.id in self._behind_gate:
            return False
        return not outlives_step(self._addresses.vertices[self._states.state[self._states.version[vertex.id, 0]]])

    def _lane(self, vertex: Vertex) -> tuple[int, int]:
        """Where the vertex runs: the position of a device, and which of its lanes a copy takes (-1: none)."""
        if vertex.kind is not VertexKind.COPY:
            return self._devices[vertex.space], -1
        route = NAME_OF[self._route(vertex.source, vertex.space)].upper()
        if route not in CopyLane.__members__:
            raise ExecutionError(
                f"vertex {vertex.id} copies from space {vertex.source} to space {vertex.space}: the engine copies "
                "between devices and the host alone"
            )
        lane = CopyLane[route]
        return self._devices[vertex.space if lane is CopyLane.H2D else vertex.source], lane

    def _input(self, vertex: Vertex) -> tuple[int, int, int]:
        if is_resident_range(vertex):
            return (
                self._addresses.of((vertex.id, 0), vertex.sizes[0]),
                self._addresses.clean_bytes(vertex),
                vertex.sizes[0],
            )
        if is_foreign(vertex):
            self._storages.add_external(vertex)
            return 0, 0, 0
        if arrives_at_gate(vertex):
            raise ExecutionError(f"input {vertex.id} is late but not external: nobody can deliver it")
        if not host_copy_exists(vertex):
            raise ExecutionError(f"input {vertex.id} is neither clean nor external: nobody holds its value")
        if not outlives_step(vertex) and vertex.sizes[0] and (vertex.id, 0) in self._graph.slots:
            raise ExecutionError(
                f"the plan has input {vertex.id} on the device when a step starts, but the host renews it between two "
                "steps: each step has to reload it"
            )
        if changes_over_steps(vertex):
            if (vertex.id, 0) not in self._graph.slots:
                return 0, 0, 0
            return (
                self._addresses.of((vertex.id, 0), vertex.sizes[0]),
                self._addresses.home(vertex.id, vertex),
                vertex.sizes[0],
            )
        held = self._addresses.memory.clean.get(vertex.id)
        if held is None or held.numel() * held.element_size() != vertex.sizes[0]:
            got = "no host bytes" if held is None else f"{held.numel() * held.element_size()} host bytes"
            raise ExecutionError(f"clean input {vertex.id} needs {vertex.sizes[0]} host bytes, it was given {got}")
        if (vertex.id, 0) not in self._graph.slots:
            return 0, 0, 0
        return self._addresses.of((vertex.id, 0), vertex.sizes[0]), held.data_ptr(), vertex.sizes[0]

    def _copy(self, vertex: Vertex) -> tuple[int, int]:
        ref, nbytes = vertex.inputs[0], vertex.sizes[0]
        state = self._states.state_of((vertex.id, 0))
        if swaps_out(vertex):
            home = self._addresses.on_host(vertex.id, nbytes) if state is None else self._addresses.home(state, vertex)
            return home, self._addresses.of(ref, nbytes)
        source = self._addresses.vertices[ref[0]]
        if is_transfer(vertex):
            return self._transfer(vertex, source)
        target = self._addresses.of((vertex.id, 0), nbytes)
        if state is not None:
            return target, self._addresses.home(state, vertex)
        if swaps_out(source):
            if vertex.begin < 0 or vertex.begin + nbytes > source.sizes[0]:
                raise ExecutionError(f"reload {vertex.id} reads bytes that offload {source.id} has not written")
            return target, self._addresses.on_host(source.id, source.sizes[0]) + vertex.begin
        return target, self._addresses.clean_bytes(vertex)

    def _transfer(self, vertex: Vertex, source: Vertex) -> tuple[int, int]:
        ref, nbytes, position = vertex.inputs[0], vertex.sizes[0], self._positions[vertex.id]
        addresses = [
            0 if is_foreign(each) else self._addresses.of(place, nbytes)
            for each, place in ((vertex, (vertex.id, 0)), (source, ref))
        ]
        if is_foreign(source):
            self._copied.append((self._storages.externals[source.id], position, 0))
        if is_foreign(vertex):
            self._copied.append((self._storages.add_external(vertex), position, 1))
        # Any address of the right memory will do until the input is bound: nothing runs before.
        target, read = addresses
        if is_foreign(source) and self._route(vertex.source, vertex.space) == TO_HOST:
            read = self._addresses.memory.devices[vertex.source].data_ptr()
        return target or read, read or target

    def _kernel(self, vertex: Vertex) -> int:
        call, record = self._calls.get(vertex.id), self._records.get(vertex.id)
        if call is None or record is None:
            raise ExecutionError(f"kernel {vertex.id} ({vertex.op}) has no {'call' if call is None else 'record'}")
        self._storages.put(vertex)
        self._check_overwrites(vertex)
        addresses = []
        scratch = (vertex.id, len(vertex.sizes) - 1)
        for allocation in record.allocations:
            base = scratch if allocation.output is None else (vertex.id, allocation.output)
            addresses.append(self._addresses.of(base, allocation.nbytes, allocation.offset))
        loose = (0, 0)
        if record.loose_bytes:
            begin = record.scratch_bytes - record.loose_bytes
            loose = self._addresses.of(scratch, record.loose_bytes, begin), record.loose_bytes
        self._planned += len(addresses)
        try:
            encoded = self._encoded(vertex, call, record)
            op = encoded.add(self._ops, label(call), addresses, loose)
            if call.rng is not None:
                self._ops.set_rng(op, call.rng.slot, call.rng.replay)
            if vertex.id in self._shortest:
                encoded.set_varying(self._ops, op, self._encoded(vertex, *self._shortest[vertex.id]))
        except (ValueError, RuntimeError) as error:
            raise ExecutionError(f"vertex {vertex.id}: {error}") from error
        return op

    def _check_overwrites(self, vertex: Vertex) -> None:
        """An op in place writes to the memory that it reads; the plan's address of its output must be that."""
        for output, position in vertex.inplace:
            nbytes, ref = vertex.sizes[output], vertex.inputs[position]
            homes = self._storages.home_written((vertex.id, output)), self._storages.home_read(vertex.id, position)
            if homes[0] is not None and homes[0] == homes[1]:
                continue
            if nbytes and self._addresses.of((vertex.id, output), nbytes) != self._addresses.of(ref, nbytes):
                raise ExecutionError(
                    f"kernel {vertex.id} writes output {output} over value {ref[1]} of vertex {ref[0]}, but has "
                    "another address for it"
                )

    def _encoded(self, vertex: Vertex, call: OpCall, record: OpRecord) -> _EncodedCall:
        def storage_of(position: int) -> int:
            return self._storages.read(vertex, position)

        sizes = tuple(allocation.nbytes for allocation in record.allocations)
        if record.native_out:
            outputs = {r.output: self._storages.written(vertex, r.output) for r in call.results if r is not None}
            if is_fused(call):
                args = encode_fused_call(call, record.kernel, storage_of, outputs)
                return _EncodedCall(call.name, "", args, (), sizes)
            native = encode_out_call(call, storage_of, outputs)
            if native is None:
                raise ExecutionError(f"{label(call)} was recorded with an out overload that this PyTorch lacks")
            return _EncodedCall(call.name, dispatcher_overload(native[0]), native[1], (), sizes)
        results: list[tuple[int, Encoded]] = []
        placed = {a.output for a in record.allocations} | {output for output, _ in vertex.inplace}
        for result in call.results:
            if result is None or result.output in record.elsewhere:
                results.append((ResultMode.IGNORED.value, ()))
                continue
            mode = ResultMode.PLACED if result.output in placed else ResultMode.COPIED
            results.append((mode.value, encode_spec(self._storages.written(vertex, result.output), result.spec)))
        overload = dispatcher_overload(call.overload)
        return _EncodedCall(call.name, overload, encode_args(call, storage_of), tuple(results), sizes)


def external_dtypes(graph: MemGraph, calls: Mapping[int, OpCall]) -> dict[int, str]:
    """Id of an external value to the dtype that all kernels read it as, where they agree."""
    external = {v.id for v in graph.vertices if is_foreign(v)}
    seen: dict[int, set[str]] = {}
    for vertex in graph.vertices:
        if vertex.id not in calls:
            continue
        for arg in tensor_args(calls[vertex.id].args):
            producer = vertex.inputs[arg.input][0]
            if producer in external:
                seen.setdefault(producer, set()).add(arg.spec.dtype)
    return {vertex: next(iter(dtypes)) for vertex, dtypes in seen.items() if len(dtypes) == 1}
