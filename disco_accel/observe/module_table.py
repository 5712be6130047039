"""The cost of each module in a step: seconds of its kernels by phase, bytes that are moved for it, bytes it keeps."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disco_accel.graph.carried_values import carried_values, inputs_held
from disco_accel.graph.check import after_gate
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, VertexKind
from disco_accel.graph.values import changes_over_steps, overwrites
from disco_accel.observe.idle_gaps import gate_second
from disco_accel.observe.step_facts import _StepFacts
from disco_accel.observe.tensor_moves import first_readers
from disco_accel.observe.timeline import Content, TracedEvent, _Stay
from disco_accel.plan.summary import staying


class _Phase(enum.IntEnum):
    """Of a step: up to the gate, behind it, and the kernels that write new versions of values that live over steps."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


def phases(plan: MemGraph) -> dict[int, _Phase]:
    """Vertex → its phase. A plan without a gate is all forward."""
    behind = after_gate(plan.vertices, (*plan.data_edges, *plan.memory_edges))
    hosts = {device.id for device in plan.devices if device.is_host_device}
    held, by_id = inputs_held(plan), {vertex.id: vertex for vertex in plan.vertices}

    def updates(ref: Ref) -> bool:
        return ref in held and changes_over_steps(by_id[held[ref]])

    found: dict[int, _Phase] = {}
    for vertex in plan.vertices:
        phase = _Phase.BACKWARD if vertex.id in behind else _Phase.FORWARD
        if phase is _Phase.BACKWARD and vertex.kind is VertexKind.KERNEL:
            writes = any(updates(ref) for _, ref in overwrites(vertex))
            phase = _Phase.UPDATE if writes or vertex.space in hosts else phase
        found[vertex.id] = phase
    return found


@dataclass(slots=True)
class _ModuleRow:
    """``seconds``: of the kernels of ``module`` by phase; ``again``: of those that repeat an earlier one, which are
    among them. Bytes: ``loaded`` for its kernels, ``saved`` of its values, of ``weights`` that never leave, and of
    ``activations`` that stay on the device from the forward to the backward."""

    module: str
    kernels: int
    seconds: list[float]
    again: float = 0.0
    loaded: int = 0
    saved: int = 0
    weights: int = 0
    activations: int = 0


def module_rows(
    plan: MemGraph,
    events: Sequence[TracedEvent],
    there: Sequence[_Stay],
    facts: _StepFacts,
    phase: Mapping[int, _Phase],
) -> list[_ModuleRow]:
    """A row for each module, that of the most seconds first. Sums over rows are the plan's own figures. Bytes of a
    tensor belong to the module of the kernel that reads it first; "" is the module of all that has none. ``phase``:
    ``phases`` of the plan."""
    rows: dict[str, _ModuleRow] = {}
    by_id = {vertex.id: vertex for vertex in plan.vertices}

    def row(vertex: int) -> _ModuleRow:
        module = facts.modules.get(vertex, "")
        return rows.setdefault(module, _ModuleRow(module, 0, [0.0] * len(_Phase)))

    for event in events:
        if by_id[event.vertex].kind is VertexKind.KERNEL:
            found = row(event.vertex)
            found.kernels += 1
            found.seconds[phase[event.vertex]] += event.end - event.start
            if event.vertex in facts.repeats:
                found.again += event.end - event.start
    reader = _readers(plan, events)
    for vertex in plan.vertices:
        if swaps_in(vertex):
            row(reader.get((vertex.id, 0), -1)).loaded += vertex.sizes[0]
        elif swaps_out(vertex):
            row(vertex.inputs[0][0]).saved += vertex.sizes[0]
    for stayer in staying(plan):
        row(reader.get((stayer, 0), -1)).weights += by_id[stayer].sizes[0]
    gate = gate_second(plan, events)
    for stay in there:
        if gate is not None and stay.content is Content.ACTIVATION and stay.start < gate < stay.end:
            made = stay.ref[0] if by_id[stay.ref[0]].kind is VertexKind.KERNEL else reader.get(stay.ref, -1)
            row(made).activations += stay.size
    # To a nanosecond: sums of equal numbers in another order are another float.
    return sorted(rows.values(), key=lambda each: (-round(sum(each.seconds), 9), each.module))


def _readers(plan: MemGraph, events: Sequence[TracedEvent]) -> Mapping[Ref, int]:
    """By value and copy: the vertex that reads it first, of a copy for the next step the one that does so there."""
    first = first_readers(plan, events)
    carried = carried_values(plan)
    of_value: dict[Ref, TracedEvent] = {}
    for ref, event in first.items():
        value = carried[ref]
        if value not in of_value or event.start < of_value[value].start:
            of_value[value] = event
    return {ref: (first.get(ref) or of_value[value]).vertex for ref, value in carried.items() if value in of_value}
