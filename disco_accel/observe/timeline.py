"""One step in time: the run of each kernel and copy, and the content of the arena meanwhile.

Input is a plan and the events that the executor traced; output is plain data, or a file for Chrome's and Perfetto's
trace viewers. No torch.
"""

from __future__ import annotations

import bisect
import enum
import json
import os
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from disco_accel.graph.carried_values import carried_values, inputs_held, taskgraph_of
from disco_accel.graph.copies import kind_name, swaps, swaps_in, swaps_out
from disco_accel.graph.files import write_atomically
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.graph.values import is_handed_out, must_survive_step
from disco_accel.observe.step_facts import NO_FACTS, _StepFacts
from disco_accel.plan.summary import staying

TRACE_VERSION = 1
"""Of the parts of a trace that are not of the Trace Event format: arguments of its rows, and ``otherData``."""


class TracedEvent(Protocol):
    """One vertex of a step as it ran; times in seconds from the start of the step, ``bytes`` moved by a copy."""

    @property
    def vertex(self) -> int: ...
    @property
    def lane(self) -> str: ...
    @property
    def issue(self) -> float: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _StepEvent:
    """A ``TracedEvent`` of a simulated step, or one that was read from a file."""

    vertex: int
    lane: str
    issue: float
    start: float
    end: float
    bytes: int


class Content(enum.Enum):
    """The use of a range of the arena."""

    RESIDENT = "weights that stay"
    STREAMED = "streamed weights"
    ACTIVATION = "activations"
    SCRATCH = "scratch"
    KEPT = "loss and gradients"


@dataclass(frozen=True, slots=True)
class _Stay:
    """A value's time in the arena: ``start`` to ``end`` seconds at ``addr`` .. ``addr + size`` bytes of ``device``."""

    ref: Ref
    content: Content
    device: int
    addr: int
    size: int
    start: float
    end: float


def contents(plan: MemGraph) -> dict[Ref, Content]:
    """The content of each value that has an address."""
    return _contents(plan, inputs_held(plan))


def _contents(plan: MemGraph, input_of: Mapping[Ref, int]) -> dict[Ref, Content]:
    by_id, resident = {v.id: v for v in plan.vertices}, staying(plan)
    read = {ref for vertex in plan.vertices for ref in vertex.inputs}
    return {ref: _content(by_id[ref[0]], input_of.get(ref), resident, ref in read) for ref in plan.slots}


def _content(vertex: Vertex, input_held: int | None, resident: Container[int], read: bool) -> Content:
    if input_held is not None:
        # A weight that is there when the step starts, makes room and comes back is one of those that are streamed.
        return Content.RESIDENT if input_held in resident else Content.STREAMED
    if must_survive_step(vertex):
        return Content.KEPT
    # A kernel's scratch is an output that nobody reads.
    return Content.ACTIVATION if read or is_handed_out(vertex) else Content.SCRATCH


def stays(plan: MemGraph, events: Sequence[TracedEvent]) -> list[_Stay]:
    """When each value occupied its address in the traced step, by start time.

    A value is there from the start of its producer to the end of its last reader. Kept values, inputs, and values that
    were brought back for the next step stay to the end, unless another value gets their place.
    """
    ran = {e.vertex: e for e in events}
    finish = max((e.end for e in events), default=0.0)
    by_id = {v.id: v for v in plan.vertices}
    last_read = _last_reads(plan, ran)
    input_of = inputs_held(plan)
    what = _contents(plan, input_of)
    at_start: dict[int, list[Ref]] = defaultdict(list)
    for ref in plan.slots:
        if ref in input_of and by_id[ref[0]].kind is VertexKind.INPUT:
            at_start[input_of[ref]].append(ref)

    def within(inner: Ref, outer: Ref) -> bool:
        (small, large), sizes = (plan.slots[inner], plan.slots[outer]), by_id[outer[0]].sizes
        end = large.offset + sizes[outer[1]] - by_id[inner[0]].sizes[inner[1]]
        return small.space == large.space and large.offset <= small.offset <= end

    stays: list[_Stay] = []
    lasting: list[_Stay] = []
    for ref, slot in plan.slots.items():
        vertex = by_id[ref[0]]
        if swaps_out(vertex):
            continue
        event = ran.get(ref[0])
        if event is None and vertex.kind is not VertexKind.INPUT:
            continue
        start, produced = (event.start, event.end) if event is not None else (0.0, 0.0)
        end = max(last_read.get(ref, 0.0), produced)
        stay = _Stay(ref, what[ref], slot.space, slot.offset, vertex.sizes[ref[1]], start, end)
        back = any(within(resident, ref) for resident in at_start[input_of[ref]]) if ref in input_of else False
        lasts = must_survive_step(vertex) or vertex.kind is VertexKind.INPUT or back
        (lasting if lasts else stays).append(stay)
    taken = _Places([*stays, *lasting])
    stays += [s if taken.later(s) else replace(s, end=finish) for s in lasting]
    return sorted(stays, key=lambda s: (s.start, s.addr, s.ref))


