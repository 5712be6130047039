"""From the planner's log to the finished MemGraph: edges, host addresses, unread copies dropped."""

from __future__ import annotations

from math import lcm

from disco_accel.graph.copies import is_resident_range, swaps_in
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.order import data_edges
from disco_accel.graph.spaces import HOST, Space, SpaceKind
from disco_accel.graph.taskgraph import Ref, TaskGraph, VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan.common.host_slots import assign_host_slots
from disco_accel.plan.common.plan_log import PlanLog
from disco_accel.plan.common.transitive_reduction import remove_implied_edges

_HOST_ALIGNMENT = 256


def assemble(graph: TaskGraph, log: PlanLog, slots: dict[Ref, Slot], *, cyclic: bool) -> MemGraph:
    """Return the plan that ``log`` holds; ``slots`` are those of the task graph's own values."""
    inputs = [vertex for vertex in log.serial if vertex.kind is VertexKind.INPUT]
    clean = {vertex.id for vertex in inputs if host_copy_exists(vertex)}
    order = (*inputs, *(planned.vertex for planned in log.planned if planned.alive))
    alignment = lcm(_HOST_ALIGNMENT, graph.host.alignment)
    host = assign_host_slots(order, graph, alignment)
    memory_edges = [(u, v.id) for v in order for u in (*log.memory_edges.get(v.id, ()), *host.waits.get(v.id, ()))]
    edges = data_edges(order)
    others = (space for space in graph.spaces if space.id != HOST)
    read = {ref for vertex in order for ref in vertex.inputs if not swaps_in(vertex)}
    slots = {**slots, **log.slots, **host.slots}
    if not cyclic:
        # A resident that nobody reads before it is overwritten need not have been loaded: its slot is dropped.
        slots = {ref: slot for ref, slot in slots.items() if ref[0] not in clean or ref in read}
        order = tuple(v for v in order if not is_resident_range(v) or (v.id, 0) in slots)
    return MemGraph(
        name=graph.name,
        spaces=(*others, Space(HOST, host.memory, alignment, SpaceKind.HOST)),
        vertices=order,
        slots={(v.id, k): slots[v.id, k] for v in order for k in range(len(v.sizes)) if (v.id, k) in slots},
        data_edges=edges,
        memory_edges=remove_implied_edges(order, edges, memory_edges),
        cyclic=cyclic,
    )
