"""Kernels that compute the same bits: dequantised weights, which forward, recomputation and backward each compute anew.

Value numbering over the kernels that can be reached from read-only inputs alone: two of them are equal if they make the
same call of equal values. A value that is made twice may be kept from its first maker to the readers of the second
(``without``). A planner weighs seconds against bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from disco_accel.graph.check import after_gate, dependencies
from disco_accel.graph.copies import copies_bytes
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import OpCall, TaskGraph, Vertex, VertexKind, tensor_args
from disco_accel.graph.values import is_handed_out, never_changes, overwrites

_PACKED = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
"""Elements of packed weights; those of float8 and float4 begin with that name."""


@dataclass(frozen=True, slots=True)
class Clone:
    """Kernel ``vertex`` computes the bits of ``original``, an earlier one. ``nbytes``: of its values that are read."""

    vertex: int
    original: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Constant:
    """A value that is the same in every step: its ``number``, equal for equal values, its read-only inputs, and whether
    one of these is packed."""

    number: int
    inputs: frozenset[int]
    packed: bool


@dataclass
class _Numbering:
    """``of``: by vertex, all of whose outputs are constant. ``read_by_others``: outputs of those that other kernels
    read; ``read``: those that any reads. ``overwritten``: those that a kernel writes over."""

    graph: TaskGraph
    of: dict[int, _Constant] = field(default_factory=dict)
    read_by_others: dict[int, set[int]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    overwritten: set[int] = field(default_factory=set)
    numbers: dict[object, int] = field(default_factory=dict)

    def run(self) -> _Numbering:
        """Number all vertices, which are in a topological order."""
        ops = self.graph.ops
        for vertex in self.graph.vertices:
            if vertex.kind is VertexKind.INPUT:
                if never_changes(vertex):
                    self.of[vertex.id] = _Constant(self._number(vertex.id), frozenset((vertex.id,)), False)
                continue
            if all(producer in self.of for producer, _ in vertex.inputs):
                call = ops.get(vertex.id)
                if call is not None and _repeatable(vertex, call):
                    self.of[vertex.id] = self._constant(vertex, call)
            own = vertex.id in self.of
            for producer, output in vertex.inputs:
                if producer in self.of:
                    self.read.add(producer)
                    if not own:
                        self.read_by_others.setdefault(producer, set()).add(output)
            self.overwritten.update(ref[0] for _, ref in overwrites(vertex))
        return self

    def _constant(self, vertex: Vertex, call: OpCall) -> _Constant:
        read = [self.of[producer] for producer, _ in vertex.inputs]
        # Text tells 1 from 1.0 and from True, which are equal keys of a table, and 0.0 from -0.0.
        text = repr((call.name, call.overload, call.args, call.results))
        values = tuple((known.number, output) for known, (_, output) in zip(read, vertex.inputs, strict=True))
        inputs = frozenset[int]().union(*(known.inputs for known in read))
        packed = any(known.packed for known in read) or any(
            vertex.inputs[arg.input][0] in inputs and _is_packed(arg.spec.dtype) for arg in tensor_args(call.args)
        )
        number = self._number((text, values, vertex.space, vertex.sizes, vertex.inplace))
        return _Constant(number, inputs, packed)

    def _number(self, key: object) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


def _repeatable(vertex: Vertex, call: OpCall) -> bool:
    """Whether the kernel makes the same bits whenever it runs, and nobody misses it where its values exist already."""
    traits = op_traits(call.name)
    unsure = traits.unordered_on_gpu or traits.scratch_by_value
    return vertex.kind is VertexKind.KERNEL and call.rng is None and not is_handed_out(vertex) and not unsure


def _is_packed(dtype: str) -> bool:
    return dtype in _PACKED or dtype.startswith(("float8", "float4"))


def clones(graph: TaskGraph) -> tuple[Clone, ...]:
    """Return the kernels of ``graph`` that dequantise a weight again, in their order. Their values are made from frozen
    inputs alone, some of them packed, and are larger than those, or unread. Each names the nearest earlier kernel that
    it may be merged into: one that waits for the gate only if it does so itself."""
    numbering = _Numbering(graph).run()
    if not any(known.packed for known in numbering.of.values()):
        return ()
    size = {vertex.id: sum(vertex.sizes) for vertex in graph.vertices if vertex.kind is VertexKind.INPUT}
    behind: Collection[int] | None = None
    equal: dict[int, list[int]] = {}
    found: list[Clone] = []
    for vertex in graph.vertices:
        known = numbering.of.get(vertex.id)
        if known is None or not known.packed or vertex.id in numbering.overwritten:
            continue
        before = equal.setdefault(known.number, [])
        read = numbering.read_by_others.get(vertex.id, ())
        nbytes = sum(vertex.sizes[output] for output in read)
        # Recomputation also fills buffers that nobody reads.
        if before and (nbytes > sum(size[i] for i in known.inputs) or vertex.id not in numbering.read):
            behind = after_gate(graph.vertices) if behind is None else behind
            allowed = [v for v in before if v not in behind or vertex.id in behind]
            if allowed:
                found.append(Clone(vertex.id, allowed[-1], nbytes))
        before.append(vertex.id)
    return tuple(found)


def dequantised(graph: TaskGraph) -> tuple[dict[int, tuple[int, ...]], Collection[int]]:
    """Return the kernels of dequantised weights that other kernels read, each with all of its makers in order, itself
    last. The second result is the vertices with the same values in all steps, which are no such others."""
    numbering = _Numbering(graph).run()
    if not any(known.packed for known in numbering.of.values()):
        return {}, ()
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    place = {id_: number for number, id_ in enumerate(by_id)}
    found: dict[int, tuple[int, ...]] = {}
    for id_, read in numbering.read_by_others.items():
        known = numbering.of[id_]
        larger = sum(by_id[id_].sizes[o] for o in read) > sum(by_id[i].sizes[0] for i in known.inputs)
        if known.packed and larger and id_ not in numbering.overwritten:
            found[id_] = tuple(sorted(_makers(by_id, id_), key=place.__getitem__))
    return found, numbering.of.keys()


def _makers(by_id: Mapping[int, Vertex], last: int) -> set[int]:
    """The kernels that the values of ``last`` are made by."""
    makers, unseen = {last}, [last]
    while unseen:
        for producer, _ in by_id[unseen.pop()].inputs:
            if producer not in makers and by_id[producer].kind is VertexKind.KERNEL:
                makers.add(producer)
                unseen.append(producer)
    return makers


def without(graph: TaskGraph, chosen: Iterable[Clone]) -> TaskGraph:
    """Return ``graph`` without the ``chosen`` ones of its ``clones`` and the kernels that only they read. Their readers
    read the original, and wait by ``after`` for all that a clone waited for: nothing gets in front of the gate."""
    merged = {clone.vertex: original for clone, original in _merged(chosen)}
    return _Removal(graph, merged).run() if merged else graph


def _merged(chosen: Iterable[Clone]) -> Iterator[tuple[Clone, int]]:
    """Yield each clone with the kernel that takes its place, which is no clone itself."""
    originals = {clone.vertex: clone for clone in chosen}
    for clone in originals.values():
        original = clone.original
        while original in originals:
            original = originals[original].original
        yield clone, original


def graph_of_plan(graph: TaskGraph, plan: Iterable[Vertex]) -> TaskGraph | None:
    """Return the graph that a plan with the vertices ``plan`` is a plan of: ``graph``, or that without some of its
    clones. None if there is no such graph."""
    # A planner may give its copies the numbers that clones had.
    planned = {vertex.id for vertex in plan if not copies_bytes(vertex)}
    missing = {vertex.id for vertex in graph.vertices if vertex.id not in planned}
    if not missing:
        return graph
    found = without(graph, (clone for clone in clones(graph) if clone.vertex in missing))
    return found if len(found.vertices) == len(graph.vertices) - len(missing) else None


def left_out(graph: TaskGraph, planned: TaskGraph) -> tuple[Clone, ...]:
    """Return the clones of ``graph`` that ``planned``, made from it, has not."""
    if len(graph.vertices) == len(planned.vertices):
        return ()
    ids = {vertex.id for vertex in planned.vertices}
    return tuple(clone for clone in clones(graph) if clone.vertex not in ids)


def kept(chosen: Iterable[Clone]) -> frozenset[int]:
    """Return the kernels whose values are kept if the ``chosen`` clones are left out."""
    return frozenset(original for clone, original in _merged(chosen) if clone.nbytes)


def kept_bytes(chosen: Iterable[Clone]) -> int:
    """Return the bytes of the values that are kept if the ``chosen`` clones are left out, each value once."""
    nbytes: dict[int, int] = {}
    for clone, original in _merged(chosen):
        nbytes[original] = max(clone.nbytes, nbytes.get(original, 0))
    return sum(nbytes.values())


class _Removal:
    """Takes the clones ``merged`` (clone → the kernel that takes its place) out of ``graph``."""

    def __init__(self, graph: TaskGraph, merged: Mapping[int, int]) -> None:
        self.graph = graph
        self.merged = merged
        self.by_id = {vertex.id: vertex for vertex in graph.vertices}
        self.removed = self._removed()
        self.waits: dict[int, dict[int, None]] = {}
        """Removed kernel → its dependencies that are still there, read-only inputs aside, in order."""

    def _removed(self) -> set[int]:
        """The clones, and their makers without other readers."""
        readers: dict[int, int] = {}
        for vertex in self.graph.vertices:
            for producer in {self.merged.get(producer, producer) for producer, _ in vertex.inputs}:
                readers[producer] = readers.get(producer, 0) + 1
        removed = set(self.merged)
        unread = list(self.merged)
        while unread:
            for producer in {self.merged.get(p, p) for p, _ in self.by_id[unread.pop()].inputs}:
                readers[producer] -= 1
                if not readers[producer] and self.by_id[producer].kind is VertexKind.KERNEL:
                    removed.add(producer)
                    unread.append(producer)
        return removed

    def run(self) -> TaskGraph:
        vertices = []
        for vertex in self.graph.vertices:
            if vertex.id in self.removed:
                self.waits[vertex.id] = self._waits_of(vertex)
            else:
                vertices.append(self._redirected(vertex))
        ops = {id_: call for id_, call in self.graph.ops.items() if id_ not in self.removed}
        return replace(self.graph, vertices=tuple(vertices), ops=ops)

    def _waits_of(self, vertex: Vertex) -> dict[int, None]:
        waits: dict[int, None] = {}
        for dependency in dependencies(vertex):
            if dependency in self.removed:
                waits |= self.waits[dependency]
            elif not never_changes(self.by_id[dependency]):
                waits[dependency] = None
        return waits

    def _redirected(self, vertex: Vertex) -> Vertex:
        if not any(dependency in self.removed for dependency in dependencies(vertex)):
            return vertex
        after: dict[int, None] = {}
        for dependency in vertex.after:
            if dependency in self.removed:
                after |= self.waits[dependency]
            else:
                after[dependency] = None
        inputs = []
        for producer, output in vertex.inputs:
            inputs.append((self.merged.get(producer, producer), output))
            after |= self.waits.get(producer, {})
        known = {producer for producer, _ in inputs}
        return replace(vertex, inputs=tuple(inputs), after=tuple(wait for wait in after if wait not in known))
