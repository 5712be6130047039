"""Planted faults in plans of graphs whose values change over steps; as in ``faults``, None where one does not apply."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from disco_accel.graph.carried_values import carried_values, taskgraph_of
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.graph.values import lasting_versions, outlives_step
from tests.support.faults.faults import Fault


def lost_write_back(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """The last version is not written home, where the next step looks for it: it finds it nowhere else."""
    homes = _Homes(plan)
    lost = [o for s, o in homes.unread_last_writes() if not (plan.cyclic and (s in plan.slots))]
    return without_copy(plan, rng.choice(lost)) if lost else None


def host_updated_state_not_written_home(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """The last version of what the host changes too is not written home, where the host looks for it."""
    homes = _Homes(plan)
    lost = [offload for state, offload in homes.unread_last_writes() if not outlives_step(homes.vertex[state[0]])]
    return without_copy(plan, rng.choice(lost)) if lost else None


def home_read_but_not_written(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """The last version of a resident is not written home, and the next step reads it there too."""
    homes = _Homes(plan)
    lost = [o for s, o in homes.unread_last_writes() if plan.cyclic and s in plan.slots and homes.loads[s]]
    return without_copy(plan, rng.choice(lost)) if lost else None


def older_version_written_back(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """What is written home last is the version before the last, just before a kernel writes the last over it."""
    homes = _Homes(plan)
    before = _ancestors(plan)
    late = []
    for state, offload in homes.unread_last_writes():
        source = offload.inputs[0]
        kernel = homes.vertex[source[0]]
        if homes.needs_home(state) and kernel.kind is VertexKind.KERNEL:
            old = kernel.inputs[dict(kernel.inplace)[source[1]]]
            others = [u for u, v in (*plan.data_edges, *plan.memory_edges) if v == offload.id and u != kernel.id]
            if not any(kernel.id in before[u] for u in others):
                late.append((offload, kernel, old))
    if not late:
        return None
    offload, kernel, old = rng.choice(late)
    edges = [(kernel.id, offload.id)]
    at_start = homes.vertex[old[0]].kind is VertexKind.INPUT
    data = (*(e for e in plan.data_edges if e not in edges), *(() if at_start else ((old[0], offload.id),)))
    memory = (*(e for e in plan.memory_edges if e not in edges), (offload.id, kernel.id))
    vertices = [v for v in plan.vertices if v.id != offload.id]
    vertices.insert(next(i for i, v in enumerate(vertices) if v.id == kernel.id), replace(offload, inputs=(old,)))
    return replace(plan, vertices=tuple(vertices), data_edges=tuple(dict.fromkeys(data)), memory_edges=memory)


def write_back_before_update(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A version is written home without waiting for the kernel that makes it."""
    homes = _Homes(plan)
    edges = [(o.inputs[0][0], o.id) for o in homes.offloads if homes.kind(o.inputs[0]) is VertexKind.KERNEL]
    if not edges:
        return None
    lost = rng.choice(edges)
    return replace(plan, data_edges=tuple(edge for edge in plan.data_edges if edge != lost))


