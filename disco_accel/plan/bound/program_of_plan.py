"""The step program (``plan/bound/step_program.py``) of a plan as it ran: its kernels in their order, the values that it
kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from disco_accel.graph.carried_values import carried_values, taskgraph_of
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.home_uses import host_devices
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.order import serial_order
from disco_accel.graph.taskgraph import Ref, VertexKind
from disco_accel.graph.values import overwrites
from disco_accel.plan.bound.device_facts import DeviceFacts
from disco_accel.plan.bound.ordered_starts import Precedence
from disco_accel.plan.bound.plan_replay import at_the_end
from disco_accel.plan.bound.step_program import Keeps, StepProgram, gaps
from disco_accel.simulate.machine import Machine


def program_of_plan(plan: MemGraph, machine: Machine, started: Sequence[int]) -> tuple[StepProgram, Keeps]:
    """Return the program of a repeating plan on one device with one stream, and which parts of values the plan keeps.

    ``started``: ids of its vertices as they started."""
    graph = taskgraph_of(plan)
    rank = {vertex: n for n, vertex in enumerate(started)}
    ordered = sorted(graph.vertices, key=lambda v: (v.kind is not VertexKind.INPUT, rank.get(v.id, -1)))
    graph = replace(graph, vertices=tuple(ordered))
    device = graph.devices[0]
    facts = DeviceFacts(graph, machine, device.id, device.memory)
    order = [vertex for vertex in serial_order(graph) if vertex.kind is not VertexKind.INPUT]
    every = range(len(order))
    lanes = machine.lanes(graph.spaces)
    seconds = [lanes.seconds(vertex) for vertex in order]
    one_by_one = Precedence([*([i - 1] if i else [] for i in every), []], [*every, len(order)], [*seconds, 0.0])
    kept = _kept_gaps(plan, facts, [vertex.id for vertex in order])
    return StepProgram(facts, one_by_one), lambda value, gap: kept[id(value), gap]


def one_stream(plan: MemGraph, machine: Machine) -> bool:
    """Whether ``plan`` is of one device, whose kernels run one after the other, and moves nothing by transfers."""
    transfers = any(is_transfer(vertex) for vertex in plan.vertices)
    return len(plan.devices) == 1 and not host_devices(plan.devices) and machine.compute_streams == 1 and not transfers


def _kept_gaps(plan: MemGraph, facts: DeviceFacts, order: Sequence[int]) -> Mapping[tuple[int, int], float]:
    """Return by the identity of a value and the number of a gap which part of it one copy serves on both sides."""
    by_id = {vertex.id: vertex for vertex in plan.vertices}
    copy_of: dict[Ref, Ref] = {}
    """Value of the plan → the reload, input or kernel that put its bytes on the device."""
    for vertex in plan.vertices:
        copy_of.update({(vertex.id, k): (vertex.id, k) for k in range(len(vertex.sizes))})
        copy_of.update({(vertex.id, k): copy_of[ref] for k, ref in overwrites(vertex)})
    carried = carried_values(plan)
    read: dict[tuple[int, int], set[Ref]] = {}
    """Copies with the bytes of a value, by its identity and the position of a reader: one, or several of ranges."""
    for position, vertex_id in enumerate(order):
        for ref in by_id[vertex_id].inputs:
            value = facts.values.get(carried[ref])
            if value is not None:
                read.setdefault((id(value), position), set()).add(copy_of[ref])
        for k in range(len(by_id[vertex_id].sizes)):
            value = facts.values.get((vertex_id, k))
            if value is not None and value.made == position:
                read.setdefault((id(value), position), {copy_of[vertex_id, k]})
    at_end = {first: copy_of[last] for first, last in at_the_end(plan).items()}
    size = {ref: by_id[ref[0]].sizes[ref[1]] for ref in copy_of}
    kept: dict[tuple[int, int], float] = {}
    for value in facts.each_value:
        for number, (a, b) in enumerate(gaps(value)) if value.uses else ():
            before, behind = read[id(value), a], read[id(value), b]
            around = number == len(value.uses) - (value.made < 0)
            same = {ref for ref in behind if at_end.get(ref) in before} if around else behind & before
            # What a kernel wrote over a smaller part of a value is all of the value that there is.
            kept[id(value), number] = 1.0 if same == behind else sum(size[ref] for ref in same) / value.size
    return kept
