"""A step as one JSON object for its page: events by lane, values by place, moves and waits with their reasons.

Seconds are integers of nanoseconds. Texts are numbers of ``texts``, events and values rows of columns: a step of twenty
thousand vertices stays a few megabytes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from disco_accel.graph.carried_values import carried_values
from disco_accel.graph.copies import swaps, swaps_out
from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.observe.headline import choices, figures_rows, headline
from disco_accel.observe.idle_gaps import Lane, by_lane, gate_second, idle_gaps
from disco_accel.observe.module_table import module_rows, phases
from disco_accel.observe.plots import GROUPS, LANE_NAMES, group_of
from disco_accel.observe.step_folder import _Step
from disco_accel.observe.tensor_moves import moved_values
from disco_accel.observe.timeline import Content, levels, stays

VERSION = 1
"""Of the object: its page reads this one alone."""

_NANO = 1e9


def step_model(step: _Step) -> dict[str, Any]:
    """The model of ``step``, ready for JSON."""
    return _Model(step).run()


def common_prefix(names: Sequence[str]) -> str:
    """The parts, each with its dot, that all ``names`` with a dot begin with; the name of a list stays with its
    numbers."""
    dotted = [name.split(".") for name in set(names) if "." in name]
    shared = ""
    for parts, after in itertools.pairwise(zip(*dotted, strict=False)):
        if len(set(parts)) > 1 or any(part.isdigit() for part in (*parts, *after)):
            break
        shared += f"{parts[0]}."
    return shared if len(dotted) > 1 else ""


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _NANO)


class _Texts:
    """Texts, each once, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


