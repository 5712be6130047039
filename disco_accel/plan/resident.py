"""Which clean inputs stay on the device for good, and how the rest of the plan fares with that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from disco_accel.memgraph import MemGraph
from disco_accel.plan.sim_malloc import Infeasible
from disco_accel.plan.simulate import Machine, simulate
from disco_accel.taskgraph import TaskGraph, Vertex, VertexKind

SMALL = 2 << 20
"""Below this a reload's latency outweighs its bytes, so such inputs stay first."""

Build = Callable[[Sequence[int]], MemGraph]
"""Plans with the given clean inputs resident. Raises Infeasible."""


def by_benefit(graph: TaskGraph) -> list[Vertex]:
    """Return the clean inputs that are read, those that are best kept first.

    Small ones come first (latency), then by reloads saved per byte: readers that lie far apart each cost a reload.
    """
    position = {vertex.id: index for index, vertex in enumerate(graph.vertices)}
    readers: dict[int, list[int]] = {}
    for vertex in graph.vertices:
        for producer, _ in vertex.inputs:
            readers.setdefault(producer, []).append(position[vertex.id])
    overwritten = {v.inputs[v.inplace][0] for v in graph.vertices if v.inplace is not None}
    apart = max(1, len(graph.vertices) // 50)

    def key(vertex: Vertex) -> tuple[bool, int, int, int]:
        places = sorted(readers[vertex.id])
        reloads = 1 + sum(b - a > apart for a, b in pairwise(places))
        # Overwriting takes a fresh copy anyway.
        reloads -= vertex.id in overwritten
        return vertex.sizes[0] >= SMALL, -reloads, -vertex.sizes[0], position[vertex.id]

    clean = [v for v in graph.vertices if v.kind is VertexKind.INPUT and v.clean and v.sizes[0] and not v.external]
    return sorted((v for v in clean if v.id in readers), key=key)


def plan_with_residents(graph: TaskGraph, build: Build, machine: Machine) -> MemGraph:
    """Return the best plan found: all inputs resident if that fits, else the share that simulates fastest.

    Raises Infeasible if not even a plan without residents is found.
    """
    ordered = by_benefit(graph)
    everything = [vertex.id for vertex in ordered]
    try:
        return build(everything)
    except Infeasible:
        pass
    best: tuple[float, int] | None = None
    best_plan: MemGraph | None = None
    total = sum(vertex.sizes[0] for vertex in ordered)
    room = sum(device.memory for device in graph.devices)
    tried: set[int] = set()
    for share in (0.0, 0.25, 0.5, 0.65, 0.8, 0.9):
        chosen = _first(ordered, int(min(total, room) * share))
        if len(chosen) in tried:
            continue
        tried.add(len(chosen))
        try:
            plan = build(chosen)
        except Infeasible:
            continue
        score = (simulate(plan, machine).makespan, len(chosen))
        if best is None or score < best:
            best, best_plan = score, plan
    if best_plan is None:
        raise Infeasible(0)
    return best_plan


def _first(ordered: Sequence[Vertex], budget: int) -> list[int]:
    chosen = []
    for vertex in ordered:
        if vertex.sizes[0] <= budget:
            budget -= vertex.sizes[0]
            chosen.append(vertex.id)
    return chosen
