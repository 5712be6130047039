"""Planted faults in plans with kernels on a host device; as in ``faults``, None where one does not apply."""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from dataclasses import replace

from disco_accel.graph.carried_values import carried_values, taskgraph_of
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import Edge, MemGraph, Slot
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.graph.traits import MADE_FOREIGN
from disco_accel.graph.values import lasting_versions
from tests.support.faults.faults import Fault
from tests.support.plans.host_updated_plans import made_resident


def loaded_before_update(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A reload does not wait for the kernel on the host that writes what it reads."""
    written = _Uses(plan).uses.written
    loads = [v for v in plan.vertices if swaps_in(v) and v.inputs[0] in written and v.sizes[0]]
    return _without_data_edge(plan, [(v.inputs[0][0], v.id) for v in loads], rng)


def read_before_write_back(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A kernel on the host does not wait for the offload of what it reads at home."""
    uses = _Uses(plan)
    offloads = {(v.id, 0) for v in plan.vertices if swaps_out(v) and v.sizes[0]}
    return _without_data_edge(plan, [(ref[0], v.id) for v, ref in uses.reads if ref in offloads], rng)


def update_before_readers(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A kernel on the host writes over a version at home without waiting for a reload, or a kernel, that reads it."""
    uses = _Uses(plan)
    former = {
        (reader.id, producer)
        for producer, k in uses.uses.written
        if uses.vertex[producer].sizes[k]
        for reader in plan.vertices
        if any(uses.vertex[producer].inputs[dict(uses.vertex[producer].inplace)[k]] == ref for ref in reader.inputs)
        and (swaps_in(reader) or reader.space in uses.uses.hosts)
    }
    return _without_memory_edge(plan, former & set(plan.memory_edges), rng)


def former_version_loaded(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A copy on the device is of the version before the one that the kernel on the host has made of it."""
    uses = _Uses(plan)
    read = {ref for vertex in plan.vertices for ref in vertex.inputs}
    loads = []
    for vertex in plan.vertices:
        if swaps_in(vertex) and vertex.inputs[0] in uses.uses.written and (vertex.id, 0) in read:
            state = uses.uses.homes[vertex.inputs[0]]
            chain = uses.versions[state]
            former = chain[chain.index(vertex.inputs[0]) - 1]
            if vertex.sizes[0] and (former == state or former in uses.uses.written):
                loads.append((vertex, former))
    if not loads:
        return None
    victim, former = rng.choice(loads)
    return replace(plan, vertices=tuple(replace(v, inputs=(former,)) if v == victim else v for v in plan.vertices))


def former_version_written_back(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A copy of a version that the host has written over goes home when all has run."""
    uses = _Uses(plan)
    found = []
    size = {(v.id, k): each for v in plan.vertices for k, each in enumerate(v.sizes)}
    for ref in sorted(plan.slots):
        value = uses.carried[ref]
        state = uses.uses.homes.get(value)
        versions = uses.versions.get(state, [value]) if state is not None else [value]
        if value != versions[-1] and versions[-1] in uses.uses.written and size[ref] and state not in plan.slots:
            found.append(ref)
    if not found:
        return None
    ref = rng.choice(found)
    number = max(v.id for v in plan.vertices) + 1
    offload = Vertex(number, VertexKind.COPY, HOST, "offload", (ref,), (size[ref],), source=plan.slots[ref].space)
    others = [v for v in plan.vertices if v.kind is not VertexKind.INPUT]
    data = tuple((v.id, number) for v in others if v.id == ref[0])
    memory = tuple((v.id, number) for v in others if v.id != ref[0])
    return replace(
        plan,
        vertices=(*plan.vertices, offload),
        data_edges=(*plan.data_edges, *data),
        memory_edges=(*plan.memory_edges, *memory),
    )


def resident_but_changed_at_home(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """What the host changes is not reloaded, but lies on the device from step to step as it was in the first."""
    uses = _Uses(plan).uses
    return made_resident(plan, {uses.homes[ref][0] for ref in uses.written}, rng)


def home_with_an_address(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """What kernels on the host use at home has bytes of their device too, which are nobody else's."""
    uses = _Uses(plan)
    places = sorted({*uses.uses.written, *((v.id, 0) for v in plan.vertices if uses.uses.never_moves(v))})
    places = [ref for ref in places if uses.vertex[ref[0]].sizes[ref[1]]]
    if not places:
        return None
    return _with_address(plan, rng.choice(places))


def left_before_made(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A transfer to the user's memory does not wait for what it takes there."""
    vertex = {v.id: v for v in plan.vertices}
    made = [(v.inputs[0][0], v.id) for v in plan.vertices if v.traits == MADE_FOREIGN and v.sizes[0]]
    return _without_data_edge(plan, [edge for edge in made if vertex[edge[0]].kind is not VertexKind.INPUT], rng)


def overwritten_while_it_leaves(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """The memory of what a transfer takes to the user's memory is written over without waiting for it."""
    leaving = {v.id for v in plan.vertices if v.traits == MADE_FOREIGN and v.sizes[0]}
    return _without_memory_edge(plan, {edge for edge in plan.memory_edges if edge[0] in leaving}, rng)


def users_memory_with_an_address(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A transfer to the user's memory has bytes of the host device too, which are nobody else's."""
    given = [v for v in plan.vertices if v.traits == MADE_FOREIGN and v.sizes[0]]
    return _with_address(plan, (rng.choice(given).id, 0)) if given else None


def copy_read_for_home(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A kernel on the host names a copy on the device for what it uses at home, and waits for it."""
    uses = _Uses(plan)
    found = []
    before = _ancestors(plan)
    for reader, ref in uses.reads:
        for copy in plan.vertices:
            same = swaps_in(copy) and uses.carried[copy.id, 0] == uses.carried[ref]
            if same and copy.sizes[0] and reader.id not in before[copy.id]:
                found.append((reader, ref, copy.id))
    if not found:
        return None
    reader, ref, copy_id = rng.choice(found)
    inputs = tuple((copy_id, 0) if other == ref else other for other in reader.inputs)
    return replace(
        plan,
        vertices=tuple(replace(v, inputs=inputs) if v == reader else v for v in plan.vertices),
        data_edges=tuple(dict.fromkeys((*plan.data_edges, (copy_id, reader.id)))),
    )


HOME_RUN_FAULTS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (
        loaded_before_update,
        read_before_write_back,
        update_before_readers,
        former_version_loaded,
        former_version_written_back,
        resident_but_changed_at_home,
        left_before_made,
        overwritten_while_it_leaves,
    )
}
"""Faults in the execution that a plan allows."""

HOME_FAULTS: Mapping[str, Fault] = {
    **HOME_RUN_FAULTS,
    home_with_an_address.__name__: home_with_an_address,
    users_memory_with_an_address.__name__: users_memory_with_an_address,
    copy_read_for_home.__name__: copy_read_for_home,
}


class _Uses:
    """What a plan does at homes. ``reads``: kernels on the host with each copy that they name and use at its home."""

    def __init__(self, plan: MemGraph) -> None:
        graph = taskgraph_of(plan)
        self.uses = HomeUses.of(graph)
        self.vertex = {vertex.id: vertex for vertex in plan.vertices}
        self.carried = carried_values(plan)
        self.versions = lasting_versions(graph.vertices)
        task = {vertex.id: vertex for vertex in graph.vertices}
        self.reads: list[tuple[Vertex, Ref]] = [
            (vertex, ref)
            for vertex in plan.vertices
            if vertex.id in task
            for ref in dict.fromkeys(vertex.inputs)
            if self.uses.at_home(task[vertex.id], self.carried[ref])
        ]


def _with_address(plan: MemGraph, ref: Ref) -> MemGraph:
    vertex = next(v for v in plan.vertices if v.id == ref[0])
    size = {(v.id, k): each for v in plan.vertices for k, each in enumerate(v.sizes)}
    slots = plan.slots.items()
    end = max((slot.offset + size[other] for other, slot in slots if slot.space == vertex.space), default=0)
    slot = Slot(vertex.space, -(-end // 4096) * 4096)
    return replace(plan, slots={**plan.slots, ref: slot})


def _without_data_edge(plan: MemGraph, edges: list[Edge], rng: random.Random) -> MemGraph | None:
    if not edges:
        return None
    lost = rng.choice(edges)
    return replace(plan, data_edges=tuple(edge for edge in plan.data_edges if edge != lost))


def _without_memory_edge(plan: MemGraph, edges: Set[Edge], rng: random.Random) -> MemGraph | None:
    """Without one of ``edges`` that nothing else stands for."""
    spoilt = []
    for lost in edges:
        bad = replace(plan, memory_edges=tuple(edge for edge in plan.memory_edges if edge != lost))
        if lost[0] not in _ancestors(bad)[lost[1]]:
            spoilt.append((lost, bad))
    return rng.choice(sorted(spoilt, key=lambda each: each[0]))[1] if spoilt else None


def _ancestors(plan: MemGraph) -> Mapping[int, set[int]]:
    before: dict[int, set[int]] = {}
    edges = (*plan.data_edges, *plan.memory_edges)
    for vertex in plan.vertices:
        before[vertex.id] = {vertex.id}.union(*(before[u] for u, v in edges if v == vertex.id))
    return before