class _Model:
    """Makes the model of one step."""

    def __init__(self, step: _Step) -> None:
        self.step = step
        self.text = _Texts()
        self.by_id = {vertex.id: vertex for vertex in step.plan.vertices}
        self.carried = carried_values(step.plan)
        self.values: dict[Ref, int] = {}
        self.lanes = _ordered(by_lane(step.plan, step.events), self._hosts())
        self.prefix = common_prefix(list(step.facts.names.values()))
        self.there = stays(step.plan, step.events)
        self.phase = phases(step.plan)
        self.gaps = idle_gaps(step.plan, step.events)

    def run(self) -> dict[str, Any]:
        """All parts."""
        step = self.step
        gate = gate_second(step.plan, step.events)
        moved = moved_values(step.plan, step.events, self.there)
        rows = module_rows(step.plan, step.events, self.there, step.facts, self.phase)
        model = {
            "version": VERSION,
            "title": step.plan.name or "one step",
            "prefix": self.prefix,
            "source": step.source,
            "estimatedFor": step.figures.estimated_for,
            "finish": _nanoseconds(step.finish),
            "gate": None if gate is None else _nanoseconds(gate),
            "cyclic": step.plan.cyclic,
            "groups": GROUPS,
            "lanes": [self._lane(lane, events) for lane, events in self.lanes.items()],
            "events": self._events(),
            "phases": self._phases(),
            "classes": [content.value for content in Content],
            "stays": self._stays(),
            "memory": [self._memory(device.id) for device in step.plan.devices if not device.is_host_device],
            "budget": {"total": step.figures.total, "outside": step.figures.outside},
            "moved": [self._moved(each) for each in moved],
            "modules": [self._module(row) for row in rows],
            "gaps": self._gaps(),
            "headline": headline(step, self.gaps, self.lanes),
            "choices": choices(step, rows),
            "figures": figures_rows(step),
        }
        # Last: the parts above have named all values and texts.
        model["values"] = [self.text(self.called(ref)) for ref in self.values]
        model["texts"] = list(self.text.numbers)
        return model

    def _hosts(self) -> set[int]:
        return {device.id for device in self.step.plan.devices if device.is_host_device}

    def called(self, ref: Ref) -> str:
        """The name of a value of the task graph: its tensor's, or those of its kernel and module."""
        vertex, facts = self.by_id[ref[0]], self.step.facts
        if vertex.kind is VertexKind.INPUT:
            named = facts.names.get(vertex.id, "")
            return named.removeprefix(self.prefix) or f"{vertex.op or 'input'} {vertex.id}"
        module = self.module(vertex.id)
        part = f"[{ref[1]}]" if ref[1] else ""
        return f"{_short(vertex)}{part} {vertex.id}" + (f" of {module}" if module else "")

    def module(self, vertex: int) -> str:
        """The module of a kernel as it is shown, "" for none."""
        return self.step.facts.modules.get(vertex, "").removeprefix(self.prefix)

    def value(self, ref: Ref) -> int:
        """The number of the value of the task graph that ``ref`` holds."""
        return self.values.setdefault(self.carried.get(ref, ref), len(self.values))

    def _name(self, vertex: Vertex) -> str:
        if not swaps(vertex):
            return _short(vertex)
        verb = "offload" if swaps_out(vertex) else "reload"
        return f"{verb} {self.called(self.carried[vertex.id, 0])}"

    def _events(self) -> dict[str, list[int]]:
        facts = self.step.facts
        columns: dict[str, list[int]] = defaultdict(list)
        for number, events in enumerate(self.lanes.values()):
            for event in events:
                vertex = self.by_id[event.vertex]
                row = {
                    "id": event.vertex,
                    "lane": number,
                    "start": _nanoseconds(event.start),
                    "end": _nanoseconds(event.end),
                    "bytes": event.bytes,
                    "name": self.text(self._name(vertex)),
                    "module": self.text(self.module(event.vertex)),
                    "group": GROUPS.index(group_of(vertex)),
                    "phase": self.phase[event.vertex],
                    "again": facts.repeats.get(event.vertex, -1),
                    "fused": facts.fused.get(event.vertex, 0),
                }
                for key, number_there in row.items():
                    columns[key].append(number_there)
        return dict(columns)

    def _lane(self, lane: Lane, events: Sequence[Any]) -> dict[str, Any]:
        device, name = lane
        several = len(self.step.plan.devices) - len(self._hosts()) > 1
        kernels = name.startswith("compute")
        if kernels:
            streams = sum(other[0] == device and other[1].startswith("compute") for other in self.lanes)
            label = "host" if device in self._hosts() else "kernels"
            label += f" {name.removeprefix('compute')}" if streams > 1 else ""
        else:
            label = LANE_NAMES.get(name, name)
        return {
            "label": f"{label}, {device}" if several and device not in self._hosts() else label,
            "device": device,
            "kernels": kernels,
            "busy": sum(_nanoseconds(event.end) - _nanoseconds(event.start) for event in events),
            "bytes": sum(event.bytes for event in events),
            "count": len(events),
        }

    def _phases(self) -> list[dict[str, Any]]:
        """Spans of the kernels of each phase; they may overlap where several lanes run."""
        spans: dict[int, list[float]] = {}
        for event in self.step.events:
            if self.by_id[event.vertex].kind is VertexKind.KERNEL:
                span = spans.setdefault(self.phase[event.vertex], [event.start, event.end])
                span[:] = [min(span[0], event.start), max(span[1], event.end)]
        names = ("forward", "backward", "update")
        return [
            {"name": names[each], "start": _nanoseconds(start), "end": _nanoseconds(end)}
            for each, (start, end) in sorted(spans.items())
        ]

    def _stays(self) -> dict[str, list[int]]:
        contents = list(Content)
        columns: dict[str, list[int]] = {
            key: [] for key in ("value", "class", "device", "addr", "size", "start", "end")
        }
        for stay in self.there:
            for key, number in zip(
                columns,
                (
                    *(self.value(stay.ref), contents.index(stay.content), stay.device, stay.addr, stay.size),
                    *(_nanoseconds(stay.start), _nanoseconds(stay.end)),
                ),
                strict=True,
            ):
                columns[key].append(number)
        return columns

    def _memory(self, device: int) -> dict[str, Any]:
        """Changes of each class at each time: their sum up to a time is the bytes there."""
        times, held = levels(stay for stay in self.there if stay.device == device)
        changes: list[list[int]] = []
        before = [0] * len(Content)
        for k, time in enumerate(times):
            for number, content in enumerate(Content):
                if held[content][k] != before[number]:
                    changes.append([_nanoseconds(time), number, held[content][k] - before[number]])
                    before[number] = held[content][k]
        peak = max((sum(parts) for parts in zip(*held.values(), strict=True)), default=0)
        return {"device": device, "changes": _columns(changes, ("time", "class", "bytes")), "peak": peak}

    def _moved(self, moved: Any) -> dict[str, Any]:
        owner = self.by_id[moved.value[0]]
        loads = [
            {
                "copy": load.copy,
                "size": load.size,
                "left": _nanoseconds(load.left),
                "reason": load.reason.value,
                "room": [[self.value(ref), size] for ref, size in load.room],
                "reader": load.reader,
                "needed": _nanoseconds(load.needed),
            }
            for load in moved.loads
        ]
        return {
            "value": self.value(moved.value),
            "weight": owner.kind is VertexKind.INPUT,
            "size": owner.sizes[moved.value[1]],
            "loaded": moved.loaded,
            "saved": moved.saved,
            "saves": [vertex for vertex, _ in moved.saves],
            "loads": loads,
        }

    def _module(self, row: Any) -> dict[str, Any]:
        return {
            "module": self.text(row.module.removeprefix(self.prefix)),
            "kernels": row.kernels,
            "seconds": [_nanoseconds(seconds) for seconds in row.seconds],
            "again": _nanoseconds(row.again),
            "loaded": row.loaded,
            "saved": row.saved,
            "weights": row.weights,
            "activations": row.activations,
        }

    def _gaps(self) -> dict[str, list[Any]]:
        numbers = {lane: number for number, lane in enumerate(self.lanes)}
        rows = [
            [
                *(numbers[gap.lane], _nanoseconds(gap.start), _nanoseconds(gap.end), gap.cause.value),
                *(gap.then, gap.waited_for, self._waited(gap.waited_for)),
            ]
            for gap in self.gaps
        ]
        return _columns(rows, ("lane", "start", "end", "cause", "then", "for", "what"))

    def _waited(self, vertex: int) -> int:
        found = self.by_id.get(vertex)
        if found is None:
            return self.text("")
        return self.text(self._name(found) if swaps(found) else self.called((vertex, 0)))


def _columns(rows: Iterable[Sequence[Any]], keys: Sequence[str]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {key: [] for key in keys}
    for row in rows:
        for key, cell in zip(keys, row, strict=True):
            columns[key].append(cell)
    return columns


def _short(vertex: Vertex) -> str:
    return vertex.op.removeprefix("aten::") or f"{vertex.kind.name.lower()} {vertex.id}"


def _ordered(lanes: Mapping[Lane, list[Any]], hosts: set[int]) -> dict[Lane, list[Any]]:
    """Kernels of the devices, of the host, then the copies: into devices, out of them, between them, others."""
    rank = {name: number for number, name in enumerate(LANE_NAMES)}

    def place(lane: Lane) -> tuple[int, int, int, str]:
        device, name = lane
        kernels = name.startswith("compute")
        return (0 if kernels else 1, rank.get(name, len(rank)) if not kernels else int(device in hosts), device, name)

    return {lane: lanes[lane] for lane in sorted(lanes, key=place)}
