"""Kernels that compute the same bits: recomputation, dequantised weights, and one cast that several readers asked for.

Value numbering over all kernels: two of them are equal if they make the same call of equal values. A value that is made
twice may as well be kept from its first maker to the readers of the second (``without``). A planner weighs seconds
against bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from disco_accel.graph.check import after_gate, dependencies
from disco_accel.graph.copies import copies_bytes
from disco_accel.graph.last_graphs import kept_for_last_graphs
from disco_accel.graph.op_traits import op_traits
from disco_accel.graph.taskgraph import OpCall, Ref, TaskGraph, Vertex, VertexKind, tensor_args
from disco_accel.graph.values import is_foreign, is_handed_out, never_changes, overwrites

_PACKED = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
"""Elements of packed weights; those of float8 and float4 begin with that name."""


@dataclass(frozen=True, slots=True)
class Clone:
    """Kernel ``vertex`` computes the bits of ``original``, an earlier one. ``nbytes``: of its outputs that are read.
    ``constant``: they are the same in every step."""

    vertex: int
    original: int
    nbytes: int
    constant: bool


@dataclass(frozen=True, slots=True)
class _Constant:
    """A value that is the same in every step: the read-only inputs that it is made from, and whether one of them is
    packed."""

    inputs: frozenset[int]
    packed: bool


@dataclass
class _Numbering:
    """``numbers``: vertex → a number, equal for vertices with equal outputs. ``repeatable``: vertices that make the
    same bits of the same values. ``constants``: those whose outputs are the same in every step. ``read``: values that
    any vertex reads. ``read_by_others``: constant vertex → its outputs that other vertices read. ``overwritten``:
    vertices over whose values a kernel writes."""

    graph: TaskGraph
    numbers: dict[int, int] = field(default_factory=dict)
    constants: dict[int, _Constant] = field(default_factory=dict)
    repeatable: set[int] = field(default_factory=set)
    read: set[Ref] = field(default_factory=set)
    read_by_others: dict[int, set[int]] = field(default_factory=dict)
    overwritten: set[int] = field(default_factory=set)
    keys: dict[object, int] = field(default_factory=dict)

    def run(self) -> _Numbering:
        """Number all vertices, which are in a topological order."""
        by_id = {vertex.id: vertex for vertex in self.graph.vertices}
        changed = _changed_where_they_lie(self.graph, by_id)
        for vertex in self.graph.vertices:
            call = self.graph.ops.get(vertex.id)
            key: object = vertex.id
            # A value that the user gets, or that outlives the step, has to be written over each time.
            ours = all(
                by_id[made].kind is VertexKind.KERNEL and not is_handed_out(by_id[made]) for made in _over(vertex)
            ) and changed.isdisjoint(producer for producer, _ in vertex.inputs)
            if call is not None and ours and _repeatable(vertex, call) and self._is_pure(vertex, call):
                self.repeatable.add(vertex.id)
                key = self._key(vertex, call)
            self.numbers[vertex.id] = self.keys.setdefault(key, len(self.keys))
            if never_changes(vertex):
                self.constants[vertex.id] = _Constant(frozenset((vertex.id,)), False)
            elif call is not None and vertex.id in self.repeatable and call.rng is None:
                self._note_constant(vertex, call)
            self.read.update(vertex.inputs)
            if vertex.id not in self.constants:
                for producer, output in vertex.inputs:
                    if producer in self.constants:
                        self.read_by_others.setdefault(producer, set()).add(output)
            self.overwritten.update(_over(vertex))
        return self

    def _is_pure(self, vertex: Vertex, call: OpCall) -> bool:
        # An op of others may draw or count by itself. One that unpacks weights is called anew for each reader anyway.
        known = call.name.startswith("aten::") or op_traits(call.name).pure
        return known or all(producer in self.constants for producer, _ in vertex.inputs)

    def _key(self, vertex: Vertex, call: OpCall) -> object:
        # Text tells 1 from 1.0 and from True, which are equal keys of a table, and 0.0 from -0.0.
        text = repr((call.name, call.overload, call.args, call.results))
        values = tuple((self.numbers[producer], output) for producer, output in vertex.inputs)
        # A replay draws what the live site of its slot has drawn.
        slot = None if call.rng is None else call.rng.slot
        return text, values, slot, vertex.space, vertex.sizes, vertex.inplace

    def _note_constant(self, vertex: Vertex, call: OpCall) -> None:
        if not all(producer in self.constants for producer, _ in vertex.inputs):
            return
        read = [self.constants[producer] for producer, _ in vertex.inputs]
        inputs = frozenset[int]().union(*(known.inputs for known in read))
        packed = any(known.packed for known in read) or any(
            vertex.inputs[arg.input][0] in inputs and _is_packed(arg.spec.dtype) for arg in tensor_args(call.args)
        )
        self.constants[vertex.id] = _Constant(inputs, packed)


def _changed_where_they_lie(graph: TaskGraph, by_id: Mapping[int, Vertex]) -> set[int]:
    """Foreign inputs of kernels that have no results and write over none of the plan's own values. Such a kernel writes
    to the memory of one of these inputs: two kernels that read it may find other values."""
    writers = (by_id[id_] for id_, call in graph.ops.items() if not any(call.results) and not by_id[id_].inplace)
    return {producer for vertex in writers for producer, _ in vertex.inputs if is_foreign(by_id[producer])}


def _repeatable(vertex: Vertex, call: OpCall) -> bool:
    """Whether the kernel makes the same whenever it runs on the same values, and changes nothing else.

    On a GPU the last bits of some differ from run to run: the values of one run could have been those of another."""
    draws = call.rng is not None and call.rng.slot < 0
    return vertex.kind is VertexKind.KERNEL and not draws and not is_handed_out(vertex)


def _over(vertex: Vertex) -> list[int]:
    """The vertices over whose values ``vertex`` writes."""
    return [ref[0] for _, ref in overwrites(vertex)]


def _is_packed(dtype: str) -> bool:
    return dtype in _PACKED or dtype.startswith(("float8", "float4"))


@kept_for_last_graphs
def _numbering_of(graph: TaskGraph) -> _Numbering:
    return _Numbering(graph).run()


def value_numbers(graph: TaskGraph) -> dict[int, int]:
    """Vertex → a number: equal for kernels that compute the same bits."""
    return _numbering_of(graph).numbers


@kept_for_last_graphs
def clones(graph: TaskGraph) -> tuple[Clone, ...]:
    """Return the kernels of ``graph`` that compute the bits of an earlier one, in their order.

    No kernel writes over the values of either, and neither is handed out. Each names the nearest earlier kernel that it
    may be merged into: one that waits for the gate only if it does so itself. A random kernel is one only where it
    draws the numbers of an earlier one again.
    """
    numbering = _numbering_of(graph)
    behind: Collection[int] | None = None
    equal: dict[int, list[int]] = {}
    found: list[Clone] = []
    for vertex in graph.vertices:
        call = graph.ops.get(vertex.id)
        if call is None or vertex.id not in numbering.repeatable or vertex.id in numbering.overwritten:
            continue
        if op_traits(call.name).inside_reader:
            continue
        before = equal.setdefault(numbering.numbers[vertex.id], [])
        if before and (call.rng is None or call.rng.replay):
            behind = after_gate(graph.vertices) if behind is None else behind
            allowed = [v for v in before if v not in behind or vertex.id in behind]
            if allowed:
                nbytes = sum(size for k, size in enumerate(vertex.sizes) if (vertex.id, k) in numbering.read)
                found.append(Clone(vertex.id, allowed[-1], nbytes, vertex.id in numbering.constants))
        before.append(vertex.id)
    return tuple(found)


def without_recomputation(graph: TaskGraph) -> TaskGraph:
    """Return ``graph`` without all of its clones, whose values take no memory for it: no plan of the graph without some
    of them does more work, or has more memory."""
    found = clones(graph)
    if not found:
        return graph
    free = kept(graph, found)

    def freed(vertex: Vertex) -> Vertex:
        return replace(vertex, sizes=tuple(0 if (vertex.id, k) in free else n for k, n in enumerate(vertex.sizes)))

    smaller = without(graph, found)
    return replace(smaller, vertices=tuple(map(freed, smaller.vertices)))


def computed_once(graph: TaskGraph, behind: Collection[int]) -> set[int]:
    """Return the kernels not ``behind`` the gate that make the same bits again, on a GPU too, and have no equal behind
    it, but for constants and random ones."""
    numbering = _numbering_of(graph)
    twice = {numbering.numbers[id_] for id_ in numbering.repeatable if id_ in behind}
    return {
        vertex.id
        for vertex in graph.vertices
        if vertex.id in numbering.repeatable
        and vertex.id not in behind
        and vertex.id not in numbering.constants
        # What it reads has to be there behind the gate too.
        and not numbering.overwritten.intersection((vertex.id, *(producer for producer, _ in vertex.inputs)))
        and not vertex.inplace
        and graph.ops[vertex.id].rng is None
        and not op_traits(graph.ops[vertex.id].name).unordered_on_gpu
        and numbering.numbers[vertex.id] not in twice
    }


def dequantised(graph: TaskGraph) -> tuple[dict[int, tuple[int, ...]], Collection[int]]:
    """Return the kernels of dequantised weights that other kernels read, each with all of its makers in order, itself
    last. The second result is the vertices with the same values in all steps, which are no such others."""
    numbering = _numbering_of(graph)
    if not any(known.packed for known in numbering.constants.values()):
        return {}, ()
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    place = {id_: number for number, id_ in enumerate(by_id)}
    found: dict[int, tuple[int, ...]] = {}
    for id_, read in numbering.read_by_others.items():
        known = numbering.constants[id_]
        larger = sum(by_id[id_].sizes[o] for o in read) > sum(by_id[i].sizes[0] for i in known.inputs)
        if known.packed and larger and id_ not in numbering.overwritten:
            found[id_] = tuple(sorted(_makers(by_id, id_), key=place.__getitem__))
    return found, numbering.constants.keys()


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
    merged = _merged(chosen)
    return _Removal(graph, merged).run() if merged else graph


def _merged(chosen: Iterable[Clone]) -> dict[int, int]:
    """Return for each clone the kernel that takes its place, which is none of them."""
    originals = {clone.vertex: clone.original for clone in chosen}
    merged = dict[int, int]()
    for clone, original in originals.items():
        while original in originals:
            original = originals[original]
        merged[clone] = original
    return merged


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


def kept(graph: TaskGraph, chosen: Iterable[Clone]) -> dict[Ref, int]:
    """Return the values that are kept longer if the ``chosen`` clones of ``graph`` are left out, with their bytes."""
    removal = _Removal(graph, _merged(chosen))
    return {
        (removal.merged[producer], output): removal.by_id[producer].sizes[output]
        for vertex in graph.vertices
        if vertex.id not in removal.removed
        for producer, output in vertex.inputs
        if producer in removal.merged
    }


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
        """The clones, and their makers that had readers and have none any more."""
        readers: dict[int, int] = {}
        read: set[int] = set()
        for vertex in self.graph.vertices:
            read.update(producer for producer, _ in vertex.inputs)
            for producer in {self.merged.get(producer, producer) for producer, _ in vertex.inputs}:
                readers[producer] = readers.get(producer, 0) + 1
        removed = set(self.merged)
        unread = list(self.merged)
        while unread:
            for producer in {self.merged.get(p, p) for p, _ in self.by_id[unread.pop()].inputs}:
                readers[producer] -= 1
                maker, call = self.by_id[producer], self.graph.ops.get(producer)
                unread_now = not readers[producer] and producer in read
                # A live site moves the user's generator, and notes the state that its replays start from.
                live = call is not None and call.rng is not None and not call.rng.replay
                if unread_now and call is not None and not live and _repeatable(maker, call):
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
