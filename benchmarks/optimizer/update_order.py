"""Where in the step's order updates are: behind their gradients, in front of the forward, at the pace of the link."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind

UPDATE = "update"

_LEAD = 4
"""Layers of the forward that a deferred update on the device is ahead of its own."""


@dataclass(frozen=True, slots=True)
class Pace:
    """States reach the device at ``rate`` bytes/s from the first update on; ``ahead`` bytes are there by then."""

    rate: float
    ahead: float


def updates_after_gradients(graph: TaskGraph) -> TaskGraph:
    """Each update of a gradient of this step right behind the kernel that makes it, which is behind all readers of the
    weight."""
    by_producer: dict[int, list[Vertex]] = {}
    for update in _updates(graph, deferred=False):
        by_producer.setdefault(update.inputs[2][0], []).append(update)
    moved = {update.id for each in by_producer.values() for update in each}
    order: list[Vertex] = []
    for vertex in graph.vertices:
        if vertex.id not in moved:
            order += [vertex, *by_producer.get(vertex.id, ())]
    return replace(graph, vertices=tuple(order))


def paced(graph: TaskGraph, on_device: Collection[int], streamed: Collection[int], pace: Pace) -> TaskGraph:
    """Return ``graph`` with updates no earlier than their states can have come, so that the kernels behind them do not
    wait: a device runs its kernels in order.

    Of gradients of this step, those ``streamed`` (ids): behind the kernel by whose end the states so far have come.
    Deferred ones: in front of their layers' forward; those ``on_device`` behind a kernel ``_LEAD`` layers before.
    """
    return _in_front_of_the_forward(_behind_their_states(graph, streamed, pace), on_device)


def _behind_their_states(graph: TaskGraph, streamed: Collection[int], pace: Pace) -> TaskGraph:
    by_producer: dict[int, list[Vertex]] = {}
    for update in _updates(graph, deferred=False):
        by_producer.setdefault(update.inputs[2][0], []).append(update)
    order: list[Vertex] = []
    waiting: deque[Vertex] = deque()
    clock, here, last = 0.0, pace.ahead, -1
    for vertex in graph.vertices:
        if vertex.id in streamed and vertex.inputs[2][0] in by_producer:
            continue
        order.append(vertex)
        if vertex.kind is VertexKind.INPUT or vertex.op == UPDATE:
            continue
        last = vertex.id
        waiting += (update for update in by_producer.get(last, ()) if update.id in streamed)
        if clock or last in by_producer:
            clock += vertex.duration or 0.0
        while waiting and waiting[0].sizes[1] <= here + pace.rate * clock:
            here -= waiting[0].sizes[1]
            order.append(_behind(waiting.popleft(), last))
    order += [_behind(update, last) for update in waiting]
    return replace(graph, vertices=tuple(order))


def _in_front_of_the_forward(graph: TaskGraph, on_device: Collection[int]) -> TaskGraph:
    deferred: Mapping[int, Vertex] = {update.id: update for update in _updates(graph, deferred=True)}
    order: list[Vertex] = []
    placed: set[int] = set()
    forwards: list[int] = []
    for vertex in graph.vertices:
        if vertex.id in deferred:
            continue
        for producer, _ in vertex.inputs:
            if producer in deferred and producer not in placed:
                placed.add(producer)
                late = producer in on_device and len(forwards) >= _LEAD
                order.append(_behind(deferred[producer], forwards[-_LEAD]) if late else deferred[producer])
        order.append(vertex)
        if vertex.op == "forward":
            forwards.append(vertex.id)
    return replace(graph, vertices=tuple(order))


def _behind(vertex: Vertex, other: int) -> Vertex:
    return replace(vertex, after=(*vertex.after, other))


def _updates(graph: TaskGraph, *, deferred: bool) -> list[Vertex]:
    """Those of gradients that the step before has made, or of its own."""
    before = {vertex.id for vertex in graph.vertices if vertex.kind is VertexKind.INPUT}
    return [v for v in graph.vertices if v.op == UPDATE and (v.inputs[2][0] in before) == deferred]
