"""Addresses for offloaded values in the host arena, reused without races."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.plan.common.device_copy import Piece, Value
from disco_accel.plan.common.free_list import FreeSpace

HOST_ALIGNMENT = 256


@dataclass(slots=True)
class HostPlaces:
    """``offsets``: OFFLOAD id → byte offset; ``waits``: OFFLOAD id → who must finish first; ``memory``: bytes."""

    offsets: dict[int, int] = field(default_factory=dict)
    waits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    memory: int = 0


def place_on_host(vertices: tuple[Vertex, ...], graph: TaskGraph, values: Mapping[Ref, Value]) -> HostPlaces:
    """Place every offload of ``vertices`` (the plan's order). A place is free again after the last reload from it."""
    places = HostPlaces()
    space = FreeSpace(0)
    kept = {vertex.id for vertex in graph.vertices if vertex.keep or vertex.out}
    offloads = {vertex.id: vertex for vertex in vertices if vertex.kind is VertexKind.OFFLOAD}
    origin = _origins(vertices)
    readers: dict[int, list[tuple[int, int]]] = {offload: [] for offload in offloads}
    for position, vertex in enumerate(vertices):
        if vertex.kind is VertexKind.RELOAD and vertex.inputs[0][0] in offloads:
            readers[vertex.inputs[0][0]].append((position, vertex.id))
    ends: dict[int, list[int]] = {}
    for position, vertex in enumerate(vertices):
        if vertex.kind is VertexKind.OFFLOAD:
            block = -(-vertex.sizes[0] // HOST_ALIGNMENT) * HOST_ALIGNMENT
            window = space.first_fit(block, lambda _: 0.0)
            if window is None:
                start = places.memory
                places.memory += block
            else:
                start = window.start
                taken = space.take(window.start, window.end)
                places.waits[vertex.id] = tuple(dict.fromkeys(v for piece in taken for v in piece.release))
            places.offsets[vertex.id] = start
            last = readers[vertex.id][-1][0] if readers[vertex.id] else position
            if origin[vertex.id] not in kept:
                ends.setdefault(last, []).append(vertex.id)
        for offload in ends.get(position, ()):
            start = places.offsets[offload]
            block = -(-offloads[offload].sizes[0] // HOST_ALIGNMENT) * HOST_ALIGNMENT
            users = tuple(reader for _, reader in readers[offload]) or (offload,)
            space.give([Piece(start, start + block, users, position)])
    return places


def _origins(vertices: tuple[Vertex, ...]) -> dict[int, int]:
    """Return, for each offload and reload, the task graph vertex whose value it carries."""
    origin: dict[int, int] = {}
    for vertex in vertices:
        if vertex.kind in (VertexKind.OFFLOAD, VertexKind.RELOAD):
            source = vertex.inputs[0][0]
            origin[vertex.id] = origin.get(source, source)
    return origin
