"""Runs of pointwise kernels in a task graph, each joined into one vertex.

A run is a set of kernels that read each other's results, or the same value, at neighbouring places of the serial order.
Its vertex reads the run's inputs once and writes the results that other vertices read; the rest never lies in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from disco_accel.fuse.call_json import kernel_text
from disco_accel.fuse.value_views import view_of
from disco_accel.graph.check import after_gate
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import (
    Arg,
    OpCall,
    OpResult,
    Ref,
    TaskGraph,
    TensorArg,
    TensorSpec,
    Vertex,
    VertexKind,
    tensor_args,
)
from disco_accel.graph.values import is_foreign, is_handed_out, overwrites

FUSED = "disco_accel::fused"
"""The name of the call of a run; its ``body`` has the calls that it joins."""
_MOST_TENSORS = 24
"""Inputs and outputs of a run: arguments of one kernel."""
_MOST_CALLS = 64
_NEIGHBOURS = 96
"""Places of the serial order between the first and the last kernel of a run: a wider one keeps inputs for longer. A
layer of a LoRA step has 150."""


NOT_WRITTEN = -1
"""The output of a call of a body whose result no other vertex reads."""


@dataclass
class _Run:
    """``members`` in serial order; ``place`` in the order, of which each external input is in front, and each external
    reader behind."""

    members: list[int]
    place: float


Kind = tuple[str, str, tuple[str, ...]]
"""Of calls that compute alike: name, overload, data types of the tensors and the result, and a function's numbers."""


def kind_of(call: OpCall) -> Kind:
    """The kind of a call that may be in a run."""
    dtypes = *(arg.spec.dtype for arg in tensor_args(call.args)), _spec(call).dtype
    # x ** 3 is computed otherwise than x ** 2, and gelu with tanh otherwise than without.
    numbers = (
        [repr(arg) for arg in call.args if not isinstance(arg, TensorArg)] if op_traits(call.name).function else []
    )
    return call.name, call.overload, (*dtypes, *numbers)


@dataclass
class _Graph:
    """Lookups in a task graph. ``apart``: kinds of calls that are in no run."""

    graph: TaskGraph
    apart: Collection[Kind]
    by_id: dict[int, Vertex] = field(init=False)
    behind: set[int] = field(init=False)
    place: dict[int, float] = field(init=False)
    readers: dict[int, list[int]] = field(init=False)
    waiting: dict[int, list[int]] = field(init=False)
    run_of: dict[int, _Run] = field(init=False)
    writer: dict[Ref, int] = field(init=False)
    """Value → the kernel that writes over it."""
    hosts: frozenset[int] = field(init=False)
    _serial: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.by_id = {vertex.id: vertex for vertex in self.graph.vertices}
        self.behind = after_gate(self.graph.vertices)
        self._serial = {vertex.id: i for i, vertex in enumerate(self.graph.vertices)}
        self.place = {id_: float(i) for id_, i in self._serial.items()}
        self.readers = {id_: [] for id_ in self.by_id}
        self.waiting = {id_: [] for id_ in self.by_id}
        self.writer, self.hosts = {}, host_devices(self.graph.devices)
        for vertex in self.graph.vertices:
            self.writer.update((ref, vertex.id) for _, ref in overwrites(vertex))
            for producer in dict.fromkeys(producer for producer, _ in vertex.inputs):
                self.readers[producer].append(vertex.id)
            for before in vertex.after:
                self.waiting[before].append(vertex.id)
        self.run_of = {}
        for vertex in self.graph.vertices:
            if self._joins(vertex):
                self.run_of[vertex.id] = _Run([vertex.id], self.place[vertex.id])

    def spec(self, id_: int) -> TensorSpec:
        """The layout of the result of a kernel that may be in a run."""
        return _spec(self.graph.ops[id_])

    def serial(self, id_: int) -> int:
        """The place of a vertex in the serial order."""
        return self._serial[id_]

    def _joins(self, vertex: Vertex) -> bool:
        call = self.graph.ops.get(vertex.id)
        if vertex.kind is not VertexKind.KERNEL or call is None or call.rng is not None or vertex.inplace:
            return False
        if not op_traits(call.name).fuses or is_handed_out(vertex) or vertex.space in self.hosts:
            return False
        if any(is_foreign(self.by_id[producer]) for producer, _ in vertex.inputs):
            # Kernels are compiled for addresses that a plan chooses: a user's may be aligned otherwise.
            return False
        # A further output is scratch.
        if len(call.results) != 1 or len(vertex.sizes) != 1 or call.results[0] is None:
            return False
        return kind_of(call) not in self.apart


