"""Random plans of graphs with inputs that the host updates between two steps, and planted faults in such plans."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Set
from dataclasses import replace

from disco_accel.errors import PlanError
from disco_accel.graph.carried_values import carried_values, taskgraph_of
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.taskgraph import TaskGraph, Vertex
from disco_accel.graph.values import changes_over_steps, lasting_versions, outlives_step
from disco_accel.plan import make_plan
from tests.support.faults.faults import Fault
from tests.support.faults.state_faults import host_updated_state_not_written_home, without_copy
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.plans.state_plans import NoPlan, random_plan

HOST_UPDATED_SHAPES = (
    Shape(vertices=12, inputs=8, host_updated=0.6, inplace=0.0),
    Shape(vertices=10, inputs=6, devices=1, host_updated=1.0, gate=False, keep=0.3, inplace=0.0),
    Shape(vertices=8, inputs=6, host_updated=0.7, states=0.3, inplace=0.0),
)
"""Graphs with inputs that the host updates beside frozen ones, alone, and beside values that a step changes."""

_ROOM = (0.7, 1.0, 1.4, 3.0)


def has_host_updated(graph: TaskGraph) -> bool:
    """Whether the host updates a value between two steps."""
    return not all(outlives_step(vertex) for vertex in graph.vertices)


def host_updated_plans(count: int, first_seed: int = 0) -> list[tuple[TaskGraph, MemGraph]]:
    """Return ``count`` graphs that have such inputs, each with a plan: every other of the timed planner, in little
    memory, and of no planner, in the memory that the plan takes."""
    found: list[tuple[TaskGraph, MemGraph]] = []
    seed = first_seed
    while len(found) < count:
        seed += 1
        rng = random.Random(seed)
        graph = with_room(random_taskgraph(rng, rng.choice(HOST_UPDATED_SHAPES)), rng.choice(_ROOM))
        if not has_host_updated(graph):
            continue
        with contextlib.suppress(PlanError, NoPlan):
            if seed % 2:
                found.append((graph, make_plan(graph, cyclic=rng.random() < 0.6, planner="timed")))
            else:
                plan = random_plan(graph, rng)
                found.append((replace(graph, spaces=plan.devices), plan))
    return found


def host_updated_made_resident(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """What the host updates is not reloaded, but lies on the device from step to step, in bytes of its own."""
    host_updated = {v.id for v in plan.vertices if not outlives_step(v) and not changes_over_steps(v)}
    return made_resident(plan, host_updated, rng)


def made_resident(plan: MemGraph, inputs: Set[int], rng: random.Random) -> MemGraph | None:
    """A reload of one of ``inputs`` is left out, and its readers read the input, in free bytes of the device."""
    found = []
    for vertex in plan.vertices:
        if swaps_in(vertex) and vertex.inputs[0][0] in inputs and vertex.sizes[0]:
            found += [(vertex, slot) for slot in _free_places(plan, (vertex.id, 0))]
    if not found or not plan.cyclic:
        return None
    return _read_at_start(plan, *rng.choice(found))


def host_updated_state_made_resident(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A state that the host changes too is not loaded, but lies from step to step where it was loaded to, in bytes that
    no other value has; it is written home as before."""
    host_updated = {v.id for v in plan.vertices if not outlives_step(v) and changes_over_steps(v)}
    versions = lasting_versions(taskgraph_of(plan).vertices)
    carried = carried_values(plan)
    sizes = {(v.id, k): size for v in plan.vertices for k, size in enumerate(v.sizes)}
    loads = []
    for load in plan.vertices:
        if swaps_in(load) and load.inputs[0][0] in host_updated and load.sizes[0]:
            own, chain = plan.slots[load.id, 0], versions[load.inputs[0]]
            others = ((slot, sizes[ref]) for ref, slot in plan.slots.items() if carried[ref] not in chain)
            if not any(_overlap(own, load.sizes[0], *other) for other in others):
                loads.append(load)
    if not loads or not plan.cyclic:
        return None
    load = rng.choice(loads)
    return _read_at_start(plan, load, plan.slots[load.id, 0])


HOST_UPDATED_FAULTS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (host_updated_made_resident, host_updated_state_made_resident, host_updated_state_not_written_home)
}


def _read_at_start(plan: MemGraph, reload: Vertex, slot: Slot) -> MemGraph:
    """``plan`` without ``reload``: what it loads is in ``slot`` when a step starts."""
    value = reload.inputs[0]
    plan = without_copy(plan, reload)
    vertices = [replace(v, inputs=tuple(value if r == (reload.id, 0) else r for r in v.inputs)) for v in plan.vertices]
    return replace(plan, vertices=tuple(vertices), slots={**plan.slots, value: slot})


def _overlap(one: Slot, size: int, other: Slot, other_size: int) -> bool:
    same = one.space == other.space and size > 0 and other_size > 0
    return same and one.offset < other.offset + other_size and other.offset < one.offset + size


def _free_places(plan: MemGraph, ref: tuple[int, int]) -> list[Slot]:
    """Return slots as large as that of ``ref``, on its device, whose bytes are no other value's."""
    own = plan.slots[ref]
    device = next(device for device in plan.devices if device.id == own.space)
    sizes = {(v.id, k): size for v in plan.vertices for k, size in enumerate(v.sizes)}
    others = [
        (slot.offset, slot.offset + sizes[each])
        for each, slot in plan.slots.items()
        if each != ref and slot.space == own.space and sizes[each]
    ]
    unit, size = device.alignment, sizes[ref]
    begins = sorted({0, *(-(-end // unit) * unit for _, end in others)})
    return [
        Slot(own.space, begin)
        for begin in begins
        if begin + size <= device.memory and all(begin + size <= first or end <= begin for first, end in others)
    ]
