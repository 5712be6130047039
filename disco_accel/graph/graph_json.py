"""Graphs and plans as JSON objects (docs/schema.md): strict reading of versions 1 and 3, deterministic bytes of 3.

Version 1 has other words for a few things: devices, three kinds of copies, marks of inputs, addresses. One reader knows
both, so that messages name the keys of the file that is read.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from disco_accel.errors import GraphFileError
from disco_accel.graph.check import called, check_taskgraph, stable_topological_order
from disco_accel.graph.copies import is_resident_range, swaps_in, swaps_out
from disco_accel.graph.memgraph import Edge, MemGraph, Slot
from disco_accel.graph.spaces import HOST, Space, SpaceKind
from disco_accel.graph.strict_json import a_list, an_object, flag, integer, number, plain, shown, text
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FOREIGN, FROZEN, LATE, LATE_FOREIGN, PER_STEP, Traits
from disco_accel.graph.values import never_changes
from disco_accel.sizes import MAX_SIZE

VERSION = 3
MAX_SPACES = 1024
_MAX_ID = 1 << 62
_HANDED_OUT = ("out", "keep")

_COPIES_1 = ("transfer", "offload", "reload")
"""Version 1's words for copies between devices, to the host, from the host."""

_MARKS_1 = ("clean", "late", "external")
_TRAITS_1 = {
    ("clean",): FROZEN,
    ("late",): LATE,
    ("external",): FOREIGN,
    ("late", "external"): LATE_FOREIGN,
    (): PER_STEP,
}
"""Marks of an input of version 1 → its traits. Others contradict each other."""

_Word = TypeVar("_Word", bound=enum.StrEnum)

IdNames = MutableMapping[int, str]
"""Vertex ids that are strings in a file: id in memory → text, so that a plan is written with its graph's own ids."""


def taskgraph_from_object(top: Mapping[str, Any], names: IdNames | None) -> TaskGraph:
    """Build the TaskGraph that ``top``, the object of a file, describes. Raises GraphFileError."""
    reader = _Reader(top["version"], "taskgraph", names)
    vertices = [reader.vertex(raw)[0] for raw in a_list(top.get("vertices"), "vertices")]
    _check_total(vertices)
    spaces = reader.spaces(top)
    _check_spaces(vertices, spaces, reader.space_key)
    return check_taskgraph(TaskGraph(text(top, "name", "graph"), spaces, tuple(reader.with_sources(vertices))))


def memgraph_from_object(top: Mapping[str, Any], names: IdNames | None) -> MemGraph:
    """Build the MemGraph that ``top`` describes; references must exist. Raises GraphFileError."""
    reader = _Reader(top["version"], "memgraph", names)
    vertices: list[Vertex] = []
    slots: dict[Ref, Slot] = {}
    for raw in a_list(top.get("vertices"), "vertices"):
        vertex, offsets = reader.vertex(raw)
        vertices.append(vertex)
        for output, offset in offsets.items():
            slots[vertex.id, output] = Slot(vertex.space, offset)
    edges = an_object(top.get("edges", {}), "edges")
    data_edges = reader.edges(edges.get("data", []), "edges.data")
    memory_edges = reader.edges(edges.get("memory", []), "edges.memory")
    spaces = reader.spaces(top)
    _check_ids(vertices, (*data_edges, *memory_edges))
    _check_spaces(vertices, spaces, reader.space_key)
    _check_shapes(vertices)
    cyclic = flag(top, "cyclic", "graph")
    vertices = reader.with_sources(vertices)
    if top["version"] == 1:
        spaces = _place_rest(spaces, vertices, slots)
    order = stable_topological_order(vertices, [*data_edges, *memory_edges])
    # A cycle is a fault of the plan, which verify reports, and not of the file.
    ordered = tuple(vertices if order is None else order)
    return MemGraph(text(top, "name", "graph"), spaces, ordered, slots, data_edges, memory_edges, cyclic)


def taskgraph_to_object(graph: TaskGraph, names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return ``graph`` as the object that its file holds; ``ops`` have no place in it."""
    vertices = [_vertex_to_object(vertex, {}, names or {}) for vertex in graph.vertices]
    return _top("taskgraph", graph, vertices)


def memgraph_to_object(plan: MemGraph, names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return ``plan`` as the object that its file holds."""
    label = names or {}
    top = _top("memgraph", plan, [_vertex_to_object(vertex, plan.slots, label) for vertex in plan.vertices])
    top["edges"] = {
        "data": [[label.get(u, u), label.get(v, v)] for u, v in plan.data_edges],
        "memory": [[label.get(u, u), label.get(v, v)] for u, v in plan.memory_edges],
    }
    if plan.cyclic:
        top["cyclic"] = True
    return top


def lines(data: Mapping[str, Any]) -> bytes:
    """Return ``data`` as JSON with a line for each vertex."""
    rest = {key: value for key, value in data.items() if key != "vertices"}
    entries = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in data["vertices"])
    return (json.dumps(rest, separators=(",", ":"))[:-1] + f',\n"vertices":[\n{entries}\n]}}\n').encode()


