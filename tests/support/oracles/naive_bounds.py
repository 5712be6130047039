"""By definition: does a plan say what its graph says, and lie its values where they may? (c), (d) of docs/schema.md.

One vertex, one address after the other; ``naive_judge`` compares them with each other. A home is one more arena.
"""

from __future__ import annotations

from dataclasses import replace

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind

HOST = -1


class Misplaced(Exception):
    """A value without an address that needs one, or with one that it may not have."""


def goes_out(v: Vertex) -> bool:
    """Whether ``v`` copies to where no kernels run."""
    return v.kind == VertexKind.COPY and v.space < 0


def comes_back(v: Vertex) -> bool:
    """Whether ``v`` copies from there."""
    return v.kind == VertexKind.COPY and v.source < 0


def foreign(v: Vertex) -> bool:
    return v.traits.access == "foreign"


def on_host(v: Vertex) -> bool:
    return v.kind == VertexKind.INPUT and v.traits.lifetime == "steps" and not foreign(v)


def carried(graph: TaskGraph, plan: MemGraph) -> dict[Ref, Ref]:
    """Each value of the plan → the graph's value of which it is a copy."""
    own, of = {v.id for v in graph.vertices}, {v.id: v for v in plan.vertices}

    def value(ref: Ref, steps: int) -> Ref:
        if not steps:
            raise Misplaced  # Copies of each other alone.
        return ref if ref[0] in own else value(of[ref[0]].inputs[0], steps - 1)

    return {ref: value(ref, len(of)) for v in of.values() for ref in [(v.id, k) for k in range(len(v.sizes))]}


def versions(graph: TaskGraph) -> dict[Ref, list[Ref]]:
    """Each value that lives over steps and changes, as its INPUT → its versions in order, that first."""
    chains = {(v.id, 0): [(v.id, 0)] for v in graph.vertices if on_host(v) and v.traits.access == "read-write"}
    for v in graph.vertices:
        for k, p in v.inplace:
            for chain in chains.values():
                chain += [(v.id, k)] * (chain[-1] == v.inputs[p])
    return chains


def on_host_device(graph: TaskGraph, device: int) -> bool:
    return any(d.is_host_device for d in graph.devices if d.id == device)


def homes(graph: TaskGraph) -> dict[Ref, Ref]:
    """What lies at a home: an INPUT that the host has, or a version of one, → that INPUT."""
    inputs = {(v.id, 0): (v.id, 0) for v in graph.vertices if on_host(v)}
    return inputs | {ref: state for state, chain in versions(graph).items() for ref in chain}


def written_at_home(graph: TaskGraph) -> set[Ref]:
    """Versions of bytes that kernels of a host device write."""
    of = {v.id: v for v in graph.vertices}
    chains = [ref for chain in versions(graph).values() for ref in chain[1:] if of[ref[0]].sizes[ref[1]]]
    return {ref for ref in chains if on_host_device(graph, of[ref[0]].space)}


def device_of(graph: TaskGraph, value: Ref) -> int:
    """Where copies of ``value`` are that are not at home."""
    maker = homes(graph).get(value, value)[0]
    return next(v.space for v in graph.vertices if v.id == maker)