def _last_reads(plan: MemGraph, ran: Mapping[int, TracedEvent]) -> dict[Ref, float]:
    """When the last reader of each value on the device ended."""
    last: dict[Ref, float] = {}
    home_uses, carried = HomeUses.of(taskgraph_of(plan)), carried_values(plan)
    for vertex in plan.vertices:
        event = ran.get(vertex.id)
        if event is None or swaps_in(vertex):
            # A reload reads the host's copy: a resident that it brings back may have left the device long before.
            continue
        for ref in vertex.inputs:
            if not home_uses.at_home(vertex, carried[ref]):
                last[ref] = max(last.get(ref, 0.0), event.end)
    return last


class _Places:
    """Finds the values that use a place after another value has."""

    def __init__(self, stays: Iterable[_Stay]) -> None:
        self._sorted = sorted(stays, key=lambda s: (s.device, s.addr))
        self._keys = [(s.device, s.addr) for s in self._sorted]
        self._widest = max((s.size for s in self._sorted), default=0)

    def later(self, stay: _Stay) -> bool:
        low = bisect.bisect_right(self._keys, (stay.device, stay.addr - self._widest))
        high = bisect.bisect_left(self._keys, (stay.device, stay.addr + stay.size))
        others = self._sorted[low:high]
        return any(o.start >= stay.end and o.addr + o.size > stay.addr and o.ref != stay.ref for o in others)


def occupancy(
    plan: MemGraph, events: Sequence[TracedEvent], device: int = 0
) -> tuple[list[float], dict[Content, list[int]]]:
    """Times in seconds, and for each content the bytes of the arena of ``device`` that it takes from each on."""
    return levels(stay for stay in stays(plan, events) if stay.device == device)


def levels(there: Iterable[_Stay]) -> tuple[list[float], dict[Content, list[int]]]:
    """As ``occupancy``, of the stays on one device."""
    changes: dict[float, dict[Content, int]] = defaultdict(lambda: defaultdict(int))
    for content, low, high, size in _merged(there):
        changes[low][content] += size
        changes[high][content] -= size
    times = sorted(changes)
    held: dict[Content, list[int]] = {content: [] for content in Content}
    now: dict[Content, int] = dict.fromkeys(Content, 0)
    for time in times:
        for content in Content:
            now[content] += changes[time][content]
            held[content].append(now[content])
    return times, held


def _merged(stays: Iterable[_Stay]) -> Iterable[tuple[Content, float, float, int]]:
    # Two stays overlap at one address only where a result was written over its own input: count those bytes once.
    by_addr: dict[int, list[_Stay]] = defaultdict(list)
    for stay in stays:
        by_addr[stay.addr].append(stay)
    for group in by_addr.values():
        reach = -1.0
        for stay in group:
            start = max(stay.start, reach)
            if stay.end > start:
                yield stay.content, start, stay.end, stay.size
            reach = max(reach, stay.end)


