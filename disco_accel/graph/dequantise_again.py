"""A weight that autograd has saved in its dequantised form may be dequantised again for each of its readers.

The pass gives every reader its own kernels, so that a plan can choose: they are ``clones`` of the first, which a plan
does without where there is memory for the values (``value_numbering.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from disco_accel.graph.check import after_gate
from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import OpCall, TaskGraph, Vertex, VertexKind
from disco_accel.graph.value_numbering import dequantised


def dequantise_again(graph: TaskGraph) -> TaskGraph:
    """Return ``graph`` with each dequantised weight made anew for readers that others come between."""
    found, constant = dequantised(graph)
    if not found or not any(_shared(graph, found)):
        return graph
    return _Recomputation(graph, found, constant).run()


DEQUANTISE_AGAIN = GraphPass("dequantise again", "weights dequantised for each of their readers", dequantise_again)


def _shared(graph: TaskGraph, found: dict[int, tuple[int, ...]]) -> Iterator[int]:
    """Yield each kernel of ``found`` whose value more than one vertex reads."""
    readers = dict.fromkeys(found, 0)
    for vertex in graph.vertices:
        for producer in {producer for producer, _ in vertex.inputs if producer in found}:
            readers[producer] += 1
    return (producer for producer, count in readers.items() if count > 1)


class _Recomputation:
    """Walks ``graph`` in its order. ``found``: kernel that makes a dequantised weight → all kernels that it takes;
    ``constant``: vertices that need no copies."""

    def __init__(self, graph: TaskGraph, found: dict[int, tuple[int, ...]], constant: Collection[int]) -> None:
        self.graph = graph
        self.found = found
        self.by_id = {vertex.id: vertex for vertex in graph.vertices}
        self.constant = constant
        self.behind = after_gate(graph.vertices)
        self.ops: dict[int, OpCall] = dict(graph.ops)
        self.vertices: list[Vertex] = []
        self.next_id = 1 + max(self.by_id)
        self.copy_of = {producer: producer for producer in found}
        """Kernel of ``found`` → its newest copy."""
        self.late: set[int] = set()
        """Copies that wait for the gate."""
        self.read_at = dict.fromkeys(found, -1)
        """Kernel of ``found`` → the place of the last vertex that has read it, among those of the graph."""
        self.before = -1
        self.before_behind = -1
        """The last vertex so far that does not wait for the gate, and the last one that does."""

    def run(self) -> TaskGraph:
        for place, vertex in enumerate(self.graph.vertices):
            if vertex.id not in self.constant:
                vertex = self._with_own_copies(place, vertex)
            self.vertices.append(vertex)
            if vertex.id in self.behind:
                self.before_behind = vertex.id
            elif vertex.kind is not VertexKind.INPUT:
                self.before = vertex.id
        return replace(self.graph, vertices=tuple(self.vertices), ops=self.ops)

    def _with_own_copies(self, place: int, vertex: Vertex) -> Vertex:
        for producer in dict.fromkeys(producer for producer, _ in vertex.inputs if producer in self.found):
            elsewhere = -1 < self.read_at[producer] < place - 1
            # A reader in front of the gate must not wait for it by way of a copy behind it.
            copy, behind = self.copy_of[producer], vertex.id in self.behind
            if elsewhere or (copy != producer and (copy in self.late) != behind):
                self.copy_of[producer] = copy = self._copied(producer, vertex)
                if behind:
                    self.late.add(copy)
            self.read_at[producer] = place
        inputs = tuple((self.copy_of.get(producer, producer), output) for producer, output in vertex.inputs)
        return vertex if inputs == vertex.inputs else replace(vertex, inputs=inputs)

    def _copied(self, producer: int, reader: Vertex) -> int:
        """Make the kernels of ``producer`` again, right before ``reader``: they run in its turn, not in the forward."""
        turn = self.before_behind if reader.id in self.behind else self.before
        new: dict[int, int] = {}
        for maker in self.found[producer]:
            vertex = self.by_id[maker]
            inputs = tuple((new.get(p, p), output) for p, output in vertex.inputs)
            waits = () if turn < 0 or any(p in new for p, _ in vertex.inputs) else (turn,)
            self.vertices.append(replace(vertex, id=self.next_id, inputs=inputs, after=waits))
            self.ops[self.next_id] = self.ops[maker]
            new[maker] = self.next_id
            self.next_id += 1
        return new[producer]
