"""What happens in one simulated step: when each vertex ran, in which phase, and what the device held meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.optimizer.step_graph import FORWARD
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.graph.values import changes_over_steps, overwrites
from disco_accel.observe.timeline import occupancy
from disco_accel.simulate.simulator import Machine, Simulator

PHASES = ("forward", "backward", "update")
TO_DEVICE, FROM_DEVICE = "to the device", "from the device"


@dataclass(frozen=True, slots=True)
class Event:
    """One vertex as it ran, in seconds; ``bytes``: of a copy. As ``disco_accel.observe.timeline.TracedEvent``."""

    vertex: int
    lane: str
    issue: float
    start: float
    end: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A plan with its events by start; ``phases``: stretches of the step, the updates' being all that is no forward or
    backward of the device."""

    plan: MemGraph
    events: tuple[Event, ...]
    phases: tuple[tuple[str, float, float], ...]

    @property
    def seconds(self) -> float:
        return max(event.end for event in self.events)

    def phase_at(self, time: float) -> str:
        """The phase in which something begins at ``time``."""
        return next((name for name, start, end in self.phases if start <= time < end), "update")

    def copies(self, direction: str) -> list[Event]:
        """All in one direction, by start."""
        lane = "h2d" if direction == TO_DEVICE else "d2h"
        return [event for event in self.events if event.lane.startswith(lane)]


def trace(plan: MemGraph, machine: Machine) -> Trace:
    """Run one step of ``plan`` in simulated time."""
    simulator = Simulator(plan, machine)
    run = simulator.run()
    events = []
    for vertex, lane, seconds in zip(plan.vertices, simulator.lanes, simulator.seconds, strict=True):
        if vertex.kind is not VertexKind.INPUT:
            start = run.starts[vertex.id]
            moved = 0 if vertex.kind is VertexKind.KERNEL else vertex.sizes[0]
            events.append(Event(vertex.id, simulator.lane_names[lane], start, start, start + seconds, moved))
    events.sort(key=lambda event: (event.start, event.end))
    return Trace(plan, tuple(events), tuple(_phases(plan, events)))


def _phases(plan: MemGraph, events: Sequence[Event]) -> list[tuple[str, float, float]]:
    by_id = {vertex.id: vertex for vertex in plan.vertices}
    found: list[tuple[str, float, float]] = []
    for event in events:
        phase = _phase(by_id[event.vertex])
        if phase is None:
            continue
        if found and found[-1][0] == phase:
            found[-1] = (phase, found[-1][1], event.end)
        else:
            if found:
                # What a phase waits for at its end is its own: a flush that blocks, a weight that is late.
                found[-1] = (*found[-1][:2], event.start)
            found.append((phase, event.start, event.end))
    last = max((e.end for e in events if by_id[e.vertex].op == "flush"), default=0.0)
    if found and last > found[-1][2]:
        found[-1] = (*found[-1][:2], last)
    return found


def _phase(vertex: Vertex) -> str | None:
    if vertex.kind is not VertexKind.KERNEL or vertex.space or vertex.op == "update" or vertex.op.startswith("keep"):
        return None
    return "forward" if vertex.op in FORWARD else "backward"


def held_bytes(traced: Trace) -> tuple[list[float], list[int]]:
    """Seconds and the bytes that the device holds from each on; of a plan with addresses, those of its arena."""
    if traced.plan.slots:
        times, held = occupancy(traced.plan, traced.events)
        return times, [sum(parts) for parts in zip(*held.values(), strict=True)]
    return _live_bytes(traced)


def _live_bytes(traced: Trace) -> tuple[list[float], list[int]]:
    """Of a plan without addresses: values that kernels on the device make, from their start to their last reader's
    end, beside the weights."""
    vertices = {vertex.id: vertex for vertex in traced.plan.vertices}
    ran = {event.vertex: event for event in traced.events}
    on_device = [v for v in traced.plan.vertices if v.kind is VertexKind.KERNEL and v.space == 0]
    readers: dict[Ref, float] = defaultdict(float)
    for vertex in traced.plan.vertices:
        if vertex.id in ran:
            for ref in vertex.inputs:
                readers[ref] = max(readers[ref], ran[vertex.id].end)
    read_by_kernels = {ref for v in on_device for ref in v.inputs}
    weights = sum(
        vertex.sizes[0]
        for vertex in traced.plan.vertices
        if changes_over_steps(vertex) and (vertex.id, 0) in read_by_kernels
    )
    changes: dict[float, int] = defaultdict(int, {0.0: weights})
    for vertex in on_device:
        over = dict(overwrites(vertex))
        for k, size in enumerate(vertex.sizes):
            event = ran[vertex.id]
            changes[event.start] += size
            if k in over and vertices[over[k][0]].kind is VertexKind.KERNEL:
                # Its bytes are those of what it is written over.
                changes[event.start] -= size
                changes[readers[over[k]]] += size
            changes[max(readers[vertex.id, k], event.end)] -= size
    times = sorted(changes)
    return times, list(accumulate(changes[time] for time in times))


def link_rates(traced: Trace, direction: str, bins: int = 200) -> list[float]:
    """Bytes/s in each of ``bins`` equal parts of the step."""
    width = traced.seconds / bins
    rates = [0.0] * bins
    for event in traced.copies(direction):
        rate = event.bytes / (event.end - event.start) if event.end > event.start else 0.0
        for i in range(int(event.start / width), min(bins, int(event.end / width) + 1)):
            inside = min(event.end, (i + 1) * width) - max(event.start, i * width)
            rates[i] += rate * max(inside, 0.0) / width
    return rates


def copies_by_phase(traced: Trace) -> dict[tuple[str, str], list[int]]:
    """Phase and direction → bytes of each copy that begins in it."""
    found: dict[tuple[str, str], list[int]] = {(p, d): [] for p in PHASES for d in (TO_DEVICE, FROM_DEVICE)}
    for direction in (TO_DEVICE, FROM_DEVICE):
        for event in traced.copies(direction):
            found[traced.phase_at(event.start), direction].append(event.bytes)
    return found
