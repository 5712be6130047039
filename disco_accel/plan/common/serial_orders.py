"""Other serial orders of a graph with the same results: kernels that grow memory run late, those that free it early.

Every dependency is kept, accumulations are chained by data, and draws of random numbers by ``after``; so any of these
orders gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from disco_accel.graph.check import dependencies
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.order import data_edges, last_readers, live_peak, serial_order
from disco_accel.graph.passes import GraphPass
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import is_handed_out, overwrites
from disco_accel.simulate.machine import Machine
from disco_accel.simulate.simulator import Simulation, simulate


def lower_order(graph: TaskGraph) -> TaskGraph | None:
    """Return ``graph`` in the order with the fewest bytes alive at the peak, None if none has fewer than its own."""
    order = serial_order(graph)
    orders = (sink(order), hoist(order), hoist(sink(order)), sink(hoist(order)))
    best = min(orders, key=live_peak)
    return replace(graph, vertices=best) if live_peak(best) < live_peak(order) else None


LOW_PEAK_ORDER = GraphPass(
    "low-peak order",
    "kernels that grow memory late, those that free it early",
    lambda graph: lower_order(graph) or graph,
)


def unlimited_run(graph: TaskGraph, machine: Machine) -> Simulation:
    """Simulate one step of ``graph`` on ``machine`` with memory for everything."""
    order = serial_order(graph)
    before = tuple((order[reader].id, order[writer].id) for reader, writer in overwritings(order))
    return simulate(MemGraph(graph.name, graph.spaces, order, {}, data_edges(order), before), machine)


def start_order(
    starts: Mapping[int, float],
    name: str = "start order",
    effect: str = "vertices as they start with memory for everything",
) -> GraphPass:
    """The pass that puts vertices in the order of ``starts``, those of a simulated step: on several devices a serial
    order may make one wait for work that another may do later."""

    def by_start(graph: TaskGraph) -> TaskGraph:
        vertices = sorted(serial_order(graph), key=lambda v: (v.kind is not VertexKind.INPUT, starts.get(v.id, 0.0)))
        return replace(graph, vertices=tuple(vertices))

    return GraphPass(name, effect, by_start)


def sink(order: Sequence[Vertex]) -> tuple[Vertex, ...]:
    """Return ``order`` with each kernel that makes more bytes than it frees right before the first to wait for it."""
    growth = _growth(order)
    behind = _successors(order)
    target = list(range(len(order)))
    for v in reversed(range(len(order))):
        vertex = order[v]
        moves = vertex.kind is VertexKind.KERNEL and not is_handed_out(vertex)
        if moves and growth[v] > 0 and behind[v]:
            target[v] = min(target[s] for s in behind[v])
    return tuple(order[v] for v in sorted(range(len(order)), key=lambda v: (target[v], v)))


def hoist(order: Sequence[Vertex]) -> tuple[Vertex, ...]:
    """Return ``order`` with each kernel that frees more bytes than it makes right behind the last that it waits for."""
    growth = _growth(order)
    behind = _successors(order)
    target = list(range(len(order)))
    latest = [-1] * len(order)
    for v, vertex in enumerate(order):
        if vertex.kind is VertexKind.KERNEL and growth[v] < 0 and latest[v] >= 0:
            target[v] = latest[v]
        for s in behind[v]:
            latest[s] = max(latest[s], target[v])
    # At one target the vertex that was there comes before those moved to it.
    return tuple(order[v] for v in sorted(range(len(order)), key=lambda v: (target[v], target[v] != v, v)))


def _growth(order: Sequence[Vertex]) -> list[int]:
    """Return, for each vertex, the bytes of its outputs less those of the made values that it is the last to read."""
    last = last_readers(order)
    made = {
        (vertex.id, k): 0 if is_handed_out(vertex) or vertex.kind is VertexKind.INPUT else size
        for vertex in order
        for k, size in enumerate(vertex.sizes)
    }
    return [
        sum(size for k, size in enumerate(vertex.sizes) if (vertex.id, k) in last)
        - sum(made[ref] for ref in dict.fromkeys(vertex.inputs) if last[ref] == v)
        for v, vertex in enumerate(order)
    ]


def _successors(order: Sequence[Vertex]) -> list[list[int]]:
    """Return, for each vertex, the positions that must run behind it: dependents, and writers over its inputs."""
    position = {vertex.id: v for v, vertex in enumerate(order)}
    behind: list[list[int]] = [[] for _ in order]
    for v, vertex in enumerate(order):
        for source in dependencies(vertex):
            behind[position[source]].append(v)
    for reader, writer in overwritings(order):
        behind[reader].append(writer)
    return behind


def overwritings(order: Sequence[Vertex]) -> Iterator[tuple[int, int]]:
    """Yield pairs of positions: a reader, and a vertex behind it that writes in place over an input of the reader."""
    readers: dict[Ref, list[int]] = {}
    for v, vertex in enumerate(order):
        for _, overwritten in overwrites(vertex):
            for reader in readers.get(overwritten, ()):
                yield reader, v
        for ref in dict.fromkeys(vertex.inputs):
            readers.setdefault(ref, []).append(v)