class _Reader:
    """Reads one file of ``version`` that holds a ``kind``, "taskgraph" or "memgraph"; ``names`` gets ids that are
    strings."""

    def __init__(self, version: int, kind: str, names: IdNames | None) -> None:
        self._first, self._plan, self._names = version == 1, kind == "memgraph", names
        self.space_key = "device" if self._first else "space"

    def spaces(self, top: Mapping[str, Any]) -> tuple[Space, ...]:
        key = "devices" if self._first else "spaces"
        listed = a_list(top.get(key), key)
        if len(listed) > MAX_SPACES:
            raise GraphFileError(f"{key}: {len(listed)} are more than the {MAX_SPACES} that a graph may have")
        spaces = [self._space(an_object(raw, f"{key}[{i}]"), f"{key}[{i}]") for i, raw in enumerate(listed)]
        if len({space.id for space in spaces}) != len(spaces):
            raise GraphFileError(f"{key}: two {key} have the same id")
        if not any(space.id >= 0 for space in spaces):
            raise GraphFileError(f"{key}: there is no device")
        if self._first and self._plan:
            host = an_object(top.get("host", {}), "host")
            alignment = integer(host, "alignment", "host", 1, least=1)
            spaces.append(Space(HOST, integer(host, "memory", "host", 0), alignment, SpaceKind.HOST))
        return tuple(spaces)

    def _space(self, entry: Mapping[str, Any], where: str) -> Space:
        alignment = integer(entry, "alignment", where, 256, least=1)
        if self._first:
            return Space(integer(entry, "id", where), integer(entry, "memory", where), alignment)
        kind = _word(entry, "kind", where, SpaceKind)
        space_id = integer(entry, "id", where, least=-MAX_SPACES)
        if (space_id < 0 and kind is SpaceKind.DEVICE) or (space_id >= 0 and kind is SpaceKind.STORAGE):
            raise GraphFileError(f"{where}: id: {space_id}: kernels run in spaces from 0 on, and in no storage")
        if (space_id == HOST) != (space_id < 0 and kind is SpaceKind.HOST):
            raise GraphFileError(f"{where}: id: {space_id}: the host's memory, where no kernels run, is space {HOST}")
        memory = integer(entry, "memory", where, MAX_SIZE if space_id < 0 else None)
        return Space(space_id, memory, alignment, kind)

    def vertex(self, raw: object) -> tuple[Vertex, dict[int, int]]:
        """Return the vertex and the offset of each output that has one."""
        entry = an_object(raw, "vertices[]")
        if "id" not in entry:
            raise GraphFileError(f"vertex: id: missing in {shown(entry)}")
        where = f"vertex {plain(entry['id'])}"
        kind = self._kind(entry, where)
        space, source = self._ends(entry, kind, where)
        sizes, offsets = self._outputs(entry, kind, where)
        inputs = a_list(entry["inputs"], f"{where}: inputs") if "inputs" in entry else ()
        vertex = Vertex(
            self._identity(entry["id"], where),
            kind,
            space,
            text(entry, "op", where),
            tuple([self._ref(ref, where) for ref in inputs]),
            sizes,
            **self._optional(entry, kind, where),
            begin=integer(entry, "begin", where, 0) if self._plan and kind is not VertexKind.KERNEL else 0,
            source=source,
        )
        return vertex, offsets

    def with_sources(self, vertices: Iterable[Vertex]) -> list[Vertex]:
        """Return ``vertices`` with the spaces that transfers of version 1 read, which the file leaves out."""
        kept = list(vertices)
        if not self._first:
            return kept
        space = {vertex.id: vertex.space for vertex in kept}
        between = [v.kind is VertexKind.COPY and not swaps_in(v) and not swaps_out(v) for v in kept]
        return [
            replace(vertex, source=space.get(vertex.inputs[0][0], vertex.space)) if moves and vertex.inputs else vertex
            for vertex, moves in zip(kept, between, strict=True)
        ]

    def edges(self, raw: object, where: str) -> tuple[Edge, ...]:
        edges = []
        for pair in a_list(raw, where):
            if not isinstance(pair, list) or len(pair) != 2:
                raise GraphFileError(f"{where}: expected [u, v], got {shown(pair)}")
            edges.append((self._identity(pair[0], where), self._identity(pair[1], where)))
        return tuple(edges)

    def _kind(self, entry: Mapping[str, Any], where: str) -> VertexKind:
        kind = entry.get("kind")
        if not isinstance(kind, str):
            raise GraphFileError(f"{where}: kind: expected a text, got {shown(kind)}")
        if not self._first:
            names = {each.name.lower(): each for each in VertexKind}
            if kind not in names:
                raise GraphFileError(f"{where}: kind: expected one of {', '.join(names)}, got {shown(kind)}")
            return names[kind]
        if kind in _COPIES_1[1:] and not self._plan:
            raise GraphFileError(f"{where}: kind: {kind} belongs to a memgraph, not to a taskgraph")
        return VertexKind.COPY if kind in _COPIES_1 else VertexKind.INPUT if kind == "input" else VertexKind.KERNEL

    def _ends(self, entry: Mapping[str, Any], kind: VertexKind, where: str) -> tuple[int, int]:
        """Return the space that the vertex is in, and the one that it reads or that is its home."""
        least = 0 if self._first else -MAX_SPACES
        space = integer(entry, self.space_key, where, least=least)
        if not self._first:
            if kind is VertexKind.COPY:
                return space, integer(entry, "source", where, least=least)
            return space, integer(entry, "home", where, HOST, least) if kind is VertexKind.INPUT else HOST
        if entry["kind"] == "offload":
            return HOST, space
        # A transfer's is found when all vertices are known; until then it is no backing space.
        return space, space if entry["kind"] == "transfer" else HOST

    def _outputs(
        self, entry: Mapping[str, Any], kind: VertexKind, where: str
    ) -> tuple[tuple[int, ...], dict[int, int]]:
        if "outputs" in entry and "size" in entry:
            raise GraphFileError(f"{where}: outputs: contradicts size; give one of the two")
        if "outputs" not in entry:
            outputs = [entry]
        else:
            outputs = [an_object(raw, f"{where}: outputs[]") for raw in a_list(entry["outputs"], f"{where}: outputs")]
        offload = self._first and entry["kind"] == "offload"
        key = "host_offset" if offload else "addr" if self._first else "offset"
        least = 0 if offload else -_MAX_ID
        given = {k: output[key] for k, output in enumerate(outputs) if output.get(key) is not None}
        offsets = {k: number(offset, f"{where}: {key}", least) for k, offset in given.items()}
        return tuple(integer(output, "size", where, 0) for output in outputs), offsets

    def _optional(self, entry: Mapping[str, Any], kind: VertexKind, where: str) -> dict[str, Any]:
        """Return the fields of a vertex that few have."""
        found: dict[str, Any] = {key: flag(entry, key, where) for key in _HANDED_OUT if key in entry}
        found["traits"] = self._marks(entry, where) if self._first else _traits(entry, where)
        if entry.get("duration") is not None:
            found["duration"] = _duration(entry["duration"], where)
        if "after" in entry:
            place = f"{where}: after"
            found["after"] = tuple([self._identity(other, place) for other in a_list(entry["after"], place)])
        if entry.get("inplace") is not None:
            found["inplace"] = ((0, integer(entry, "inplace", where)),) if self._first else _pairs(entry, where)
        if "may_inplace" in entry:
            place = f"{where}: may_inplace"
            found["may_inplace"] = tuple([number(position, place) for position in a_list(entry["may_inplace"], place)])
        return found

    def _marks(self, entry: Mapping[str, Any], where: str) -> Traits:
        marks = tuple([key for key in _MARKS_1 if key in entry and flag(entry, key, where)])
        if marks == ("clean",) and entry["kind"] == "reload":
            return PER_STEP
        if marks and entry["kind"] != "input":
            raise GraphFileError(f"{where}: {marks[0]}: only an input can be so marked")
        if marks not in _TRAITS_1:
            raise GraphFileError(
                f"{where}: {marks[1]}: a value that the host holds from the start (clean) is not {marks[1]}"
            )
        return _TRAITS_1[marks]

    def _identity(self, raw: object, where: str) -> int:
        if isinstance(raw, str):
            if raw.isascii() and raw.isdigit() and len(raw) <= 18 and (raw == "0" or raw[0] != "0"):
                number = int(raw)
            else:
                # Depends on the text alone, so a graph and its plan agree whatever the order of their vertices.
                number = (1 << 60) | int.from_bytes(hashlib.sha256(raw.encode("utf-8", "surrogatepass")).digest()[:7])
            if self._names is not None:
                self._names[number] = raw
            return number
        if isinstance(raw, bool) or not isinstance(raw, int) or not -_MAX_ID < raw < _MAX_ID:
            raise GraphFileError(f"{where}: expected a vertex id, got {shown(raw)}")
        return raw

    def _ref(self, raw: object, where: str) -> Ref:
        if not isinstance(raw, list):
            return self._identity(raw, f"{where}: inputs"), 0
        if len(raw) != 2:
            raise GraphFileError(f"{where}: inputs: expected id or [id, output], got {shown(raw)}")
        return self._identity(raw[0], f"{where}: inputs"), number(raw[1], f"{where}: inputs")