def _spec(call: OpCall) -> TensorSpec:
    result = call.results[0]
    assert result is not None
    return result.spec


class _Joining:
    """Joins runs as long as the graph stays without a circle: every edge goes forward in ``place``."""

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph

    def run(self) -> list[_Run]:
        graph = self.graph
        for vertex in graph.graph.vertices:
            if vertex.id in graph.run_of:
                for producer in sorted({p for p, _ in vertex.inputs}, key=lambda p: -graph.place[p]):
                    self._try(producer, vertex.id)
        for vertex in graph.graph.vertices:
            readers = [reader for reader in graph.readers[vertex.id] if reader in graph.run_of]
            for before, then in itertools.pairwise(readers):
                self._try(before, then)
        runs = {id(run): run for run in graph.run_of.values()}
        return [run for run in runs.values() if len(run.members) > 1]

    def _try(self, first: int, second: int) -> None:
        graph = self.graph
        one, other = graph.run_of.get(first), graph.run_of.get(second)
        if one is None or other is None or one is other:
            return
        if (first in graph.behind) != (second in graph.behind):
            return
        if graph.by_id[first].space != graph.by_id[second].space:
            return
        members = sorted({*one.members, *other.members}, key=self.graph.serial)
        if len(members) > _MOST_CALLS or self.graph.serial(members[-1]) - self.graph.serial(members[0]) > _NEIGHBOURS:
            return
        joined = self._joined(members)
        if joined is None:
            return
        for member in members:
            graph.run_of[member] = joined
            graph.place[member] = joined.place

    def _joined(self, members: list[int]) -> _Run | None:
        graph, inside = self.graph, set(members)
        reads = {ref for member in members for ref in graph.by_id[member].inputs if ref[0] not in inside}
        before = {producer for producer, _ in reads} | {p for m in members for p in graph.by_id[m].after}
        then = {r for m in members for r in (*graph.readers[m], *graph.waiting[m])} - inside
        # A value is read before a kernel writes over it.
        then |= {graph.writer[ref] for ref in reads if ref in graph.writer}
        written = [m for m in members if any(reader not in inside for reader in graph.readers[m])]
        if len(reads) + len(written) > _MOST_TENSORS:
            return None
        if len({math.prod(graph.spec(member).shape) for member in written}) != 1:
            return None
        if before & inside or not all(self._is_seen(member, inside) for member in members):
            return None
        begin = max((graph.place[producer] for producer in before), default=-1.0)
        end = min(graph.place[reader] for reader in then)
        last = float(self.graph.serial(members[-1]))
        place = last if last < end else (begin + end) / 2
        if not begin < place < end:
            return None
        return _Run(members, place)

    def _is_seen(self, member: int, inside: set[int]) -> bool:
        """Whether the kernel can read the results of others of its run without memory behind them."""
        graph = self.graph
        vertex = graph.by_id[member]
        for arg in tensor_args(graph.graph.ops[member].args):
            producer, _ = vertex.inputs[arg.input]
            if producer in inside and view_of(graph.spec(producer), arg.spec) is None:
                return False
        return True


FusedCost = tuple[float, tuple[int, ...]]
"""Of a fused kernel: its seconds, and the numbers of its arguments that output 0 may be written over."""

Costs = Callable[[OpCall], FusedCost | None]
"""The cost of the kernel of a run; None where there is no such kernel."""


class _Runs:
    """The runs of ``graph``; calls of the kinds ``apart`` are in none."""

    def __init__(self, graph: TaskGraph, apart: Collection[Kind]) -> None:
        self.graph, self.apart = graph, frozenset(apart)
        self._known = _Graph(graph, self.apart)
        runs = _Joining(self._known).run()
        self._made = [(run, *_vertex(self._known, run)) for run in runs]

    @property
    def calls(self) -> dict[str, OpCall]:
        """A call of each kernel, by ``kernel_text``."""
        return {kernel_text(call): call for _, _, call, _ in self._made}

    @property
    def seconds(self) -> float:
        """Of a step in all runs."""
        return sum(vertex.duration or 0.0 for _, vertex, _, _ in self._made)

    def joined(self, costs: Costs) -> TaskGraph:
        """The graph with its runs joined. One stays apart where it has no kernel, or a kernel that takes longer than
        the run's own."""
        known, graph = self._known, self.graph
        vertices: list[tuple[float, Vertex]] = []
        ops = dict(graph.ops)
        moved: dict[Ref, Ref] = {}
        joined_in: dict[int, int] = {}
        for run, vertex, call, refs in self._made:
            cost = costs(call)
            if cost is None or cost[0] >= (vertex.duration or math.inf):
                continue
            over = tuple(sorted(arg.input for arg in map(call.args.__getitem__, cost[1]) if isinstance(arg, TensorArg)))
            for member in run.members:
                del ops[member]
            joined_in.update(dict.fromkeys(run.members, vertex.id))
            ops[vertex.id] = call
            moved.update(refs)
            vertices.append((run.place, replace(vertex, duration=cost[0], may_inplace=over)))
        vertices += [(known.place[v.id], v) for v in graph.vertices if v.id not in joined_in]
        vertices.sort(key=lambda pair: pair[0])
        ordered = tuple(_moved(vertex, moved, joined_in) for _, vertex in vertices)
        return replace(graph, vertices=ordered, ops=ops)


