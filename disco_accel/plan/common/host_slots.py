"""Offsets for swapped-out values in the host's memory, reused without races."""

from __future__ import annotations

from dataclasses import dataclass, field

from disco_accel.graph.copies import swaps, swaps_in, swaps_out
from disco_accel.graph.memgraph import Slot
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex
from disco_accel.graph.values import is_handed_out, lasting_versions
from disco_accel.plan.common.device_copy import FreeBlock
from disco_accel.plan.common.free_list import FreeList


@dataclass(slots=True)
class _HostSlots:
    """``slots``: of swap-outs; ``waits``: swap-out id → ids of the former users of its bytes, which must finish first;
    ``memory``: bytes that they take together."""

    slots: dict[Ref, Slot] = field(default_factory=dict)
    waits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    memory: int = 0


def assign_host_slots(vertices: tuple[Vertex, ...], graph: TaskGraph, alignment: int) -> _HostSlots:
    """Return an offset for every swap-out of ``vertices`` (the plan's order): first fit in memory that grows.

    The bytes are free again after the last swap-in of the copy, never for a value that the step must keep. A value that
    changes over steps has a home, to which it is swapped out: it needs no offset.
    """
    homes = {version for versions in lasting_versions(graph.vertices).values() for version in versions}
    host = _HostSlots()
    free_list = FreeList(0)
    must_survive = {vertex.id for vertex in graph.vertices if is_handed_out(vertex)}
    origin = _origins(vertices)
    offloads = {v.id: v for v in vertices if swaps_out(v) and origin[v.id] not in homes}
    reloads: dict[int, list[tuple[int, int]]] = {offload: [] for offload in offloads}
    for position, vertex in enumerate(vertices):
        if swaps_in(vertex) and vertex.inputs[0][0] in offloads:
            reloads[vertex.inputs[0][0]].append((position, vertex.id))
    ends: dict[int, list[int]] = {}
    for position, vertex in enumerate(vertices):
        if vertex.id in offloads:
            size = _aligned(vertex.sizes[0], alignment)
            fit = free_list.first_fit(size, lambda _: 0.0)
            if fit is None:
                start = host.memory
                host.memory += size
            else:
                start = fit.start
                blocks = free_list.allocate(fit.start, fit.end)
                host.waits[vertex.id] = tuple(dict.fromkeys(v for block in blocks for v in block.release))
            host.slots[vertex.id, 0] = Slot(HOST, start)
            last = reloads[vertex.id][-1][0] if reloads[vertex.id] else position
            if origin[vertex.id][0] not in must_survive:
                ends.setdefault(last, []).append(vertex.id)
        for offload in ends.get(position, ()):
            start = host.slots[offload, 0].offset
            users = tuple(reader for _, reader in reloads[offload]) or (offload,)
            free_list.free([FreeBlock(start, start + _aligned(offloads[offload].sizes[0], alignment), users, position)])
    return host


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _origins(vertices: tuple[Vertex, ...]) -> dict[int, Ref]:
    """Return, for each swap-in and swap-out, the task graph's value that it carries."""
    origin: dict[int, Ref] = {}
    for vertex in vertices:
        if swaps(vertex):
            source = vertex.inputs[0]
            origin[vertex.id] = origin.get(source[0], source)
    return origin