def says_what_the_graph_says(graph: TaskGraph, plan: MemGraph) -> bool:
    """Whether devices and vertices are the graph's, and all vertices besides are plain copies."""
    own, of = {v.id: v for v in graph.vertices}, {v.id: v for v in plan.vertices}
    refs = {(v.id, k) for v in plan.vertices for k in range(len(v.sizes))}
    devices = {d.id: d for d in graph.devices}
    for v in plan.vertices:
        spaces = {HOST, *devices}
        if v.space not in spaces or v.source not in spaces or not set(v.inputs) <= refs:
            return False
        if v.id in own:
            more = v.kind == VertexKind.KERNEL and len(v.inputs) > len(own[v.id].inputs)
            right = v == replace(own[v.id], inputs=v.inputs) and (more or len(v.inputs) == len(own[v.id].inputs))
        else:
            plain = Vertex(v.id, v.kind, v.space, v.op, v.inputs, v.sizes, v.duration, begin=v.begin, source=v.source)
            right = v == plain and goes_out(v) != comes_back(v) and len(v.inputs) == len(v.sizes) == 1
            right = right or is_resident_range(own, v)
        if not right:
            return False
    for d in plan.devices:
        if (
            d.kind != devices[d.id].kind
            or d.memory > devices[d.id].memory
            or d.alignment < 1
            or d.alignment % devices[d.id].alignment
        ):
            return False
    same_devices = sorted(d.id for d in plan.devices) == sorted(devices)
    return same_devices and len(of) == len(plan.vertices) and own.keys() <= of.keys()


def is_resident_range(own: dict[int, Vertex], v: Vertex) -> bool:
    """Whether ``v`` is an INPUT of the plan: bytes of an input that nothing changes."""
    if v.kind != VertexKind.INPUT or len(v.inputs) != 1 or len(v.sizes) != 1:
        return False
    of = own.get(v.inputs[0][0])
    if of is None or not on_host(of) or of.traits.access != "read" or of.traits.host_updated:
        return False
    same = Vertex(v.id, v.kind, of.space, v.op, v.inputs, v.sizes, v.duration, of.traits)
    same = replace(same, begin=v.begin, source=of.source)
    return v == same and v.begin >= 0 and 0 < v.sizes[0] <= of.sizes[0] - v.begin


def before_step(state: Ref) -> Ref:
    """What stands for the content of a home from before the step."""
    return state[0], -1


def places(graph: TaskGraph, plan: MemGraph) -> dict[Ref, tuple[int, int, int]]:
    """Return arena (a device, HOST or a home), begin and end of each value that has an address. Raises Misplaced."""
    of, copied = {v.id: v for v in plan.vertices}, carried(graph, plan)
    if not 0 <= plan.host.memory <= graph.host.memory or plan.host.alignment < 1:
        raise Misplaced
    arenas = {d.id: (d.memory, d.alignment) for d in plan.devices}
    arenas[HOST] = (plan.host.memory, plan.host.alignment)
    at = [(ref, s.space, s.offset, s.offset + of[ref[0]].sizes[ref[1]]) for ref, s in plan.slots.items()]
    at_home, lasting = written_at_home(graph), homes(graph)
    for ref, s in plan.slots.items():
        if ref in at_home or (on_host_device(graph, s.space) and copied[ref] in lasting):
            raise Misplaced
    for (id, k), arena, start, end in at:
        v, (memory, alignment) = of[id], arenas[arena]
        if arena != v.space or foreign(v) or k < 0:
            raise Misplaced
        if v.traits.host_updated and v.sizes[k]:
            raise Misplaced  # What the device has of it when a step starts is of the step before.
        if start < 0 or end > memory or start % alignment:
            raise Misplaced
    for v in plan.vertices:
        goes_home = goes_out(v) and any(copied[v.id, 0] in chain for chain in versions(graph).values())
        needs_none = goes_home or foreign(v) or (on_host(v) and not v.inputs)
        placed = plan.slots.keys() | at_home
        if not needs_none and any(size and (v.id, k) not in placed for k, size in enumerate(v.sizes)):
            raise Misplaced
    for number, (state, chain) in enumerate(versions(graph).items()):
        written = [v for v in plan.vertices if goes_out(v) and copied[v.id, 0] in chain]
        if any((v.id, 0) in plan.slots for v in written):
            raise Misplaced
        held = (before_step(state), *((v.id, 0) for v in written), *(ref for ref in chain if ref in at_home))
        at += [(ref, HOST - 1 - number, 0, of[state[0]].sizes[0]) for ref in held]
    return {ref: (arena, start, end) for ref, arena, start, end in at}
