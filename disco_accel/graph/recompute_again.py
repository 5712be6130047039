"""Activations of a layer may be computed again for its backward, as activation checkpointing of each layer does.

The pass gives readers behind the gate kernels of their own, so that a plan can choose, with checkpointing in the
script or without. They are ``clones`` of kernels of the forward, and left out where there is memory for their values
(``value_numbering.py``). The layers of a repeated block are told by the modules of their calls, such as
``model.layers.3``. A value that another layer's forward reads is not computed again: recomputation begins there.
"""

from __future__ import annotations

import re
from dataclasses import replace

from disco_accel.graph.check import after_gate
from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import OpCall, TaskGraph, Vertex
from disco_accel.graph.value_numbering import computed_once

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


def recompute_again(graph: TaskGraph) -> TaskGraph:
    """Return ``graph`` with the activations of each layer computed again for readers behind the gate."""
    behind = after_gate(graph.vertices)
    found = _within_layers(graph, computed_once(graph, behind), behind)
    if not any(producer in found for v in graph.vertices if v.id in behind for producer, _ in v.inputs):
        return graph
    return _Recomputation(graph, found, behind).run()


RECOMPUTE_AGAIN = GraphPass("recompute again", "activations computed again for the backward", recompute_again)


def _within_layers(graph: TaskGraph, found: set[int], behind: set[int]) -> set[int]:
    """Those kernels of ``found`` that belong to a layer, and that no other layer's forward reads."""
    layer = {id_: match[0] for id_, call in graph.ops.items() if (match := _LAYER.match(call.module))}
    inside = {id_ for id_ in found if id_ in layer}
    for vertex in graph.vertices:
        if vertex.id not in behind:
            inside -= {producer for producer, _ in vertex.inputs if layer.get(producer) != layer.get(vertex.id)}
    return inside


class _Recomputation:
    """Walks ``graph`` in its order. ``found``: kernels that may run again; ``behind``: vertices behind the gate."""

    def __init__(self, graph: TaskGraph, found: set[int], behind: set[int]) -> None:
        self.graph, self.found, self.behind = graph, found, behind
        self.by_id = {vertex.id: vertex for vertex in graph.vertices}
        self.ops: dict[int, OpCall] = dict(graph.ops)
        self.vertices: list[Vertex] = []
        self.next_id = 1 + max(self.by_id)
        self.copy_of: dict[int, int] = {}
        self.turn = -1
        """The last vertex so far behind the gate."""

    def run(self) -> TaskGraph:
        for vertex in self.graph.vertices:
            if vertex.id in self.behind:
                inputs = tuple((self._copy(producer), output) for producer, output in vertex.inputs)
                vertex = vertex if inputs == vertex.inputs else replace(vertex, inputs=inputs)
                self.turn = vertex.id
            self.vertices.append(vertex)
        return replace(self.graph, vertices=tuple(self.vertices), ops=self.ops)

    def _copy(self, producer: int) -> int:
        """The kernel that makes the values of ``producer`` behind the gate, made now if it is the first time."""
        if producer not in self.found:
            return producer
        if producer not in self.copy_of:
            vertex = self.by_id[producer]
            inputs = tuple((self._copy(maker), output) for maker, output in vertex.inputs)
            # It runs in its reader's turn, not in the forward: what it reads may be there long before.
            waits = () if any(maker in self.ops and maker not in self.by_id for maker, _ in inputs) else (self.turn,)
            copy, self.next_id = self.next_id, self.next_id + 1
            self.vertices.append(replace(vertex, id=copy, inputs=inputs, after=waits))
            self.ops[copy] = self.ops[producer]
            self.copy_of[producer] = copy
        return self.copy_of[producer]