def chrome_trace(
    plan: MemGraph, events: Sequence[TracedEvent], facts: _StepFacts = NO_FACTS, source: str = "measured"
) -> dict[str, Any]:
    """The step as a Trace Event object: one row per lane, a counter of bytes in use, arrows from copies to readers.

    ``source``: ``measured`` or ``simulated``. With it ``otherData`` has the names of inputs, so that ``step_folder.py``
    reads all of a step from its trace and its plan.
    """
    by_id = {v.id: v for v in plan.vertices}
    lanes = lane_order(events)
    rows: list[dict[str, Any]] = [_metadata("process_name", plan.name or "step", 0)]
    for number, lane in enumerate(lanes):
        rows.append(_metadata("thread_name", lane, number))
        rows.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    for event in events:
        vertex = by_id[event.vertex]
        rows.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(event.lane),
                "name": label(vertex, by_id, facts.names),
                "cat": kind_name(vertex),
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "args": {
                    **{"vertex": vertex.id, "bytes": event.bytes, "issued": event.issue * 1e6},
                    **facts.args(vertex.id),
                },
            }
        )
    rows += _flows(plan, events, lanes)
    for device in plan.devices:
        times, held = occupancy(plan, events, device.id)
        for time, *parts in zip(times, *held.values(), strict=True):
            rows.append(_counter(f"arena {device.id}", time, {"bytes": sum(parts)}))
    more = {"version": TRACE_VERSION, "source": source, "names": sorted(facts.names.items())}
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": more}


def label(vertex: Vertex, by_id: Mapping[int, Vertex], names: Mapping[int, str]) -> str:
    """A short name of a vertex; a copy is named by its value, an INPUT by its tensor."""
    if swaps(vertex):
        source = by_id[vertex.inputs[0][0]]
        if swaps_in(vertex) and swaps_out(source):
            source = by_id[source.inputs[0][0]]
        return f"{kind_name(vertex)} {names.get(source.id) or source.op or source.id}"
    return vertex.op or f"{kind_name(vertex)} {vertex.id}"


def lane_order(events: Sequence[TracedEvent]) -> list[str]:
    """Lanes in reading order: compute streams first, then the links into the device, out of it, to other devices."""
    rank = {"h2d": 1, "d2h": 2, "p2p": 3}
    return sorted({e.lane for e in events}, key=lambda lane: (rank.get(lane, 0), lane))


def _flows(plan: MemGraph, events: Sequence[TracedEvent], lanes: list[str]) -> list[dict[str, Any]]:
    """An arrow from each reload to the first vertex that reads it."""
    ran = {e.vertex: e for e in events}
    first: dict[int, TracedEvent] = {}
    swapped_in = {v.id for v in plan.vertices if swaps_in(v)}
    for vertex in plan.vertices:
        reader = ran.get(vertex.id)
        for source, _ in vertex.inputs:
            if reader is None or source not in swapped_in:
                continue
            if source not in first or reader.start < first[source].start:
                first[source] = reader
    rows = []
    for source, reader in first.items():
        copy = ran.get(source)
        if copy is None:
            continue
        both = {"pid": 0, "cat": "reload", "name": "needed by", "id": source}
        rows.append({"ph": "s", "tid": lanes.index(copy.lane), "ts": copy.start * 1e6, **both})
        rows.append({"ph": "f", "bp": "e", "tid": lanes.index(reader.lane), "ts": reader.start * 1e6, **both})
    return rows


def _metadata(kind: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": {"name": name}}


def _counter(name: str, time: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": 0, "name": name, "ts": time * 1e6, "args": values}


def write_chrome_trace(
    path: str | os.PathLike[str],
    plan: MemGraph,
    events: Sequence[TracedEvent],
    facts: _StepFacts = NO_FACTS,
    source: str = "measured",
) -> None:
    """Write ``chrome_trace`` as JSON, all or nothing; open it in Perfetto or chrome://tracing."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, json.dumps(chrome_trace(plan, events, facts, source)).encode())
