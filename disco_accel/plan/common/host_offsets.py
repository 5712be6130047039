"""Offsets for offloaded values in the host arena, reused without races."""

from __future__ import annotations

from dataclasses import dataclass, field

from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import is_handed_out, lasting_versions
from disco_accel.plan.common.device_copy import FreeBlock
from disco_accel.plan.common.free_list import FreeList

HOST_ALIGNMENT = 256


@dataclass(slots=True)
class HostOffsets:
    """``offsets``: OFFLOAD id → byte offset; ``waits``: OFFLOAD id → ids of the former users of its bytes, which must
    finish first; ``memory``: bytes of the host arena."""

    offsets: dict[int, int] = field(default_factory=dict)
    waits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    memory: int = 0


def assign_host_offsets(vertices: tuple[Vertex, ...], graph: TaskGraph) -> HostOffsets:
    """Return an offset for every offload of ``vertices`` (the plan's order): first fit in an arena that grows.

    The bytes are free again after the last reload of the offload, never for a value that the step must keep. A value
    that changes over steps has a home on the host, where its offloads go: it needs no offset.
    """
    homes = {version for versions in lasting_versions(graph.vertices).values() for version in versions}
    host = HostOffsets()
    free_list = FreeList(0)
    must_survive = {vertex.id for vertex in graph.vertices if is_handed_out(vertex)}
    origin = _origins(vertices)
    offloads = {v.id: v for v in vertices if v.kind is VertexKind.OFFLOAD and origin[v.id] not in homes}
    reloads: dict[int, list[tuple[int, int]]] = {offload: [] for offload in offloads}
    for position, vertex in enumerate(vertices):
        if vertex.kind is VertexKind.RELOAD and vertex.inputs[0][0] in offloads:
            reloads[vertex.inputs[0][0]].append((position, vertex.id))
    ends: dict[int, list[int]] = {}
    for position, vertex in enumerate(vertices):
        if vertex.id in offloads:
            size = _aligned(vertex.sizes[0])
            fit = free_list.first_fit(size, lambda _: 0.0)
            if fit is None:
                start = host.memory
                host.memory += size
            else:
                start = fit.start
                blocks = free_list.allocate(fit.start, fit.end)
                host.waits[vertex.id] = tuple(dict.fromkeys(v for block in blocks for v in block.release))
            host.offsets[vertex.id] = start
            last = reloads[vertex.id][-1][0] if reloads[vertex.id] else position
            if origin[vertex.id][0] not in must_survive:
                ends.setdefault(last, []).append(vertex.id)
        for offload in ends.get(position, ()):
            start = host.offsets[offload]
            users = tuple(reader for _, reader in reloads[offload]) or (offload,)
            free_list.free([FreeBlock(start, start + _aligned(offloads[offload].sizes[0]), users, position)])
    return host


def _aligned(size: int) -> int:
    return -(-size // HOST_ALIGNMENT) * HOST_ALIGNMENT


def _origins(vertices: tuple[Vertex, ...]) -> dict[int, Ref]:
    """Return, for each offload and reload, the task graph's value that it carries."""
    origin: dict[int, Ref] = {}
    for vertex in vertices:
        if vertex.kind in (VertexKind.OFFLOAD, VertexKind.RELOAD):
            source = vertex.inputs[0]
            origin[vertex.id] = origin.get(source[0], source)
    return origin