def runs_of(graph: TaskGraph, apart: Collection[Kind] = ()) -> _Runs:
    """The runs of ``graph``. Calls of the kinds ``apart`` are in none."""
    return _Runs(graph, apart)


def fused_runs(graph: TaskGraph, costs: Costs, apart: Collection[Kind] = ()) -> TaskGraph:
    """Return ``graph`` with its runs joined, as ``runs_of`` has them."""
    return runs_of(graph, apart).joined(costs)


def _moved(vertex: Vertex, moved: Mapping[Ref, Ref], joined_in: Mapping[int, int]) -> Vertex:
    if not any(ref in moved for ref in vertex.inputs) and not any(id_ in joined_in for id_ in vertex.after):
        return vertex
    after = dict.fromkeys(joined_in.get(id_, id_) for id_ in vertex.after)
    return replace(vertex, inputs=tuple(moved.get(ref, ref) for ref in vertex.inputs), after=tuple(after))


def _vertex(known: _Graph, run: _Run) -> tuple[Vertex, OpCall, dict[Ref, Ref]]:
    """The vertex of ``run`` with the id of its last member, its call, and the new name of each value it hands on."""
    inside, own = set(run.members), run.members[-1]
    written = [m for m in run.members if any(reader not in inside for reader in known.readers[m])]
    refs: dict[Ref, Ref] = {(member, 0): (own, output) for output, member in enumerate(written)}
    inputs, call = _call(known, run, refs)
    after = dict.fromkeys(p for m in run.members for p in known.by_id[m].after)
    vertex = replace(
        known.by_id[own],
        op=FUSED,
        inputs=inputs,
        sizes=tuple(known.by_id[m].sizes[0] for m in written),
        duration=sum(known.by_id[m].duration or 0.0 for m in run.members),
        after=tuple(after),
        may_inplace=(),
    )
    return vertex, call, refs


def _call(known: _Graph, run: _Run, refs: Mapping[Ref, Ref]) -> tuple[tuple[Ref, ...], OpCall]:
    """The inputs of the vertex of ``run``, and its call; ``refs``: written results, with their new names."""
    number = {member: i for i, member in enumerate(run.members)}
    reads: dict[tuple[Ref, TensorSpec], int] = {}
    for member in run.members:
        vertex = known.by_id[member]
        for arg in tensor_args(known.graph.ops[member].args):
            if vertex.inputs[arg.input][0] not in number:
                reads.setdefault((vertex.inputs[arg.input], arg.spec), len(reads))
    inputs = tuple(dict.fromkeys(ref for ref, _ in reads))
    body, results = [], []
    for member in run.members:
        vertex, call, spec = known.by_id[member], known.graph.ops[member], known.spec(member)

        def inner(arg: Arg, vertex: Vertex = vertex) -> Arg:
            if isinstance(arg, TensorArg):
                ref = vertex.inputs[arg.input]
                own = number.get(ref[0])
                return TensorArg(reads[ref, arg.spec] if own is None else len(reads) + own, arg.spec)
            return tuple(inner(item) for item in arg) if isinstance(arg, tuple) else arg

        written = refs.get((member, 0))
        result = OpResult(NOT_WRITTEN if written is None else written[1], spec)
        if written is not None:
            results.append(result)
        body.append(replace(call, args=tuple(inner(arg) for arg in call.args), results=(result,), module=""))
    args = tuple(TensorArg(inputs.index(ref), spec) for ref, spec in reads)
    module = known.graph.ops[run.members[-1]].module
    return inputs, OpCall(FUSED, "default", args, tuple(results), module, body=tuple(body))
