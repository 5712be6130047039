"""Version-2 graphs and plans as JSON (docs/schema.md): strict reading, deterministic bytes."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from disco_accel.errors import GraphFileError
from disco_accel.graph.schema2 import (
    GATE,
    Buffer,
    Edge,
    Graph,
    Plan,
    Planned,
    Space,
    SpaceKind,
    Value,
    Version,
    Vertex,
    Work,
)
from disco_accel.graph.schema2_check import check_graph
from disco_accel.graph.strict_json import a_list, an_object, flag, integer, number, shown, text
from disco_accel.graph.traits import MADE, Arrival, Traits

VERSION = 2
MAX_SPACES = 1024
_LISTS = ("values", "vertices", "buffers", "order")
_GATE = "gate"

_Word = TypeVar("_Word", bound=enum.StrEnum)
_Entry = TypeVar("_Entry")


def graph_from_json(top: Mapping[str, Any]) -> Graph:
    """Build the graph that ``top``, the object of a version-2 file, describes. Raises GraphFileError."""
    outputs = an_object(top.get("outputs", {}), "outputs")
    return check_graph(
        Graph(
            text(top, "name", "graph"),
            _spaces(top),
            tuple(_all(top, "values", _value)),
            tuple(_all(top, "vertices", _vertex)),
            tuple([_version(raw, "outputs: gate") for raw in a_list(outputs.get("gate", []), "outputs: gate")]),
            tuple([_version(raw, "outputs: end") for raw in a_list(outputs.get("end", []), "outputs: end")]),
        )
    )


def plan_from_json(top: Mapping[str, Any]) -> Plan:
    """Build the plan that ``top`` describes; its names must exist. Whether it is a safe plan is for a judge to say."""
    graph = graph_from_json(top)
    edges = an_object(top.get("edges", {}), "edges")
    plan = Plan(
        graph,
        tuple(_all(top, "buffers", _buffer)),
        tuple(_all(top, "order", _planned)),
        _edges(edges.get("data", []), "edges: data"),
        _edges(edges.get("memory", []), "edges: memory"),
        flag(top, "cyclic", "graph"),
    )
    _check_names(plan)
    return plan


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """Return ``graph`` as the object that its file holds; ``ops`` have no place in it."""
    top = _head("taskgraph", graph)
    return top | {
        "values": list(map(_value_to_json, graph.values)),
        "vertices": list(map(_vertex_to_json, graph.vertices)),
    }


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return ``plan`` as the object that its file holds."""
    top = graph_to_json(plan.graph) | {"format": "memgraph"}
    top["edges"] = {
        "data": list(map(_edge_to_json, plan.data_edges)),
        "memory": list(map(_edge_to_json, plan.memory_edges)),
    }
    if plan.cyclic:
        top["cyclic"] = True
    top["buffers"] = [
        {"id": b.id, "version": _version_to_json(b.version), "space": b.space}
        | ({} if b.offset is None else {"offset": b.offset})
        | ({"begin": b.begin} if b.begin else {})
        | ({} if b.bytes is None else {"bytes": b.bytes})
        for b in plan.buffers
    ]
    top["order"] = [{"id": p.id, "reads": list(p.reads), "writes": list(p.writes)} for p in plan.order]
    return top


def lines(data: Mapping[str, Any]) -> bytes:
    """Return ``data`` as JSON with a line for each value, vertex, buffer and entry of the order."""
    rest = {key: value for key, value in data.items() if key not in _LISTS}
    parts = [json.dumps(rest, separators=(",", ":"))[:-1]]
    for key in _LISTS:
        if key in data:
            entries = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in data[key])
            parts.append(f'"{key}":[\n{entries}\n]')
    return (",\n".join(parts) + "}\n").encode()


def _all(top: Mapping[str, Any], key: str, read: Callable[[dict[str, Any], str], _Entry]) -> list[_Entry]:
    entries = []
    for index, raw in enumerate(a_list(top.get(key), key)):
        entry = an_object(raw, f"{key}[{index}]")
        if "id" not in entry:
            raise GraphFileError(f"{key}[{index}]: id: missing")
        entries.append(read(entry, f"{key[:-1] if key != 'vertices' else 'vertex'} {shown(entry['id'])}"))
    return entries


def _word(entry: Mapping[str, Any], key: str, where: str, words: type[_Word], default: _Word | None = None) -> _Word:
    raw = entry.get(key, default)
    known = [str(word) for word in words]
    if not isinstance(raw, str) or raw not in known:
        raise GraphFileError(f"{where}: {key}: expected one of {', '.join(known)}, got {shown(raw)}")
    return words(raw)


