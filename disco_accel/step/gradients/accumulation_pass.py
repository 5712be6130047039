"""Puts the accumulation of gradients into a step's graph: each comes back, the new one is added, the sum leaves.

What the user has in ``.grad`` arrives at the gate as memory of the user's; the sum is written over it. It comes while
the gradient before is made, so that no kernel waits for it on a link that has time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from disco_accel.graph.taskgraph import OpCall, Ref, TaskGraph, TensorArg, TensorSpec, Vertex, VertexKind
from disco_accel.graph.traits import LATE_FOREIGN
from disco_accel.graph.values import handed_out_at_gate


@dataclass(frozen=True)
class AccumulatedGraph:
    """``graph`` with accumulation. ``old``: by transfer to the user's memory, the INPUT that the sum so far is given
    as. ``kernels`` are the ones that add."""

    graph: TaskGraph
    old: Mapping[int, int]
    kernels: frozenset[int]


def with_accumulation(graph: TaskGraph, specs: Mapping[int, TensorSpec]) -> AccumulatedGraph:
    """Return ``graph`` where the transfers of ``specs``, to the user's memory, take sums.

    ``specs``: how the gradient lies that each of them takes, which fills its value.
    """
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    position = {vertex.id: place for place, vertex in enumerate(graph.vertices)}
    # Nothing behind the gate may stand before what is handed out there.
    first = max((position[v.id] + 1 for v in graph.vertices if handed_out_at_gate(v)), default=0)
    transfers = sorted(specs, key=lambda transfer: position[by_id[transfer].inputs[0][0]])
    made = _Made(max(by_id, default=-1) + 1)
    sums: dict[int, Ref] = {}
    before: dict[int, list[Vertex]] = {}
    at_begin: list[Vertex] = []
    behind: dict[int, list[Vertex]] = {}
    previous = first
    for transfer in transfers:
        gradient = by_id[transfer].inputs[0]
        device, size = by_id[gradient[0]].space, by_id[transfer].sizes
        old = made.vertex(VertexKind.INPUT, by_id[transfer].space, "accumulated", (), size, traits=LATE_FOREIGN)
        loaded = made.vertex(VertexKind.COPY, device, "to_device", ((old.id, 0),), size, source=old.space)
        added = made.vertex(VertexKind.KERNEL, device, _ADD, ((loaded.id, 0), gradient), size, inplace=((0, 0),))
        at_begin.append(old)
        before.setdefault(previous, []).append(loaded)
        behind.setdefault(gradient[0], []).append(added)
        made.calls[added.id] = _add(specs[transfer])
        made.old[transfer] = old.id
        sums[transfer] = (added.id, 0)
        previous = max(first, position[gradient[0]])
    vertices: list[Vertex] = at_begin
    for place, vertex in enumerate(graph.vertices):
        vertices += before.get(place, ())
        taken = sums.get(vertex.id)
        vertices.append(vertex if taken is None else replace(vertex, inputs=(taken,)))
        vertices += behind.get(vertex.id, ())
    done = replace(graph, vertices=tuple(vertices), ops={**graph.ops, **made.calls})
    return AccumulatedGraph(done, made.old, frozenset(made.calls))


_ADD = "aten::add_"


def _add(spec: TensorSpec) -> OpCall:
    """The sum so far, input 0, gets a gradient, input 1: as autograd adds to ``.grad``."""
    args = (TensorArg(0, spec), TensorArg(1, spec), 1)
    return OpCall(_ADD, "Tensor", args, (None,), module="accumulation")


class _Made:
    """Vertices that are added, with ids from ``fresh`` on."""

    def __init__(self, fresh: int) -> None:
        self._fresh = fresh
        self.calls: dict[int, OpCall] = {}
        self.old: dict[int, int] = {}

    def vertex(
        self, kind: VertexKind, device: int, op: str, inputs: tuple[Ref, ...], sizes: tuple[int, ...], **more: object
    ) -> Vertex:
        self._fresh += 1
        return replace(Vertex(self._fresh - 1, kind, device, op, inputs, sizes), **more)  # type: ignore[arg-type]
