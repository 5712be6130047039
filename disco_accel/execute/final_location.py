"""Where a kept value, or a version of a state, lies when a step of a plan has ended."""

from __future__ import annotations

from dataclasses import dataclass

from disco_accel.errors import ExecutionError
from disco_accel.execute.planned_states import PlannedStates
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind


@dataclass(frozen=True, slots=True)
class Residence:
    """``size`` bytes at ``offset`` of the arena of ``device``, or of the host arena if that is None.

    ``home``: of the home of that state instead.
    """

    device: int | None
    offset: int
    size: int
    home: int | None = None


def final_residence(graph: MemGraph, ref: Ref, states: PlannedStates) -> Residence:
    """The place that still holds ``ref`` at the end: on the device if one does, else at home or in the host arena; at
    home first of what a kernel has written there.

    Any valid execution ends with the same contents, so the serial order tells. Raises ExecutionError when the plan
    keeps no copy.
    """
    order = {v.id: i for i, v in enumerate(graph.vertices)}
    offloads = [v for v in graph.vertices if v.kind is VertexKind.OFFLOAD and v.inputs[0] == ref]
    stored = {v.id for v in offloads}
    size = graph.vertices[order[ref[0]]].sizes[ref[1]]
    reloads = [v for v in graph.vertices if v.kind is VertexKind.RELOAD and v.sizes[0] == size]
    copies = [(v.id, 0) for v in reloads if v.inputs[0][0] in stored]
    if ref in states.state:
        copies = [(v.id, 0) for v in reloads if _holds(states, (v.id, 0), ref)]
    if ref in states.written and states.at_home[states.state[ref]] == ref:
        return _home(graph, ref, states, order)
    for place in (ref, *reversed(copies)):
        slot = graph.slots.get(place)
        if slot is not None and not _overwritten(graph, place, order):
            return Residence(slot.device, slot.addr, slot.size)
    state = states.state.get(ref)
    if state is not None and states.at_home[state] == ref:
        return _home(graph, ref, states, order)
    for offload in offloads:
        offset = graph.host_offsets.get(offload.id)
        if offset is not None and not _host_overwritten(graph, offload, offset, order):
            return Residence(None, offset, offload.sizes[0])
    raise ExecutionError(f"value {ref[1]} of vertex {ref[0]} is not kept by the plan")


def _home(graph: MemGraph, ref: Ref, states: PlannedStates, order: dict[int, int]) -> Residence:
    return Residence(None, 0, graph.vertices[order[ref[0]]].sizes[ref[1]], states.state[ref])


def _holds(states: PlannedStates, copy: Ref, version: Ref) -> bool:
    return states.version.get(copy) == version


def _overwritten(graph: MemGraph, place: Ref, order: dict[int, int]) -> bool:
    mine = graph.slots[place]
    return any(
        order[other[0]] > order[place[0]]
        and graph.vertices[order[other[0]]].kind is not VertexKind.INPUT
        and slot.addr < mine.addr + mine.size
        and mine.addr < slot.addr + slot.size
        for other, slot in graph.slots.items()
        if slot.device == mine.device
    )


def _host_overwritten(graph: MemGraph, offload: Vertex, offset: int, order: dict[int, int]) -> bool:
    end = offset + offload.sizes[0]
    later = [v for v in graph.vertices if order[v.id] > order[offload.id] and v.id in graph.host_offsets]
    return any(graph.host_offsets[v.id] < end and offset < graph.host_offsets[v.id] + v.sizes[0] for v in later)