def _spaces(top: Mapping[str, Any]) -> tuple[Space, ...]:
    listed = a_list(top.get("spaces"), "spaces")
    if len(listed) > MAX_SPACES:
        raise GraphFileError(f"spaces: {len(listed)} are more than the {MAX_SPACES} that a graph may have")
    spaces = []
    for index, raw in enumerate(listed):
        where = f"spaces[{index}]"
        entry = an_object(raw, where)
        size = None if entry.get("bytes") is None else integer(entry, "bytes", where)
        kind = _word(entry, "kind", where, SpaceKind)
        alignment = integer(entry, "alignment", where, 256, least=1)
        spaces.append(Space(integer(entry, "id", where), kind, size, alignment, flag(entry, "kernels", where)))
    return tuple(spaces)


def _value(entry: Mapping[str, Any], where: str) -> Value:
    return Value(
        integer(entry, "id", where),
        integer(entry, "bytes", where),
        integer(entry, "space", where),
        Traits(**{field.name: _trait(entry, field.name, where) for field in fields(Traits)}),
        None if entry.get("home") is None else integer(entry, "home", where),
        text(entry, "name", where),
    )


def _trait(entry: Mapping[str, Any], key: str, where: str) -> Any:
    default = getattr(MADE, key)
    return flag(entry, key, where) if isinstance(default, bool) else _word(entry, key, where, type(default), default)


def _vertex(entry: Mapping[str, Any], where: str) -> Vertex:
    duration = entry.get("duration")
    if duration is not None:
        if isinstance(duration, bool) or not isinstance(duration, int | float):
            raise GraphFileError(f"{where}: duration: expected seconds, got {shown(duration)}")
        if not (0 <= duration <= 1e18 and math.isfinite(duration)):
            raise GraphFileError(f"{where}: duration: expected 0 or more seconds, got {shown(duration)}")
        duration = float(duration)
    return Vertex(
        integer(entry, "id", where),
        _word(entry, "kind", where, Work, Work.KERNEL),
        integer(entry, "space", where),
        text(entry, "op", where),
        tuple([_version(raw, f"{where}: reads") for raw in a_list(entry.get("reads", []), f"{where}: reads")]),
        tuple([_version(raw, f"{where}: writes") for raw in a_list(entry.get("writes", []), f"{where}: writes")]),
        duration,
        tuple([_vertex_id(raw, f"{where}: after") for raw in a_list(entry.get("after", []), f"{where}: after")]),
        _numbers(entry, "may_overwrite", where),
    )


def _buffer(entry: Mapping[str, Any], where: str) -> Buffer:
    offset = None if entry.get("offset") is None else integer(entry, "offset", where)
    version = _version(entry.get("version"), f"{where}: version")
    size = None if entry.get("bytes") is None else integer(entry, "bytes", where)
    begin = integer(entry, "begin", where, 0)
    return Buffer(integer(entry, "id", where), version, integer(entry, "space", where), offset, begin, size)


def _planned(entry: Mapping[str, Any], where: str) -> Planned:
    return Planned(integer(entry, "id", where), _numbers(entry, "reads", where), _numbers(entry, "writes", where))


