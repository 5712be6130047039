"""A step in its folder, as ``report_dir`` or ``disco-accel plan -o`` writes it: its plan, its trace and its figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disco_accel.errors import ConfigError, GraphFileError
from disco_accel.graph.files import MAX_FILE_BYTES, read_memgraph
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.strict_json import a_list, an_object, parse_json, shown
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.observe.step_facts import _StepFacts
from disco_accel.observe.timeline import TRACE_VERSION, TracedEvent, _StepEvent

FIGURES = {"measured": "stats.json", "simulated": "forecast.json"}
"""The file of a step's figures by the source of its events."""

_AGAIN = "write the folder again, with report_dir or disco-accel plan -o"


@dataclass(frozen=True)
class _Figures:
    """``total`` bytes of the budget, of which the named parts ``outside`` are not the plan's; seconds of a step, of the
    bound, and of kernels, None where they are not known. ``more``: all figures as the file has them."""

    total: int
    outside: Mapping[str, int]
    step_seconds: float | None
    bound_seconds: float | None
    compute_seconds: float | None
    estimated_for: str | None
    more: Mapping[str, Any]


@dataclass(frozen=True)
class _Step:
    """One step: ``source`` says whether ``events`` were ``measured`` or ``simulated``."""

    plan: MemGraph
    events: Sequence[TracedEvent]
    facts: _StepFacts
    source: str
    figures: _Figures

    @property
    def finish(self) -> float:
        """Seconds."""
        return max((event.end for event in self.events), default=0.0)


def read_step(folder: str | os.PathLike[str]) -> _Step:
    """Read the step in ``folder``. Raises ConfigError, which names the file that is missing, damaged or of another
    version, and says how to get it again."""
    place = Path(folder)
    if not place.is_dir():
        raise ConfigError(f"{place}: is no folder; give one that report_dir or disco-accel plan -o wrote")
    trace = place / "trace.json"
    try:
        plan = read_memgraph(_there(place / "plan.json"))
        data = an_object(_parsed(_there(trace)), "the file")
        events, facts, source = _trace(data, plan)
    except GraphFileError as error:
        named = str(error) if str(error).startswith(str(place)) else f"{trace}: {error}"
        raise ConfigError(f"{named}; {_AGAIN}") from None
    path = place / FIGURES[source]
    try:
        figures = figures_of(an_object(_parsed(_there(path)), "the file"))
    except GraphFileError as error:
        named = str(error) if str(error).startswith(str(place)) else f"{path}: {error}"
        raise ConfigError(f"{named}; {_AGAIN}") from None
    return _Step(plan, events, facts, source, figures)


def figures_of(data: Mapping[str, Any]) -> _Figures:
    """The figures of ``stats(model)`` or of a forecast. Raises GraphFileError naming the key that is missing or odd."""
    budget = an_object(data.get("budget"), "budget")
    parts = {key: _count(budget, key) for key in budget}
    missing = [key for key in ("total", "arena") if key not in parts]
    if missing:
        raise GraphFileError(f"budget: {missing[0]}: missing")
    outside = {key: size for key, size in parts.items() if key not in ("total", "arena") and size}
    named = data.get("estimated_for")
    return _Figures(
        parts["total"],
        outside,
        _seconds(data, "step_seconds"),
        _seconds(data, "bound_seconds"),
        _seconds(data, "compute_seconds"),
        named if isinstance(named, str) else None,
        data,
    )


def _count(budget: Mapping[str, Any], key: str) -> int:
    value = budget[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise GraphFileError(f"budget: {key}: expected bytes, got {shown(value)}")
    return value


def _seconds(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise GraphFileError(f"{key}: expected seconds, got {shown(value)}")
    return float(value)


def _there(path: Path) -> Path:
    if not path.is_file():
        raise GraphFileError(f"{path}: is not there")
    return path


def _parsed(path: Path) -> object:
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise GraphFileError(f"cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise GraphFileError(f"larger than the {MAX_FILE_BYTES} bytes that a file may have")
    return parse_json(data)


def _trace(data: Mapping[str, Any], plan: MemGraph) -> tuple[list[_StepEvent], _StepFacts, str]:
    more = an_object(data.get("otherData", {}), "otherData")
    if more.get("version") != TRACE_VERSION or isinstance(more.get("version"), bool | float):
        raise GraphFileError(f"otherData: version: expected {TRACE_VERSION}, got {shown(more.get('version'))}")
    source = more.get("source")
    if source not in FIGURES:
        raise GraphFileError(f"otherData: source: expected measured or simulated, got {shown(source)}")
    names: dict[int, str] = {}
    for pair in a_list(more.get("names"), "otherData: names"):
        match pair:
            case [int(vertex), str(name)]:
                names[vertex] = name
            case _:
                raise GraphFileError(f"otherData: names: expected pairs of a vertex and a name, got {shown(pair)}")
    return *_rows(a_list(data.get("traceEvents"), "traceEvents"), plan, names), str(source)


def _rows(rows: list[Any], plan: MemGraph, names: Mapping[int, str]) -> tuple[list[_StepEvent], _StepFacts]:
    work = {vertex.id for vertex in plan.vertices if vertex.kind is not VertexKind.INPUT}
    lanes: dict[int, str] = {}
    events: dict[int, _StepEvent] = {}
    modules, repeats, fused = dict[int, str](), dict[int, int](), dict[int, int]()
    for number, row in enumerate(rows):
        where = f"traceEvents: row {number}"
        row = an_object(row, where)
        args = an_object(row.get("args", {}), f"{where}: args")
        if row.get("ph") == "M" and row.get("name") == "thread_name":
            lanes[_whole(row, "tid", where)] = str(args.get("name"))
        if row.get("ph") != "X":
            continue
        vertex = _whole(args, "vertex", where)
        if vertex not in work or vertex in events:
            raise GraphFileError(f"{where}: vertex {vertex} is none of plan.json's kernels and copies, or ran twice")
        start, length = _micro(row, "ts", where), _micro(row, "dur", where)
        lane, issue = lanes.get(_whole(row, "tid", where)), _micro(args, "issued", where)
        if lane is None:
            raise GraphFileError(f"{where}: tid: is the number of no lane")
        # Picoseconds: two that follow each other at one time do so after the way to microseconds and back.
        issue, start, end = (round(t * 1e-6, 12) for t in (issue, start, start + length))
        events[vertex] = _StepEvent(vertex, lane, issue, start, end, _whole(args, "bytes", where))
        if "module" in args:
            modules[vertex] = str(args["module"])
        if "repeats" in args:
            repeats[vertex] = _whole(args, "repeats", where)
        if "fused" in args:
            fused[vertex] = _whole(args, "fused", where)
    if missing := work - events.keys():
        raise GraphFileError(f"vertex {min(missing)} of plan.json has no row")
    return list(events.values()), _StepFacts(names, modules, repeats, fused)


def _whole(row: Mapping[str, Any], key: str, where: str) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise GraphFileError(f"{where}: {key}: expected a number, got {shown(value)}")
    return value


def _micro(row: Mapping[str, Any], key: str, where: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e15 < value < 1e15:
        raise GraphFileError(f"{where}: {key}: expected microseconds, got {shown(value)}")
    return float(value)
