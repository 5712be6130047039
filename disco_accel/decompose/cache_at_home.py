"""Keys and values in host memory: a forward loads them for its attention, and writes the new rows where they lie.

A kernel writes the new rows over the loaded copy too, so that the attention reads what eager's reads. The rows alone go
back: a *host device* writes them to the user's memory, behind the load. Tensors that a forward makes leave whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from disco_accel.capture.captured_step import CapturedStep, InputBinding, InputSource
from disco_accel.errors import CaptureError
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.spaces import Space, SpaceKind
from disco_accel.graph.taskgraph import OpCall, OpResult, Ref, TaskGraph, Vertex, VertexKind, tensor_args
from disco_accel.graph.traits import MADE_FOREIGN
from disco_accel.graph.values import is_foreign

LEAVES = "leave"
"""The op of a transfer that takes a whole tensor home."""

_SMALL_VALUES = 1 << 20
"""Bytes of a host device's memory for scratch."""

_HELD, _FEWER = 4, 2
"""Loads that have memory on the device at a time: keys and values of two layers, or of one, whose next wait for it."""


def with_cache_at_home(captured: CapturedStep, names: Collection[str]) -> CapturedStep:
    """Return ``captured``, a forward alone, with the tensors ``names`` in host memory: those of the batch that it may
    change in place, and those that it makes outside.

    Raises:
        CaptureError: a kernel changes one of them otherwise than by ``index_copy_``, or several do.
    """
    of = {binding.vertex: binding for binding in captured.bindings if binding.name in names}
    if not of:
        return captured
    walk = _AtHome(captured.graph, of)
    graph = walk.run()
    bindings = tuple(replace(b, vertex=walk.leaving.get(b.vertex, b.vertex)) for b in captured.bindings)
    effect = "keys and values stay in host memory, and new rows are written there"
    return captured.rewritten("cache at home", effect, graph, bindings=bindings)