def _place_rest(spaces: tuple[Space, ...], vertices: Iterable[Vertex], slots: dict[Ref, Slot]) -> tuple[Space, ...]:
    """Give each copy to the host's memory for which the file names no offset one of its own behind all others, as
    version 1 lets a runtime do, and return ``spaces`` with room for them."""
    homes = {v.id for v in vertices if v.kind is VertexKind.INPUT and v.traits.changes_over_steps}
    rest = [v for v in vertices if swaps_out(v) and v.space == HOST and v.sizes[0] and (v.id, 0) not in slots]
    if homes or not rest:
        return spaces
    host = next((space for space in spaces if space.id == HOST), Space(HOST, 0, 1, SpaceKind.HOST))
    end = host.memory
    for vertex in rest:
        end = -(-end // host.alignment) * host.alignment
        slots[vertex.id, 0] = Slot(HOST, end)
        end += vertex.sizes[0]
    return (*(space for space in spaces if space.id != HOST), replace(host, memory=end))


def _word(entry: Mapping[str, Any], key: str, where: str, words: type[_Word], default: _Word | None = None) -> _Word:
    raw = entry.get(key, default)
    known = [str(word) for word in words]
    if not isinstance(raw, str) or raw not in known:
        raise GraphFileError(f"{where}: {key}: expected one of {', '.join(known)}, got {shown(raw)}")
    return words(raw)


def _traits(entry: Mapping[str, Any], where: str) -> Traits:
    return Traits(**{field.name: _trait(entry, field.name, where) for field in fields(Traits)})


def _trait(entry: Mapping[str, Any], key: str, where: str) -> Any:
    default = getattr(PER_STEP, key)
    return flag(entry, key, where) if isinstance(default, bool) else _word(entry, key, where, type(default), default)


def _duration(raw: object, where: str) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise GraphFileError(f"{where}: duration: expected seconds, got {shown(raw)}")
    if not (0 <= raw <= 1e18 and math.isfinite(raw)):
        raise GraphFileError(f"{where}: duration: expected 0 or more seconds, got {shown(raw)}")
    return float(raw)


def _pairs(entry: Mapping[str, Any], where: str) -> tuple[tuple[int, int], ...]:
    place = f"{where}: inplace"
    pairs = []
    for raw in a_list(entry["inplace"], place):
        if not isinstance(raw, list) or len(raw) != 2:
            raise GraphFileError(f"{place}: expected [output, input position], got {shown(raw)}")
        pairs.append((number(raw[0], place), number(raw[1], place)))
    return tuple(pairs)


def _check_ids(vertices: Iterable[Vertex], edges: Iterable[Edge]) -> None:
    outputs: dict[int, int] = {}
    for vertex in vertices:
        if vertex.id in outputs:
            raise GraphFileError(f"vertex {vertex.id}: id: used by two vertices")
        outputs[vertex.id] = len(vertex.sizes)
    for vertex in vertices:
        for producer, output in vertex.inputs:
            if not 0 <= output < outputs.get(producer, 0):
                raise GraphFileError(f"vertex {vertex.id}: inputs: there is no value [{producer}, {output}]")
        for other in vertex.after:
            if other not in outputs:
                raise GraphFileError(f"vertex {vertex.id}: after: there is no vertex {other}")
    for u, v in edges:
        if u not in outputs or v not in outputs:
            raise GraphFileError(f"edges: [{u}, {v}] names a vertex that does not exist")


def _check_total(vertices: Iterable[Vertex]) -> None:
    """Sums of sizes stay inside a signed 64-bit integer, like sizes."""
    total = 0
    for vertex in vertices:
        total += sum(vertex.sizes)
        if total > MAX_SIZE:
            raise GraphFileError(f"{called(vertex)}: size: all vertices up to this one take more than {MAX_SIZE} bytes")


def _check_spaces(vertices: Iterable[Vertex], spaces: Iterable[Space], key: str) -> None:
    """Refuse a space, which version 1 calls ``key``, that is not there."""
    known = {HOST, *(space.id for space in spaces)}
    for vertex in vertices:
        other = key if key == "device" else "source" if vertex.kind is VertexKind.COPY else "home"
        for named, space in ((key, vertex.space), (other, vertex.source)):
            if space not in known:
                raise GraphFileError(f"{called(vertex)}: {named}: there is no {key} {space}")


def _check_shapes(vertices: Sequence[Vertex]) -> None:
    """Refuse vertices that no plan can have; ``verify`` says whether it is the plan of a graph."""
    _check_total(vertices)
    by_id = {vertex.id: vertex for vertex in vertices}
    for vertex in vertices:
        if vertex.kind is VertexKind.KERNEL:
            continue
        if len(vertex.sizes) != 1:
            raise GraphFileError(f"{called(vertex)}: outputs: expected exactly one, got {len(vertex.sizes)}")
        wanted = 0 if vertex.kind is VertexKind.INPUT else 1
        if is_resident_range(vertex) and len(vertex.inputs) == 1:
            _check_resident_range(vertex, by_id[vertex.inputs[0][0]])
        elif len(vertex.inputs) != wanted:
            raise GraphFileError(f"{called(vertex)}: inputs: expected {wanted}, got {len(vertex.inputs)}")


def _check_resident_range(vertex: Vertex, source: Vertex) -> None:
    """Refuse an input of a plan that names another vertex, unless it is a range of an input that never changes."""
    if not never_changes(source) or source.inputs or vertex.traits != source.traits:
        raise GraphFileError(
            f"{called(vertex)}: inputs: an input has none, but for a range of an input that never changes"
        )
    if vertex.begin + vertex.sizes[0] > source.sizes[0]:
        raise GraphFileError(f"{called(vertex)}: begin: bytes from {vertex.begin} on are not of {called(source)}")


def _top(kind: str, graph: TaskGraph | MemGraph, vertices: list[dict[str, Any]]) -> dict[str, Any]:
    spaces = [
        {"id": space.id, "kind": str(space.kind)}
        | ({} if space.id < 0 and space.memory == MAX_SIZE else {"memory": space.memory})
        | {"alignment": space.alignment}
        for space in graph.spaces
    ]
    return {"format": kind, "version": VERSION, "name": graph.name, "spaces": spaces, "vertices": vertices}


def _vertex_to_object(vertex: Vertex, slots: Mapping[Ref, Slot], names: Mapping[int, str]) -> dict[str, Any]:
    raw: dict[str, Any] = {"id": names.get(vertex.id, vertex.id), "kind": vertex.kind.name.lower()}
    raw["space"] = vertex.space
    if vertex.kind is VertexKind.COPY:
        raw["source"] = vertex.source
    elif vertex.source != HOST:
        raw["home"] = vertex.source
    raw["op"] = vertex.op
    if vertex.inputs:
        raw["inputs"] = [
            names.get(producer, producer) if output == 0 else [names.get(producer, producer), output]
            for producer, output in vertex.inputs
        ]
    outputs = [_output(size, slots.get((vertex.id, k))) for k, size in enumerate(vertex.sizes)]
    raw |= outputs[0] if len(outputs) == 1 else {"outputs": outputs}
    if vertex.begin:
        raw["begin"] = vertex.begin
    if vertex.duration is not None:
        raw["duration"] = vertex.duration
    for field in fields(Traits):
        trait = getattr(vertex.traits, field.name)
        if trait != getattr(PER_STEP, field.name):
            raw[field.name] = trait if isinstance(trait, bool) else str(trait)
    raw |= {key: True for key in _HANDED_OUT if getattr(vertex, key)}
    if vertex.after:
        raw["after"] = [names.get(other, other) for other in vertex.after]
    if vertex.inplace:
        raw["inplace"] = [list(pair) for pair in vertex.inplace]
    if vertex.may_inplace:
        raw["may_inplace"] = list(vertex.may_inplace)
    return raw


def _output(size: int, slot: Slot | None) -> dict[str, int]:
    return {"size": size} if slot is None else {"size": size, "offset": slot.offset}
