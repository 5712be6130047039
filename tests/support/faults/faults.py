"""Planted faults: ways to spoil a good plan that a judge must notice. Each returns None where it does not apply."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from disco_accel.graph.copies import swaps, swaps_in, swaps_out
from disco_accel.graph.memgraph import Edge, MemGraph, Slot
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.graph.traits import (
    FOREIGN,
    FROZEN,
    HOST_UPDATED,
    HOST_UPDATED_STATE,
    LATE,
    LATE_FOREIGN,
    MADE_FOREIGN,
    PER_STEP,
    STATE,
)
from disco_accel.graph.values import host_copy_exists

Fault = Callable[[MemGraph, random.Random], MemGraph | None]

_TRAITS = (PER_STEP, LATE, FROZEN, HOST_UPDATED, STATE, HOST_UPDATED_STATE, FOREIGN, LATE_FOREIGN, MADE_FOREIGN)


def drop_memory_edge(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A memory edge is missing; pruned plans need every one."""
    if not plan.memory_edges:
        return None
    lost = rng.randrange(len(plan.memory_edges))
    return replace(plan, memory_edges=plan.memory_edges[:lost] + plan.memory_edges[lost + 1 :])


def drop_data_edge(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """The edge from a producer to its reader is missing."""
    kind = {vertex.id: vertex.kind for vertex in plan.vertices}
    pairs = {(ref[0], vertex.id) for vertex in plan.vertices for ref in vertex.inputs}
    needed = sorted(pair for pair in pairs if kind[pair[0]] is not VertexKind.INPUT)
    if not needed:
        return None
    lost = rng.choice(needed)
    return replace(plan, data_edges=tuple(edge for edge in plan.data_edges if edge != lost))


def move_onto_input(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """The second or only output of a kernel is written over an input, which it may not be."""
    places = []
    for vertex in plan.vertices:
        for ref in vertex.inputs:
            source, target = plan.slots.get(ref), plan.slots.get((vertex.id, len(vertex.sizes) - 1))
            free = not vertex.inplace and not vertex.may_inplace
            if source is not None and target is not None and source.space == target.space and free:
                places.append(((vertex.id, len(vertex.sizes) - 1), source.offset))
    return _moved(plan, *rng.choice(places)) if places else None


def shift_off_alignment(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """An address is one byte too high."""
    ref = _some_slot(plan, rng)
    return None if ref is None else _moved(plan, ref, plan.slots[ref].offset + 1)


def shift_out_of_range(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A value lies behind the end of its arena."""
    ref = _some_slot(plan, rng)
    if ref is None:
        return None
    device = next(d for d in plan.devices if d.id == plan.slots[ref].space)
    return _moved(plan, ref, -(-device.memory // device.alignment) * device.alignment)


def reload_other_value(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A reload brings another value of the same size."""
    value = carried(plan)
    sources = [v for v in plan.vertices if swaps_out(v) or (host_copy_exists(v))]
    read = {ref[0] for vertex in plan.vertices for ref in vertex.inputs}
    swaps = [
        (vertex, (source.id, 0))
        for vertex in plan.vertices
        if swaps_in(vertex) and vertex.id in read
        for source in sources
        if source.sizes == vertex.sizes and value[source.id, 0] != value[vertex.id, 0]
    ]
    if not swaps:
        return None
    vertex, source = rng.choice(swaps)
    return _with_inputs(plan, vertex, (source,))


def read_other_value(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A kernel reads another value than its task graph says."""
    value = carried(plan)
    swaps = [
        (vertex, position, ref)
        for vertex in plan.vertices
        if vertex.kind is VertexKind.KERNEL
        for position, old in enumerate(vertex.inputs)
        for ref in value
        if ref[0] < vertex.id and value[ref] != value[old] and _maker(plan, ref).kind is VertexKind.INPUT
    ]
    if not swaps:
        return None
    vertex, position, ref = rng.choice(swaps)
    return _with_inputs(plan, vertex, (*vertex.inputs[:position], ref, *vertex.inputs[position + 1 :]))


def read_evicted_copy(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A kernel reads the copy that was there before the eviction, not the one reloaded for it."""
    value = carried(plan)
    swaps = [
        (vertex, position, value[old])
        for vertex in plan.vertices
        if vertex.kind is VertexKind.KERNEL
        for position, old in enumerate(vertex.inputs)
        if swaps_in(_maker(plan, old))
        and value[old] in plan.slots
        # Before anything has been written over it the old copy serves as well.
        and _maker(plan, value[old]).kind is not VertexKind.INPUT
    ]
    if not swaps:
        return None
    vertex, position, ref = rng.choice(swaps)
    return _with_inputs(plan, vertex, (*vertex.inputs[:position], ref, *vertex.inputs[position + 1 :]))


def share_host_address(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """Two offloads that are both read later lie at the same host address."""
    position = {vertex.id: index for index, vertex in enumerate(plan.vertices)}
    last: dict[int, int] = {}
    for vertex in plan.vertices:
        if swaps_in(vertex) and _on_host(plan, vertex.inputs[0]):
            last[vertex.inputs[0][0]] = position[vertex.id]
    pairs = [
        (first, then)
        for first in last
        for then in last
        if position[first] < position[then] < last[first] and first != then
    ]
    if not pairs:
        return None
    first, then = rng.choice(pairs)
    return replace(plan, slots={**plan.slots, (then, 0): plan.slots[first, 0]})


def edge_into_input(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """An input is made to wait."""
    inputs = [vertex.id for vertex in plan.vertices if vertex.kind is VertexKind.INPUT]
    others = [vertex.id for vertex in plan.vertices if vertex.kind is not VertexKind.INPUT]
    if not inputs or not others:
        return None
    edge: Edge = (rng.choice(others), rng.choice(inputs))
    return replace(plan, memory_edges=(*plan.memory_edges, edge))


def close_a_cycle(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """Two vertices wait for each other."""
    edges = [*plan.data_edges, *plan.memory_edges]
    inputs = {vertex.id for vertex in plan.vertices if vertex.kind is VertexKind.INPUT}
    edges = [edge for edge in edges if edge[0] not in inputs]
    if not edges:
        return None
    u, v = rng.choice(edges)
    return replace(plan, memory_edges=(*plan.memory_edges, (v, u)))


def lose_a_vertex(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A kernel that nobody reads is not in the plan."""
    read = {ref[0] for vertex in plan.vertices for ref in vertex.inputs}
    gone = [v.id for v in plan.vertices if v.kind is VertexKind.KERNEL and v.id not in read]
    if not gone:
        return None
    lost = rng.choice(gone)
    return replace(
        plan,
        vertices=tuple(v for v in plan.vertices if v.id != lost),
        slots={ref: slot for ref, slot in plan.slots.items() if ref[0] != lost},
        data_edges=tuple(edge for edge in plan.data_edges if lost not in edge),
        memory_edges=tuple(edge for edge in plan.memory_edges if lost not in edge),
    )


def lose_an_address(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A kernel's output has no address."""
    slots = sorted(ref for ref in plan.slots if _maker(plan, ref).kind is VertexKind.KERNEL)
    if not slots:
        return None
    lost = rng.choice(slots)
    return replace(plan, slots={ref: slot for ref, slot in plan.slots.items() if ref != lost})


def device_larger_than_allowed(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A device has more memory than the graph's, by one byte that is not used, or by a whole value that lies there."""
    if rng.random() < 0.3:
        larger = rng.choice(plan.devices)
        return replace(plan, spaces=tuple(replace(s, memory=s.memory + (s == larger)) for s in plan.spaces))
    ref = _some_slot(plan, rng)
    if ref is None:
        return None
    slot = plan.slots[ref]
    grown = next(d for d in plan.devices if d.id == slot.space)
    addr = -(-grown.memory // grown.alignment) * grown.alignment
    memory = addr + _maker(plan, ref).sizes[ref[1]]
    spaces = tuple(replace(s, memory=memory) if s == grown else s for s in plan.spaces)
    return replace(_moved(plan, ref, addr), spaces=spaces)


def alignment_weakened(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A device's addresses need to be multiples of less than the graph says."""
    weakened = rng.choice(plan.devices)
    if weakened.alignment == 1:
        return None
    lower = rng.choice([unit for unit in (1, weakened.alignment - 1, weakened.alignment // 2) if unit])
    return replace(plan, spaces=tuple(replace(s, alignment=lower) if s == weakened else s for s in plan.spaces))


def device_that_is_not_there(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """The plan has a device that the graph has not, though it uses none of its memory."""
    return replace(plan, spaces=(*plan.spaces, replace(rng.choice(plan.devices), id=1 + max(_ids(plan)))))


def host_offset_outside(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """An offload lies behind the end of the host's arena, or before its start."""
    on_host = [ref for ref in sorted(plan.slots) if _on_host(plan, ref)]
    if not on_host:
        return None
    ref, host = rng.choice(on_host), plan.host
    size, unit = _maker(plan, ref).sizes[0], host.alignment
    behind = -(-host.memory // unit) * unit
    offset = rng.choice((behind, behind + (1 << 62), -unit, -(1 << 63), host.memory // unit * unit - size + unit))
    return _moved(plan, ref, offset)


def host_memory_missing(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """The host's arena has no bytes, or fewer than the offloads need."""
    on_host = {ref: _maker(plan, ref).sizes[0] for ref in plan.slots if _on_host(plan, ref)}
    if not any(on_host.values()):
        return None
    end = max(plan.slots[ref].offset + size for ref, size in on_host.items())
    memory = rng.choice((0, 0, end - 1, -plan.host.memory))
    return replace(plan, spaces=(*plan.devices, replace(plan.host, memory=memory)))


def _flip(key: str) -> Fault:
    """The fault that a vertex of the plan differs in ``key`` from the task graph's."""

    def flip(plan: MemGraph, rng: random.Random) -> MemGraph | None:
        # What a copy costs is not the graph's to say.
        free = ("duration", "op", "sizes", "kind", "space", "source")
        victims = [v for v in plan.vertices if key not in free or not swaps(v)]
        if not victims:
            return None
        victim = rng.choice(victims)
        change: dict[str, Any] = {key: _other(getattr(victim, key), key, rng)}
        changed = replace(victim, **change)
        return replace(plan, vertices=tuple(changed if v.id == victim.id else v for v in plan.vertices))

    flip.__name__ = f"{key}_flipped"
    return flip


def _other(value: object, key: str, rng: random.Random) -> object:
    """A value that a field could have as well."""
    if isinstance(value, bool):
        return not value
    if key == "traits":
        return rng.choice([traits for traits in _TRAITS if traits != value])
    if key == "kind":
        return rng.choice([kind for kind in VertexKind if kind != value])
    if key == "sizes":
        sizes = list(value) if isinstance(value, tuple) else []
        at = rng.randrange(len(sizes))
        return tuple(size + rng.choice((1, 256)) * (i == at) for i, size in enumerate(sizes))
    if isinstance(value, tuple):
        return value[1:] if value else (0,)
    if isinstance(value, str):
        return value + "'"
    if isinstance(value, float):
        return value * 2 + 1e-6
    return 1 + value if isinstance(value, int) else 0


_FIELDS = ("kind", "space", "source", "op", "sizes", "duration", "traits", "out", "keep", "after")
_REUSE = ("inplace", "may_inplace")

RUN_FAULTS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (
        drop_memory_edge,
        drop_data_edge,
        move_onto_input,
        shift_off_alignment,
        shift_out_of_range,
        reload_other_value,
        read_other_value,
        read_evicted_copy,
        share_host_address,
        edge_into_input,
        close_a_cycle,
        lose_a_vertex,
        lose_an_address,
    )
}
"""Faults in the execution that a plan allows."""

CLAIM_FAULTS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (
        device_larger_than_allowed,
        alignment_weakened,
        device_that_is_not_there,
        host_offset_outside,
        host_memory_missing,
        *(_flip(key) for key in (*_FIELDS, *_REUSE)),
    )
}
"""Faults in the plan's claims about memory and the graph. Run on tokens, in unlimited memory, most are harmless."""

FAULTS: Mapping[str, Fault] = {**RUN_FAULTS, **CLAIM_FAULTS}


def carried(plan: MemGraph) -> dict[Ref, Ref]:
    """Return, for each value of ``plan``, the task graph's value that it is a copy of."""
    result: dict[Ref, Ref] = {}
    for vertex in plan.vertices:
        for k in range(len(vertex.sizes)):
            copy = swaps(vertex)
            result[vertex.id, k] = result[vertex.inputs[0]] if copy else (vertex.id, k)
    return result


def _ids(plan: MemGraph) -> list[int]:
    return [device.id for device in plan.devices]


def _maker(plan: MemGraph, ref: Ref) -> Vertex:
    return next(vertex for vertex in plan.vertices if vertex.id == ref[0])


def _on_host(plan: MemGraph, ref: Ref) -> bool:
    """Whether ``ref`` has a slot in the host's memory."""
    return ref in plan.slots and plan.slots[ref].space == HOST


def _some_slot(plan: MemGraph, rng: random.Random) -> Ref | None:
    """A value with a slot on a device."""
    found = sorted(ref for ref in plan.slots if not _on_host(plan, ref))
    return rng.choice(found) if found else None


def _moved(plan: MemGraph, ref: Ref, addr: int) -> MemGraph:
    slot = plan.slots[ref]
    return replace(plan, slots={**plan.slots, ref: Slot(slot.space, addr)})


def _with_inputs(plan: MemGraph, vertex: Vertex, inputs: tuple[Ref, ...]) -> MemGraph:
    """Return ``plan`` with other inputs of ``vertex``, and the data edges that go with them."""
    kind = {v.id: v.kind for v in plan.vertices}
    edges = [(ref[0], vertex.id) for ref in inputs if kind[ref[0]] is not VertexKind.INPUT]
    return replace(
        plan,
        vertices=tuple(replace(v, inputs=inputs) if v.id == vertex.id else v for v in plan.vertices),
        data_edges=tuple(dict.fromkeys((*plan.data_edges, *edges))),
    )
