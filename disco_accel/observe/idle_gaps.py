"""Where a lane has nothing to run, and why: of the vertices that the next one waited for, the one that ended last."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import SpaceKind
from disco_accel.graph.taskgraph import Vertex, VertexKind
from disco_accel.graph.values import arrives_at_gate, handed_out_at_gate
from disco_accel.observe.timeline import TracedEvent

Lane = tuple[int, str]
"""A device and the name of a lane there, such as ``compute0`` or ``h2d``."""

_LEAST = 1e-9
"""Seconds. A shorter gap is one of rounding."""


class _Cause(enum.StrEnum):
    """What a lane waits for."""

    DATA = "data"
    """A value that another lane makes or brings."""
    MEMORY = "memory"
    """Room: a value that lay there was still read or written."""
    GATE = "gate"
    """The caller, between the outputs and their gradients."""
    START = "start"
    """Nothing that the plan says: the engine, or a link that two lanes share."""
    DONE = "done"
    """The end of the step: the lane has nothing left to run."""


@dataclass(frozen=True, slots=True)
class _Gap:
    """From second ``start`` to ``end`` nothing runs on ``lane``. ``then``: the vertex that runs next; ``waited_for``:
    the one that it waited for; -1 = none."""

    lane: Lane
    start: float
    end: float
    cause: _Cause
    then: int
    waited_for: int


def lane_of(plan: MemGraph) -> Mapping[int, int]:
    """Vertex → the device whose lane it takes: where a kernel runs, and the near end of a copy."""
    kinds = {space.id: space.kind for space in plan.spaces}

    def near(vertex: Vertex) -> int:
        if vertex.kind is not VertexKind.COPY:
            return vertex.space
        ends = (vertex.source, vertex.space)
        return next((end for end in ends if kinds.get(end) is SpaceKind.DEVICE), max(ends))

    return {vertex.id: near(vertex) for vertex in plan.vertices}


def by_lane(plan: MemGraph, events: Sequence[TracedEvent]) -> dict[Lane, list[TracedEvent]]:
    """The events of each lane in the order of their starts."""
    device = lane_of(plan)
    found: dict[Lane, list[TracedEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start, e.end, e.vertex)):
        found[device[event.vertex], event.lane].append(event)
    return dict(found)


def gate_second(plan: MemGraph, events: Sequence[TracedEvent]) -> float | None:
    """When all outputs of the forward were there; None for a step without a gate."""
    if not any(arrives_at_gate(vertex) for vertex in plan.vertices):
        return None
    out = {vertex.id for vertex in plan.vertices if handed_out_at_gate(vertex)}
    return max((event.end for event in events if event.vertex in out), default=None)


def idle_gaps(plan: MemGraph, events: Sequence[TracedEvent]) -> list[_Gap]:
    """The gaps of all lanes in the step that ``events`` traced, by lane and time. Those of a lane and the time in which
    it runs something are the whole step. A gap has two causes where the next vertex could have started earlier: up to
    the end of the vertex that it waited for, and from there on."""
    finish = max((event.end for event in events), default=0.0)
    waits = _Waits(plan, events)
    gaps: list[_Gap] = []
    for lane, run in sorted(by_lane(plan, events).items()):
        free = 0.0
        for event in run:
            if event.start > free + _LEAST:
                gaps += waits.gaps(lane, free, event)
            free = max(free, event.end)
        if finish > free + _LEAST:
            gaps.append(_Gap(lane, free, finish, _Cause.DONE, -1, -1))
    return gaps


class _Waits:
    """The vertices that each one of ``plan`` waits for, with when they ended."""

    def __init__(self, plan: MemGraph, events: Sequence[TracedEvent]) -> None:
        self._ends = {event.vertex: event.end for event in events}
        gate = gate_second(plan, events)
        late = {vertex.id for vertex in plan.vertices if arrives_at_gate(vertex)}
        if gate is not None:
            self._ends.update(dict.fromkeys(late, gate))
        self._before: dict[int, list[tuple[int, _Cause]]] = defaultdict(list)
        for vertex in plan.vertices:
            made = (u for u, _ in vertex.inputs)
            self._before[vertex.id] += [(u, _Cause.GATE if u in late else _Cause.DATA) for u in (*made, *vertex.after)]
        for u, v in plan.data_edges:
            self._before[v].append((u, _Cause.DATA))
        for u, v in plan.memory_edges:
            self._before[v].append((u, _Cause.MEMORY))

    def gaps(self, lane: Lane, free: float, event: TracedEvent) -> Iterator[_Gap]:
        """Those between second ``free``, from which on the lane has nothing to run, and ``event``."""
        before = enumerate(self._before[event.vertex])
        ended = [(self._ends[u], -i, u, cause) for i, (u, cause) in before if u in self._ends]
        until, _, waited_for, cause = max(ended, default=(0.0, 0, -1, _Cause.START))
        if cause is _Cause.GATE:
            # The caller's time between the outputs and the backward: nobody else ends it.
            until = event.start
        until = min(until, event.start)
        if until > free + _LEAST:
            yield _Gap(lane, free, until, cause, event.vertex, waited_for)
        if event.start > max(free, until) + _LEAST:
            yield _Gap(lane, max(free, until), event.start, _Cause.START, event.vertex, -1)