def home_written_while_read(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A version is written home without waiting for the reload, or the offload, of what was there before."""
    homes = _Homes(plan)
    writes = {offload.id for offload in homes.offloads}
    edges = [edge for edge in plan.memory_edges if edge[1] in writes]
    if not edges:
        return None
    lost = rng.choice(edges)
    return replace(plan, memory_edges=tuple(edge for edge in plan.memory_edges if edge != lost))


def resident_not_back(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A resident is not loaded to where the next step looks for it."""
    homes = _Homes(plan)
    read = {ref for vertex in plan.vertices for ref in vertex.inputs}
    back = []
    for state, versions in homes.versions.items():
        slot = plan.slots.get(state)
        there = [ref for ref, other in plan.slots.items() if other == slot and homes.carried[ref] == versions[-1]]
        if len(there) == 1 and swaps_in(homes.vertex[there[0][0]]) and there[0] not in read:
            back.append(homes.vertex[there[0][0]])
    return without_copy(plan, rng.choice(back)) if plan.cyclic and back else None


def older_version_loaded(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A reload brings what the home held before the step, though a newer version is meant."""
    homes = _Homes(plan)
    read = {ref for vertex in plan.vertices for ref in vertex.inputs}
    newer = [
        (vertex, state)
        for vertex in plan.vertices
        if swaps_in(vertex) and (vertex.id, 0) in read and vertex.sizes[0]
        for state in [homes.state.get(homes.carried[vertex.id, 0])]
        if state is not None and homes.carried[vertex.id, 0] != state
    ]
    if not newer:
        return None
    victim, state = rng.choice(newer)
    return replace(plan, vertices=tuple(replace(v, inputs=(state,)) if v == victim else v for v in plan.vertices))


def home_with_an_offset(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """An offload that goes home has a place in the host's arena too."""
    homes = _Homes(plan)
    if not homes.offloads:
        return None
    offload = rng.choice(homes.offloads)
    offset = -(-plan.host.memory // plan.host.alignment) * plan.host.alignment
    host = replace(plan.host, memory=offset + offload.sizes[0])
    slots = {**plan.slots, (offload.id, 0): Slot(HOST, offset)}
    return replace(plan, slots=slots, spaces=(*plan.devices, host))


STATE_RUN_FAULTS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (
        lost_write_back,
        home_read_but_not_written,
        older_version_written_back,
        write_back_before_update,
        home_written_while_read,
        resident_not_back,
        older_version_loaded,
    )
}
"""Faults in the execution that a plan allows."""

STATE_FAULTS: Mapping[str, Fault] = {**STATE_RUN_FAULTS, home_with_an_offset.__name__: home_with_an_offset}


class _Homes:
    """What a plan does with values that change over steps and have bytes."""

    def __init__(self, plan: MemGraph) -> None:
        self.plan = plan
        self.vertex = {vertex.id: vertex for vertex in plan.vertices}
        self.carried = carried_values(plan)
        chains = lasting_versions(taskgraph_of(plan).vertices)
        self.versions = {ref: chain for ref, chain in chains.items() if self.vertex[ref[0]].sizes[0]}
        self.state = {version: state for state, versions in self.versions.items() for version in versions}
        self.offloads = [v for v in plan.vertices if swaps_out(v) and self.carried[v.id, 0] in self.state]
        self.loads: dict[Ref, list[Vertex]] = defaultdict(list)
        """What a reload reads → the reloads."""
        for vertex in plan.vertices:
            if swaps_in(vertex):
                self.loads[vertex.inputs[0]].append(vertex)

    def kind(self, ref: Ref) -> VertexKind:
        return self.vertex[ref[0]].kind

    def needs_home(self, state: Ref) -> bool:
        """Whether the home must have the last version when the step ends."""
        return not (self.plan.cyclic and state in self.plan.slots) or bool(self.loads[state])

    def unread_last_writes(self) -> Iterator[tuple[Ref, Vertex]]:
        """The offload that writes each home last, if no reload reads it and what was there before is older."""
        for state, versions in self.versions.items():
            written = [o for o in self.offloads if self.state[self.carried[o.id, 0]] == state]
            held = [state, *(self.carried[o.id, 0] for o in written)]
            if held[-1] == versions[-1] != held[-2:][0] and not self.loads[written[-1].id, 0]:
                yield state, written[-1]


def without_copy(plan: MemGraph, copy: Vertex) -> MemGraph:
    """Return ``plan`` without ``copy``; what came after it comes after what came before it."""
    edges = (*plan.data_edges, *plan.memory_edges)
    inputs = {vertex.id for vertex in plan.vertices if vertex.kind is VertexKind.INPUT}
    bridges = [(u, v) for u, w in edges if w == copy.id for x, v in edges if x == copy.id and u not in inputs]
    data, memory = (
        tuple(edge for edge in edges if copy.id not in edge) for edges in (plan.data_edges, plan.memory_edges)
    )
    return replace(
        plan,
        vertices=tuple(vertex for vertex in plan.vertices if vertex.id != copy.id),
        slots={ref: slot for ref, slot in plan.slots.items() if ref[0] != copy.id},
        data_edges=data,
        memory_edges=tuple(dict.fromkeys((*memory, *bridges))),
    )


def _ancestors(plan: MemGraph) -> Mapping[int, set[int]]:
    """Return all that must end before each vertex starts, and the vertex itself."""
    direct: dict[int, set[int]] = defaultdict(set)
    for u, v in (*plan.data_edges, *plan.memory_edges):
        direct[v].add(u)
    before: dict[int, set[int]] = {}
    for vertex in plan.vertices:
        before[vertex.id] = {vertex.id}.union(*(before[u] for u in direct[vertex.id]))
    return before
