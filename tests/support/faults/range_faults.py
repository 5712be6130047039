"""Plans whose weights lie on the device in ranges of bytes, and faults of such plans."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from disco_accel.graph.copies import is_resident_range, ranged_values, swaps_in
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.timed.search import build_in_ranges
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.simulate.simulator import Link, Machine
from tests.support.faults.faults import Fault
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets
from tests.support.graphs.weight_chains import tight_chain

_FACTORS = (1.2, 1.5, 2.0, 2.5, 3.0)
_SHARES = (0.3, 0.2, 0.1, 0.05)
_SETTINGS = TimedSettings(redrafts=2, repacking_rounds=12, low_peak_order=False)
"""Any plan will do: the moves of the search that only look for a faster one are left out."""


def ranged_plans(count: int, first: int = 0) -> list[tuple[TaskGraph, MemGraph]]:
    """Return ``count`` plans of random graphs that have values in ranges, from seed ``first`` on."""
    plans: list[tuple[TaskGraph, MemGraph]] = []
    seed = first
    while len(plans) < count:
        graph, plan = ranged_plan(seed)
        seed += 1
        if plan is not None and ranged_values(plan):
            plans.append((graph, plan))
    return plans


def ranged_plan(seed: int) -> tuple[TaskGraph, MemGraph | None]:
    """Return a random graph and a plan of it that may have values in ranges; None if none was found."""
    rng = random.Random(seed)
    shape = Shape(vertices=rng.choice((8, 12, 24, 40)), inputs=rng.choice((6, 12, 24)), devices=rng.choice((1, 1, 2)))
    graph = tight_chain(rng) if seed % 3 else with_working_sets(random_taskgraph(rng, shape), rng.choice(_FACTORS))
    link = Link(rng.choice((1e7, 1e9)), rng.choice((0.0, 1e-6)))
    machine, share, cyclic = Machine(links={TO_DEVICE: link, TO_HOST: link}), rng.choice(_SHARES), rng.random() < 0.7
    settings = replace(_SETTINGS, program_gaps_from=0) if seed % 2 else _SETTINGS
    try:
        return graph, build_in_ranges(graph, machine, share, cyclic=cyclic, work=SearchWork(), settings=settings)
    except Infeasible:
        return graph, None


def range_never_loaded(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A kernel reads a value without one of its further ranges."""
    reads = [(v, ref) for v in plan.vertices if v.kind is VertexKind.KERNEL for ref in v.inputs if _begin(plan, ref)]
    if not reads:
        return None
    vertex, lost = rng.choice(reads)
    inputs = tuple(ref for ref in vertex.inputs if ref != lost)
    return _with(plan, replace(vertex, inputs=inputs))


