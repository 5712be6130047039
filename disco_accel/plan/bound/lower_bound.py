"""A lower bound of the step time over all cyclic plans of a graph, in its order, on a given machine.

The largest of four bounds: compute, the critical path, the link (a linear program on the bytes that must be loaded),
and the phases (a linear program over time). The link may be the bottleneck in some phases although it idles in others.
They depend on the machine and the graph, not on a plan, and hold in any order in which kernels become ready.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from disco_accel.graph.check import dependencies
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.order import serial_order
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import TaskGraph, VertexKind, with_memory
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate
from disco_accel.plan.bound.device_facts import DeviceFacts, outputs_of
from disco_accel.plan.bound.lane_bound import lane_bound
from disco_accel.plan.bound.least_copies import least_copies, least_loads
from disco_accel.plan.bound.ordered_starts import Precedence
from disco_accel.plan.bound.step_program import StepProgram
from disco_accel.simulate.simulator import Machine


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds, but for ``lp_reload_bytes``: the least bytes that a step must load, of all devices together."""

    compute: float
    link: float
    critical_path: float
    phases: float
    lp_reload_bytes: int

    @property
    def bound(self) -> float:
        """The lower bound of a step, in seconds."""
        return max(self.compute, self.link, self.critical_path, self.phases)


def bound_of(graph: TaskGraph, machine: Machine | None = None, memory: int | None = None) -> Bound:
    """Return the bound of ``graph`` with ``memory`` bytes on every device but the host's (None: those of its own)."""
    machine = machine or Machine()
    graph = graph if memory is None else with_memory(graph, lambda _: memory)
    critical_path = max(_critical_path(graph, machine), lane_bound(graph, machine))
    return bound_within_memory(graph, machine, critical_path)


def bound_within_memory(graph: TaskGraph, machine: Machine, critical_path: float) -> Bound:
    """Return the bound of ``graph`` whose critical path is known."""
    facts = [DeviceFacts(graph, machine, device.id, device.memory) for device in graph.devices]
    # Devices that share a link, and kinds of copies that do, take turns on it.
    lanes = machine.lanes(graph.spaces)
    links: dict[str, float] = defaultdict(float)
    reloaded = 0.0
    for device, each in zip(graph.devices, facts, strict=True):
        loads, backs = lanes.link_name(HOST, device.id), lanes.link_name(device.id, HOST)
        if each.stored:
            # Two links at once, of which another device may share one and not the other.
            loads, backs = f"to {device.id}", f"from {device.id}"
        seconds, nbytes = least_loads(each)
        reloaded += nbytes
        if any(value.changed for value in each.each_value):
            written_back, _ = least_copies(each, loads=loads == backs, backs=True)
            links[backs] += written_back
            seconds = 0.0 if loads == backs else seconds
        links[loads] += seconds
    for vertex in graph.vertices:
        if vertex.kind is VertexKind.COPY:
            links[lanes.name(vertex)] += lanes.seconds(vertex)
    precedence = Precedence.of(graph, machine)
    return Bound(
        compute=max((sum(each.seconds) / each.streams for each in facts), default=0.0),
        link=max(links.values(), default=0.0),
        critical_path=critical_path,
        phases=max((StepProgram(each, precedence).seconds() for each in facts if each.memory), default=0.0),
        lp_reload_bytes=int(reloaded),
    )


def _critical_path(graph: TaskGraph, machine: Machine) -> float:
    """Return the longest chain of kernels and transfers; a late input waits for everything that is handed out, and then
    the kernels of each device that follow late inputs run one after the other."""
    ends: dict[int, float] = {}
    home_uses = HomeUses.of(graph)
    lanes = machine.lanes(graph.spaces)
    written = ((ref, size) for vertex in graph.vertices for ref, size in outputs_of(vertex) if ref in home_uses.written)
    sizes = {ref: size for ref, size in written if size}
    late = {vertex.id for vertex in graph.vertices if arrives_at_gate(vertex)}
    gate = 0.0
    behind_gate: set[int] = set()
    loads: dict[int, float] = defaultdict(float)
    for vertex in serial_order(graph):
        sources = dependencies(vertex)
        if vertex.id in late or not behind_gate.isdisjoint(sources):
            behind_gate.add(vertex.id)
            if vertex.kind is VertexKind.KERNEL:
                streams = 1 if vertex.space in home_uses.hosts else machine.compute_streams
                loads[vertex.space] += lanes.seconds(vertex) / streams
        begin = max((ends[source] for source in sources), default=0.0)
        for ref in vertex.inputs:
            if ref in sizes and not home_uses.at_home(vertex, ref):
                # A swap-in takes it from its home to the device.
                begin = max(begin, ends[ref[0]] + lanes.copy_seconds(sizes[ref], HOST, vertex.space))
        if not late.isdisjoint(sources):
            begin = max(begin, gate)
        ends[vertex.id] = begin + lanes.seconds(vertex)
        if handed_out_at_gate(vertex):
            gate = max(gate, ends[vertex.id])
    return max([*ends.values(), gate + max(loads.values(), default=0.0)])