class _AtHome:
    """Walks ``graph`` in its order. Kernels keep their ids. ``leaving``: INPUT that a kernel writes a whole tensor to →
    the transfer that does so now."""

    def __init__(self, graph: TaskGraph, of: Mapping[int, InputBinding]) -> None:
        self._graph, self._of = graph, of
        self._host = max(device.id for device in graph.devices) + 1
        self._fresh = itertools.count(max(vertex.id for vertex in graph.vertices) + 1)
        self._sizes = {(vertex.id, k): size for vertex in graph.vertices for k, size in enumerate(vertex.sizes)}
        self._vertices: list[Vertex] = []
        self._calls = dict(graph.ops)
        self._loads: dict[int, Vertex] = {}
        """INPUT → its load."""
        self._on_device: dict[Ref, Ref] = {}
        """INPUT's value → its last version on the device."""
        self._at_host: dict[Ref, Ref] = {}
        """Value of the device → its copy on the host device."""
        self.leaving: dict[int, int] = {}

    def run(self) -> TaskGraph:
        for vertex in self._graph.vertices:
            if vertex.kind is VertexKind.INPUT and vertex.id in self._of:
                self._input(vertex)
                continue
            inputs = tuple(ref for ref in vertex.inputs if ref[0] in self._of)
            outside = [ref for ref in inputs if self._of[ref[0]].source is InputSource.OUTSIDE]
            if outside:
                self._leave(vertex, outside[0][0])
            elif any(self._changes(vertex, ref) for ref in inputs):
                self._write(vertex)
            else:
                self._vertices.append(self._on_loads(vertex))
        unit = self._graph.devices[0].alignment
        own = (vertex for vertex in self._vertices if vertex.space == self._host and not is_foreign(vertex))
        room = sum(-(-size // unit) * unit for vertex in own for size in vertex.sizes)
        host = Space(self._host, room + _SMALL_VALUES, unit, SpaceKind.HOST)
        backing = tuple(space for space in self._graph.spaces if space.id < 0)
        spaces = (*self._graph.devices, host, *backing)
        graph = replace(self._graph, spaces=spaces, vertices=tuple(self._vertices), ops=self._calls)
        return _with_loads(graph, list(self._loads.values()), _HELD)

    def _input(self, vertex: Vertex) -> None:
        if self._of[vertex.id].source is InputSource.OUTSIDE:
            return
        self._vertices.append(replace(vertex, space=self._host))
        ref = (vertex.id, 0)
        load = Vertex(next(self._fresh), VertexKind.COPY, vertex.space, "load", (ref,), vertex.sizes, source=self._host)
        self._loads[vertex.id] = load
        self._on_device[ref] = (load.id, 0)

    def _on_loads(self, vertex: Vertex) -> Vertex:
        return replace(vertex, inputs=tuple(self._on_device.get(ref, ref) for ref in vertex.inputs))

    def _changes(self, vertex: Vertex, ref: Ref) -> bool:
        """Whether the kernel writes to the INPUT ``ref``. Raises CaptureError if it does so otherwise than this file
        knows."""
        call = self._calls[vertex.id]
        written = next(tensor_args(call.args))
        if vertex.inputs[written.input] != ref or not (vertex.out and call.name.endswith("_")):
            return False
        first = self._on_device[ref] == (self._loads[ref[0]].id, 0)
        if call.name != "aten::index_copy_" or not first or len(vertex.inputs) != len(list(tensor_args(call.args))):
            raise CaptureError(
                f"{self._of[ref[0]].name}: {call.name} in module {call.module or '?'} changes keys or values, which "
                "a plan does in host memory with one index_copy_ alone; make a StaticCache without offloading"
            )
        return True

    def _write(self, vertex: Vertex) -> None:
        """On the device over the load, and at home."""
        call, home = self._calls[vertex.id], next(ref for ref in vertex.inputs if ref[0] in self._of)
        written = next(tensor_args(call.args))
        load = self._loads[home[0]]
        result = (OpResult(0, written.spec),)
        self._calls[vertex.id] = replace(call, results=result)
        on_device = self._on_loads(vertex)
        self._vertices.append(
            replace(on_device, sizes=load.sizes, out=False, keep=False, inplace=((0, written.input),))
        )
        self._on_device[home] = (vertex.id, 0)
        inputs = tuple(ref if ref == home else self._to_host(ref, vertex.space) for ref in vertex.inputs)
        id_ = next(self._fresh)
        self._calls[id_] = call
        # As readers of the home that come before, the load reads what is there before the write.
        self._vertices.append(replace(vertex, id=id_, space=self._host, inputs=inputs, after=(load.id,)))

    def _leave(self, vertex: Vertex, outside: int) -> None:
        """A kernel that copies a value to an INPUT of the user's memory becomes a transfer."""
        call = self._calls.pop(vertex.id)
        _, source = list(tensor_args(call.args))[:2]
        ref = self._on_device.get(vertex.inputs[source.input], vertex.inputs[source.input])
        size = self._sizes[outside, 0]
        if self._sizes[vertex.inputs[source.input]] != size or source.spec.offset or not _same(call):
            raise CaptureError(
                f"{self._of[outside].name}: lies in memory of others; make a StaticCache without offloading"
            )
        copy = replace(vertex, kind=VertexKind.COPY, op=LEAVES, inputs=(ref,), sizes=(size,), space=self._host)
        self._vertices.append(replace(copy, source=vertex.space, traits=MADE_FOREIGN, keep=False))
        self.leaving[outside] = vertex.id

    def _to_host(self, ref: Ref, device: int) -> Ref:
        if ref not in self._at_host:
            copy = Vertex(
                next(self._fresh), VertexKind.COPY, self._host, "to_host", (ref,), (self._sizes[ref],), source=device
            )
            self._vertices.append(copy)
            self._at_host[ref] = (copy.id, 0)
        return self._at_host[ref]


def _same(call: OpCall) -> bool:
    """Whether both tensors of a copy lie in the same way."""
    target, source = list(tensor_args(call.args))[:2]
    return target.spec == source.spec


def _is_load(vertex: Vertex, foreign: Collection[int]) -> bool:
    return is_transfer(vertex) and vertex.inputs[0][0] in foreign


def frugal_loads(graph: TaskGraph) -> TaskGraph | None:
    """``graph`` with its loads of keys and values later in its order, where they need less memory; None if it has
    none."""
    hosts = host_devices(graph.devices)
    foreign = {v.id for v in graph.vertices if v.kind is VertexKind.INPUT and is_foreign(v) and v.space in hosts}
    loads = [vertex for vertex in graph.vertices if _is_load(vertex, foreign)]
    return _with_loads(graph, loads, _FEWER) if loads else None


def _with_loads(graph: TaskGraph, loads: Sequence[Vertex], held: int) -> TaskGraph:
    """``graph`` with each of ``loads`` behind the last reader of the one that is ``held`` loads before it."""
    ids = {load.id for load in loads}
    vertices = [vertex for vertex in graph.vertices if vertex.id not in ids]
    value_of = {(load.id, 0): load.id for load in loads}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, vertex in enumerate(vertices):
        for read in {value_of[ref] for ref in vertex.inputs if ref in value_of}:
            first.setdefault(read, position)
            last[read] = position
            if any(value_of.get(vertex.inputs[at]) == read for _, at in vertex.inplace):
                value_of[vertex.id, 0] = read
    begin = next(position for position, vertex in enumerate(vertices) if vertex.kind is not VertexKind.INPUT)
    turns = sorted(loads, key=lambda load: first.get(load.id, len(vertices)))
    behind: dict[int, list[Vertex]] = {}
    for number, load in enumerate(turns):
        before = begin - 1 if number < held else last.get(turns[number - held].id, begin - 1)
        # A load comes before its own reader in any case.
        before = min(before, first.get(load.id, len(vertices)) - 1)
        behind.setdefault(before, []).append(load)
    placed = [each for at, vertex in enumerate(vertices) for each in (vertex, *behind.get(at, ()))]
    return replace(graph, vertices=tuple(placed))