def range_of_other_bytes(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A reload of a range copies the bytes before it."""
    loads = [v for v in plan.vertices if swaps_in(v) and v.begin and _is_read(plan, v)]
    if not loads:
        return None
    load = rng.choice(loads)
    return _with(plan, replace(load, begin=max(0, load.begin - load.sizes[0])))


def range_that_is_too_short(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A reload of a range copies fewer bytes than its readers need."""
    loads = [v for v in _ranges(plan) if swaps_in(v) and v.sizes[0] > 1 and _is_read(plan, v)]
    if not loads:
        return None
    load = rng.choice(loads)
    return _with(plan, replace(load, sizes=(load.sizes[0] - 1,)))


def ranges_overlap(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A range lies over the one before it."""
    further = [v for v in _ranges(plan) if v.begin and _is_read(plan, v)]
    further = [v for v in further if plan.slots[v.id, 0].offset >= _alignment(plan, v)]
    if not further:
        return None
    moved = rng.choice(further)
    slot = plan.slots[moved.id, 0]
    down = replace(slot, offset=slot.offset - _alignment(plan, moved))
    return replace(plan, slots={**plan.slots, (moved.id, 0): down})


def range_loaded_late(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A kernel does not wait for the reload of a range that it reads."""
    loads = {v.id for v in _ranges(plan) if swaps_in(v)}
    edges = [edge for edge in plan.data_edges if edge[0] in loads]
    if not edges:
        return None
    lost = rng.choice(edges)
    return replace(plan, data_edges=tuple(edge for edge in plan.data_edges if edge != lost))


def range_read_whole(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A kernel reads a further range of a value in place of its first."""
    held = ranged_values(plan)
    swaps = [
        (v, position, ref)
        for v in plan.vertices
        if v.kind is VertexKind.KERNEL
        for position, old in enumerate(v.inputs)
        for ref in v.inputs
        if old in held and ref in held and _begin(plan, ref) > _begin(plan, old) == 0 and held[ref] == held[old]
    ]
    if not swaps:
        return None
    vertex, position, ref = rng.choice(swaps)
    return _with(plan, replace(vertex, inputs=(*vertex.inputs[:position], ref, *vertex.inputs[position + 1 :])))


def resident_range_not_back(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A step does not bring back a range with which it began."""
    read = {ref for v in plan.vertices for ref in v.inputs}
    origins = {
        (v.inputs[0], v.begin, plan.slots[v.id, 0].offset - v.begin) for v in plan.vertices if is_resident_range(v)
    }
    loads = Counter((v.inputs[0], v.begin) for v in plan.vertices if swaps_in(v))
    last = [
        v
        for v in plan.vertices
        if swaps_in(v)
        and (v.id, 0) not in read
        and loads[v.inputs[0], v.begin] == 1
        and (v.inputs[0], v.begin, plan.slots[v.id, 0].offset - v.begin) in origins
        and _is_over_another(plan, v)
    ]
    if not plan.cyclic or not last:
        return None
    lost = rng.choice(last)
    return replace(
        plan,
        vertices=tuple(v for v in plan.vertices if v is not lost),
        slots={ref: slot for ref, slot in plan.slots.items() if ref[0] != lost.id},
        data_edges=tuple(edge for edge in plan.data_edges if lost.id not in edge),
        memory_edges=tuple(edge for edge in plan.memory_edges if lost.id not in edge),
    )


def resident_range_of_a_copy(plan: MemGraph, rng: random.Random) -> MemGraph | None:
    """A resident range is of what a step makes, which nobody has when it starts."""
    ranges = [v for v in plan.vertices if is_resident_range(v)]
    made = [v for v in plan.vertices if v.kind is VertexKind.KERNEL and v.sizes and v.sizes[0]]
    if not ranges or not made:
        return None
    return _with(plan, replace(rng.choice(ranges), inputs=((rng.choice(made).id, 0),)))


RANGE_FAULTS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (
        range_never_loaded,
        range_of_other_bytes,
        range_that_is_too_short,
        ranges_overlap,
        range_loaded_late,
        range_read_whole,
        resident_range_not_back,
        resident_range_of_a_copy,
    )
}
"""Each makes a plan wrong, or returns None where the plan has no place for it."""


def _ranges(plan: MemGraph) -> list[Vertex]:
    held = ranged_values(plan)
    return [v for v in plan.vertices if (v.id, 0) in held]


def _begin(plan: MemGraph, ref: Ref) -> int:
    return next(v.begin for v in plan.vertices if v.id == ref[0])


def _is_read(plan: MemGraph, vertex: Vertex) -> bool:
    return any((vertex.id, 0) in v.inputs for v in plan.vertices)


def _is_over_another(plan: MemGraph, load: Vertex) -> bool:
    """Whether what the step makes or loads lies at some time where ``load`` brings a range."""
    mine = plan.slots[load.id, 0]
    return any(
        slot.space == mine.space
        and v.kind is not VertexKind.INPUT
        and v is not load
        and max(slot.offset, mine.offset) < min(slot.offset + v.sizes[k], mine.offset + load.sizes[0])
        for v in plan.vertices
        for k in range(len(v.sizes))
        if (slot := plan.slots.get((v.id, k))) is not None
    )


def _alignment(plan: MemGraph, vertex: Vertex) -> int:
    return next(device.alignment for device in plan.devices if device.id == vertex.space)


def _with(plan: MemGraph, vertex: Vertex) -> MemGraph:
    return replace(plan, vertices=tuple(vertex if v.id == vertex.id else v for v in plan.vertices))