def _numbers(entry: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    return tuple([number(raw, f"{where}: {key}") for raw in a_list(entry.get(key, []), f"{where}: {key}")])


def _version(raw: object, where: str) -> Version:
    if not isinstance(raw, list):
        return number(raw, where), 0
    if len(raw) != 2:
        raise GraphFileError(f"{where}: expected value or [value, version], got {shown(raw)}")
    return number(raw[0], where), number(raw[1], where)


def _vertex_id(raw: object, where: str) -> int:
    return GATE if raw == _GATE else number(raw, where)


def _edges(raw: object, where: str) -> tuple[Edge, ...]:
    edges = []
    for pair in a_list(raw, where):
        if not isinstance(pair, list) or len(pair) != 2:
            raise GraphFileError(f"{where}: expected [u, v], got {shown(pair)}")
        edges.append((_vertex_id(pair[0], where), number(pair[1], where)))
    return tuple(edges)


def _check_names(plan: Plan) -> None:
    """Refuse what no plan can mean, so that who reads one can look everything up."""
    buffers = {buffer.id: buffer for buffer in plan.buffers}
    if len(buffers) != len(plan.buffers):
        raise GraphFileError("buffers: two have the same id")
    versions = {version for vertex in plan.graph.vertices for version in vertex.writes}
    versions |= {(value.id, 0) for value in plan.graph.values if value.traits.arrival is not Arrival.MADE}
    for buffer in plan.buffers:
        if buffer.version not in versions:
            raise GraphFileError(f"buffer {buffer.id}: version: nothing writes {list(buffer.version)}")
        if buffer.space not in plan.graph.space:
            raise GraphFileError(f"buffer {buffer.id}: space: there is no space {buffer.space}")
        begin, end = buffer.range(value := plan.graph.value[buffer.version[0]])
        if not 0 <= begin <= end <= value.bytes or (begin == end and value.bytes):
            key = "begin" if buffer.bytes is None else "bytes"
            raise GraphFileError(f"buffer {buffer.id}: {key}: [{begin}, {end}) is not among {value.bytes} bytes")
    ids = {planned.id for planned in plan.order}
    if len(ids) != len(plan.order):
        raise GraphFileError("order: two entries have the same id")
    vertices = {vertex.id: vertex for vertex in plan.graph.vertices}
    written: set[int] = set()
    for planned in plan.order:
        _check_planned(planned, buffers, vertices.get(planned.id), written)
    for u, v in (*plan.data_edges, *plan.memory_edges):
        if v not in ids or (u != GATE and u not in ids):
            raise GraphFileError(f"edges: [{_vertex_to_word(u)}, {v}] names a vertex that is not in the order")


def _check_planned(planned: Planned, buffers: Mapping[int, Buffer], vertex: Vertex | None, written: set[int]) -> None:
    where = f"order: vertex {planned.id}"
    for key, numbers in (("reads", planned.reads), ("writes", planned.writes)):
        for each in numbers:
            if each not in buffers:
                raise GraphFileError(f"{where}: {key}: there is no buffer {each}")
        wanted = None if vertex is None else vertex.reads if key == "reads" else vertex.writes
        more = key == "reads" and vertex is not None and vertex.work is Work.KERNEL and len(numbers) > len(wanted or ())
        if len(numbers) != (1 if wanted is None else len(wanted)) and not more:
            raise GraphFileError(f"{where}: {key}: has {len(numbers)} buffers")
    for each in planned.writes:
        if each in written:
            raise GraphFileError(f"{where}: writes: buffer {each} is written by another vertex too")
        written.add(each)


def _head(kind: str, graph: Graph) -> dict[str, Any]:
    spaces = [
        {"id": s.id, "kind": str(s.kind)}
        | ({} if s.bytes is None else {"bytes": s.bytes})
        | {"alignment": s.alignment}
        | ({"kernels": True} if s.kernels else {})
        for s in graph.spaces
    ]
    top: dict[str, Any] = {"format": kind, "version": VERSION, "name": graph.name, "spaces": spaces}
    outputs = {"gate": _versions(graph.at_gate), "end": _versions(graph.at_end)}
    top["outputs"] = {key: versions for key, versions in outputs.items() if versions}
    return top


def _versions(versions: Sequence[Version]) -> list[object]:
    return [_version_to_json(version) for version in versions]


def _version_to_json(version: Version) -> object:
    return list(version) if version[1] else version[0]


def _vertex_to_word(vertex: int) -> object:
    return _GATE if vertex == GATE else vertex


def _edge_to_json(edge: Edge) -> list[object]:
    return [_vertex_to_word(edge[0]), edge[1]]


def _value_to_json(value: Value) -> dict[str, Any]:
    raw: dict[str, Any] = {"id": value.id, "bytes": value.bytes, "space": value.space}
    for field in fields(Traits):
        trait = getattr(value.traits, field.name)
        if trait != getattr(MADE, field.name):
            raw[field.name] = trait if isinstance(trait, bool) else str(trait)
    if value.home is not None:
        raw["home"] = value.home
    if value.name:
        raw["name"] = value.name
    return raw


def _vertex_to_json(vertex: Vertex) -> dict[str, Any]:
    raw: dict[str, Any] = {"id": vertex.id, "kind": str(vertex.work), "space": vertex.space, "op": vertex.op}
    raw["reads"], raw["writes"] = _versions(vertex.reads), _versions(vertex.writes)
    if vertex.duration is not None:
        raw["duration"] = vertex.duration
    if vertex.after:
        raw["after"] = [_vertex_to_word(other) for other in vertex.after]
    if vertex.may_overwrite:
        raw["may_overwrite"] = list(vertex.may_overwrite)
    return raw
