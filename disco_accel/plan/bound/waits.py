"""Kernels that wait for a copy in a plan's simulated step."""

from __future__ import annotations

from dataclasses import dataclass

from disco_accel.graph.carried_values import carried_values
from disco_accel.graph.copies import swaps
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.simulate.machine import Machine
from disco_accel.simulate.simulator import Simulation, Simulator


@dataclass(frozen=True, slots=True)
class Wait:
    """From second ``begin`` a stream has nothing to run for ``seconds``: ``kernel`` waits for ``copy``, of ``size``
    bytes of ``value``, the vertex that made it. Vertices by id, ``op`` and ``name``: of the kernel and the value."""

    begin: float
    seconds: float
    kernel: int
    op: str
    copy: int
    value: int
    name: str
    size: int


def waits_for_copies(plan: MemGraph, machine: Machine, run: Simulation) -> tuple[list[Wait], float]:
    """Return the waits, longest first, and their seconds together."""
    simulator = Simulator(plan, machine)
    number = {vertex.id: i for i, vertex in enumerate(plan.vertices)}
    end = {vertex: begin + simulator.seconds[number[vertex]] for vertex, begin in run.starts.items()}
    before: dict[int, list[int]] = {}
    for u, v in (*plan.data_edges, *plan.memory_edges):
        if u in end:
            before.setdefault(v, []).append(u)
    carried = carried_values(plan)
    free = dict.fromkeys(simulator.lanes, 0.0)
    found = []
    for vertex_id in sorted(run.starts, key=lambda each: (run.starts[each], number[each])):
        vertex = plan.vertices[number[vertex_id]]
        if vertex.kind is not VertexKind.KERNEL:
            continue
        lane = simulator.lanes[number[vertex_id]]
        gap = run.starts[vertex_id] - free[lane]
        free[lane] = max(free[lane], end[vertex_id])
        last = max(before.get(vertex_id, ()), key=end.__getitem__, default=None)
        if gap <= 0 or last is None or not swaps(plan.vertices[number[last]]):
            continue
        value = carried[last, 0][0]
        name, size = plan.vertices[number[value]].op, plan.vertices[number[last]].sizes[0]
        found.append(Wait(run.starts[vertex_id] - gap, gap, vertex_id, vertex.op, last, value, name, size))
    return sorted(found, key=lambda wait: (-wait.seconds, wait.begin)), sum(wait.seconds for wait in found)
