"""Version 1 of the files: vertices with flags (docs/schema.md)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from disco_accel.errors import GraphFileError
from disco_accel.graph.byte_ranges import is_resident_range
from disco_accel.graph.carried_values import shared_sources
from disco_accel.graph.check import called, check_taskgraph, stable_topological_order
from disco_accel.graph.memgraph import Edge, MemGraph, Slot
from disco_accel.graph.strict_json import a_list, an_object, flag, integer, number, plain, shown, text
from disco_accel.graph.taskgraph import Device, Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import BROUGHT, FOREIGN, FROZEN, LATE, LATE_FOREIGN, Access, Arrival, Traits
from disco_accel.graph.values import host_copy_exists, never_changes
from disco_accel.sizes import MAX_SIZE

MAX_DEVICES = 1024
_MAX_ID = 1 << 62
_KINDS = {"input": VertexKind.INPUT, "transfer": VertexKind.TRANSFER}
_MEM_KINDS = {**_KINDS, "offload": VertexKind.OFFLOAD, "reload": VertexKind.RELOAD}
_KIND_NAMES = {**{kind: name for name, kind in _MEM_KINDS.items()}, VertexKind.KERNEL: "compute"}

IdNames = MutableMapping[int, str]
"""Vertex ids that are strings in a file: id in memory → text, so that a plan is written with its graph's own ids."""


def taskgraph_from_version_1(top: Mapping[str, Any], names: IdNames | None) -> TaskGraph:
    """Build the TaskGraph that ``top``, the object of a version-1 file, describes. Raises GraphFileError."""
    vertices = [_vertex(raw, names, _KINDS)[0] for raw in a_list(top.get("vertices"), "vertices")]
    _check_total(vertices)
    return check_taskgraph(TaskGraph(text(top, "name", "graph"), _devices(top), tuple(vertices)))


def memgraph_from_version_1(top: Mapping[str, Any], names: IdNames | None) -> MemGraph:
    """Build the MemGraph that ``top`` describes; references must exist. Raises GraphFileError."""
    vertices: list[Vertex] = []
    slots: dict[Ref, Slot] = {}
    host_offsets: dict[int, int] = {}
    for raw in a_list(top.get("vertices"), "vertices"):
        vertex, addresses = _vertex(raw, names, _MEM_KINDS)
        vertices.append(vertex)
        for output, addr in addresses.items():
            slots[vertex.id, output] = Slot(vertex.device, addr, vertex.sizes[output])
        if vertex.kind is VertexKind.OFFLOAD and raw.get("host_offset") is not None:
            host_offsets[vertex.id] = integer(raw, "host_offset", f"vertex {raw['id']}")
    edges = an_object(top.get("edges", {}), "edges")
    data_edges = _edges(edges.get("data", []), "edges.data", names)
    memory_edges = _edges(edges.get("memory", []), "edges.memory", names)
    devices = _devices(top)
    _check_ids(vertices, (*data_edges, *memory_edges))
    _check_marks(top["vertices"], vertices)
    _check_shapes(vertices, {device.id for device in devices})
    host = an_object(top.get("host", {}), "host")
    cyclic = flag(top, "cyclic", "graph")
    order = stable_topological_order(vertices, [*data_edges, *memory_edges])
    return MemGraph(
        name=text(top, "name", "graph"),
        devices=devices,
        # A cycle is a fault of the plan, which verify reports, and not of the file.
        vertices=tuple(vertices if order is None else order),
        slots=slots,
        data_edges=data_edges,
        memory_edges=memory_edges,
        host_offsets=host_offsets,
        host_memory=integer(host, "memory", "host", 0),
        host_alignment=integer(host, "alignment", "host", 1, least=1),
        cyclic=cyclic,
    )


def taskgraph_to_json(graph: TaskGraph, names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return ``graph`` as the object that its file holds. Raises GraphFileError for what version 1 has no words for."""
    if graph.host_memory is not None:
        raise GraphFileError("host: version 1 of a task graph does not limit it: write version 2 (--schema 2)")
    vertices = [_vertex_to_json(vertex, names or {}) for vertex in graph.vertices]
    return _top("taskgraph", graph.name, graph.devices, vertices)


def memgraph_to_json(graph: MemGraph, names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return ``graph`` as the object that its file holds."""
    label = names or {}
    shared = shared_sources(graph.vertices)
    vertices = []
    for vertex in graph.vertices:
        raw = _vertex_to_json(vertex, label)
        if vertex.kind is VertexKind.RELOAD and vertex.inputs[0] in shared:
            raw["clean"] = True
        if vertex.kind is VertexKind.OFFLOAD:
            if vertex.id in graph.host_offsets:
                raw["host_offset"] = graph.host_offsets[vertex.id]
        elif "outputs" in raw:
            for output, entry in enumerate(raw["outputs"]):
                if (slot := graph.slots.get((vertex.id, output))) is not None:
                    entry["addr"] = slot.addr
        elif (slot := graph.slots.get((vertex.id, 0))) is not None:
            raw["addr"] = slot.addr
        elif host_copy_exists(vertex):
            raw["addr"] = None
        vertices.append(raw)
    top = _top("memgraph", graph.name, graph.devices, vertices)
    top["edges"] = {
        "data": [[label.get(u, u), label.get(v, v)] for u, v in graph.data_edges],
        "memory": [[label.get(u, u), label.get(v, v)] for u, v in graph.memory_edges],
    }
    top["host"] = {"memory": graph.host_memory, "alignment": graph.host_alignment}
    if graph.cyclic:
        top["cyclic"] = True
    return top


def sayable(vertex: Vertex) -> bool:
    """Whether version 1 has words for ``vertex``."""
    foreign = vertex.traits.access is Access.FOREIGN and vertex.kind is VertexKind.INPUT
    return (foreign or vertex.traits in _TRAITS.values()) and not any(output for output, _ in vertex.inplace)


_TRAITS = {
    ("clean",): FROZEN,
    ("late",): LATE,
    ("external",): FOREIGN,
    ("late", "external"): LATE_FOREIGN,
    (): BROUGHT,
}
"""Keys that an input has → what they mean. Others contradict each other."""

_TRAIT_KEYS = ("clean", "late", "external")
_HANDED_OUT = ("out", "keep")


def _devices(top: Mapping[str, Any]) -> tuple[Device, ...]:
    devices = []
    listed = a_list(top.get("devices"), "devices")
    if len(listed) > MAX_DEVICES:
        raise GraphFileError(f"devices: {len(listed)} are more than the {MAX_DEVICES} that a graph may have")
    for index, raw in enumerate(listed):
        where = f"devices[{index}]"
        entry = an_object(raw, where)
        memory = integer(entry, "memory", where)
        devices.append(Device(integer(entry, "id", where), memory, integer(entry, "alignment", where, 256, least=1)))
    if len({device.id for device in devices}) != len(devices):
        raise GraphFileError("devices: two devices have the same id")
    if not devices:
        raise GraphFileError("devices: there is none")
    return tuple(devices)


def _vertex(raw: object, names: IdNames | None, kinds: Mapping[str, VertexKind]) -> tuple[Vertex, dict[int, int]]:
    """Return the vertex and the address of each output that has one."""
    entry = an_object(raw, "vertices[]")
    if "id" not in entry:
        raise GraphFileError(f"vertex: id: missing in {shown(entry)}")
    where = f"vertex {plain(entry['id'])}"
    kind = entry.get("kind")
    if not isinstance(kind, str):
        raise GraphFileError(f"{where}: kind: expected a text, got {shown(kind)}")
    sizes, addresses = _outputs(entry, where)
    inputs = a_list(entry["inputs"], f"{where}: inputs") if "inputs" in entry else ()
    vertex = Vertex(
        _identity(entry["id"], where, names),
        _in_taskgraph(kind, kinds, where),
        integer(entry, "device", where),
        text(entry, "op", where),
        tuple([_ref(ref, where, names) for ref in inputs]),
        sizes,
        **_optional(entry, where, names),
        begin=_begin(entry, kinds, where),
    )
    return vertex, addresses


def _begin(entry: Mapping[str, Any], kinds: Mapping[str, VertexKind], where: str) -> int:
    """Where the range begins that a reload or an input of a plan has."""
    ranged = kinds is _MEM_KINDS and (entry["kind"] == "reload" or (entry["kind"] == "input" and "inputs" in entry))
    return integer(entry, "begin", where, 0) if ranged else 0


def _optional(entry: Mapping[str, Any], where: str, names: IdNames | None) -> dict[str, Any]:
    """Return the fields of a vertex that few have."""
    found: dict[str, Any] = {key: flag(entry, key, where) for key in _HANDED_OUT if key in entry}
    found["traits"] = _traits(entry, where)
    duration = entry.get("duration")
    if duration is not None:
        if isinstance(duration, bool) or not isinstance(duration, int | float):
            raise GraphFileError(f"{where}: duration: expected seconds, got {shown(duration)}")
        if not (0 <= duration <= 1e18 and math.isfinite(duration)):
            raise GraphFileError(f"{where}: duration: expected 0 or more seconds, got {shown(duration)}")
        found["duration"] = float(duration)
    if "after" in entry:
        place = f"{where}: after"
        found["after"] = tuple([_identity(other, place, names) for other in a_list(entry["after"], place)])
    if entry.get("inplace") is not None:
        found["inplace"] = ((0, integer(entry, "inplace", where)),)
    if "may_inplace" in entry:
        place = f"{where}: may_inplace"
        found["may_inplace"] = tuple([number(position, place) for position in a_list(entry["may_inplace"], place)])
    return found


def _traits(entry: Mapping[str, Any], where: str) -> Traits:
    marks = tuple([key for key in _TRAIT_KEYS if key in entry and flag(entry, key, where)])
    if marks == ("clean",) and entry["kind"] == "reload":
        return BROUGHT
    if marks and entry["kind"] != "input":
        raise GraphFileError(f"{where}: {marks[0]}: only an input can be so marked")
    if marks not in _TRAITS:
        raise GraphFileError(
            f"{where}: {marks[1]}: a value that the host holds from the start (clean) is not {marks[1]}"
        )
    return _TRAITS[marks]


def _in_taskgraph(kind: str, kinds: Mapping[str, VertexKind], where: str) -> VertexKind:
    if kind in _MEM_KINDS and kind not in kinds:
        raise GraphFileError(f"{where}: kind: {kind} belongs to a memgraph, not to a taskgraph")
    return kinds.get(kind, VertexKind.KERNEL)


def _outputs(entry: Mapping[str, Any], where: str) -> tuple[tuple[int, ...], dict[int, int]]:
    if "outputs" in entry and "size" in entry:
        raise GraphFileError(f"{where}: outputs: contradicts size; give one of the two")
    if "outputs" not in entry:
        outputs = [entry]
    else:
        outputs = [an_object(raw, f"{where}: outputs[]") for raw in a_list(entry["outputs"], f"{where}: outputs")]
    addresses = {
        k: integer(output, "addr", where, least=-_MAX_ID)
        for k, output in enumerate(outputs)
        if output.get("addr") is not None
    }
    return tuple(integer(output, "size", where, 0) for output in outputs), addresses


def _edges(raw: object, where: str, names: IdNames | None) -> tuple[Edge, ...]:
    edges = []
    for pair in a_list(raw, where):
        if not isinstance(pair, list) or len(pair) != 2:
            raise GraphFileError(f"{where}: expected [u, v], got {shown(pair)}")
        edges.append((_identity(pair[0], where, names), _identity(pair[1], where, names)))
    return tuple(edges)


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


def _check_marks(raw: Iterable[Mapping[str, Any]], vertices: Sequence[Vertex]) -> None:
    """A reload marked clean did not need an offload of its own."""
    shared = shared_sources(vertices)
    for entry, vertex in zip(raw, vertices, strict=True):
        if vertex.kind is VertexKind.RELOAD and entry.get("clean") and not shared.issuperset(vertex.inputs):
            raise GraphFileError(f"{called(vertex)}: clean: it is the only reload of its offload")


def _check_total(vertices: Iterable[Vertex]) -> None:
    """Sums of sizes stay inside a signed 64-bit integer, like sizes."""
    total = 0
    for vertex in vertices:
        total += sum(vertex.sizes)
        if total > MAX_SIZE:
            raise GraphFileError(f"{called(vertex)}: size: all vertices up to this one take more than {MAX_SIZE} bytes")


def _check_shapes(vertices: Sequence[Vertex], devices: Collection[int]) -> None:
    """Refuse what no plan can mean; whether it is the plan of a graph is for ``verify`` to say."""
    _check_total(vertices)
    by_id = {vertex.id: vertex for vertex in vertices}
    for vertex in vertices:
        if vertex.device not in devices:
            raise GraphFileError(f"{called(vertex)}: device: there is no device {vertex.device}")
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
    """Refuse an input of a plan that names another vertex, unless it is a range of a clean input."""
    if not never_changes(source) or source.inputs or vertex.traits != source.traits:
        raise GraphFileError(f"{called(vertex)}: inputs: an input has none, but for a range of a clean input (clean)")
    if vertex.begin + vertex.sizes[0] > source.sizes[0]:
        raise GraphFileError(f"{called(vertex)}: begin: bytes from {vertex.begin} on are not of {called(source)}")


def _identity(raw: object, where: str, names: IdNames | None) -> int:
    if isinstance(raw, str):
        if raw.isascii() and raw.isdigit() and len(raw) <= 18 and (raw == "0" or raw[0] != "0"):
            number = int(raw)
        else:
            # Depends on the text alone, so a graph and its plan agree whatever the order of their vertices.
            number = (1 << 60) | int.from_bytes(hashlib.sha256(raw.encode("utf-8", "surrogatepass")).digest()[:7])
        if names is not None:
            names[number] = raw
        return number
    if isinstance(raw, bool) or not isinstance(raw, int) or not -_MAX_ID < raw < _MAX_ID:
        raise GraphFileError(f"{where}: expected a vertex id, got {shown(raw)}")
    return raw


def _ref(raw: object, where: str, names: IdNames | None) -> Ref:
    if not isinstance(raw, list):
        return _identity(raw, f"{where}: inputs", names), 0
    if len(raw) != 2:
        raise GraphFileError(f"{where}: inputs: expected id or [id, output], got {shown(raw)}")
    return _identity(raw[0], f"{where}: inputs", names), number(raw[1], f"{where}: inputs")


def _top(kind: str, name: str, devices: tuple[Device, ...], vertices: list[dict[str, Any]]) -> dict[str, Any]:
    for index, device in enumerate(devices):
        if device.host:
            raise GraphFileError(
                f"devices[{index}]: host: version 1 has no word for kernels on the host (device {device.id}): write "
                "version 2 (on the command line --schema 2)"
            )
    listed = [{"id": device.id, "memory": device.memory, "alignment": device.alignment} for device in devices]
    return {"format": kind, "version": 1, "name": name, "devices": listed, "vertices": vertices}


def _vertex_to_json(vertex: Vertex, names: Mapping[int, str]) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "id": names.get(vertex.id, vertex.id),
        "kind": _KIND_NAMES[vertex.kind],
        "device": vertex.device,
        "op": vertex.op,
    }
    if vertex.inputs:
        raw["inputs"] = [
            names.get(producer, producer) if output == 0 else [names.get(producer, producer), output]
            for producer, output in vertex.inputs
        ]
    if len(vertex.sizes) == 1:
        raw["size"] = vertex.sizes[0]
    else:
        raw["outputs"] = [{"size": size} for size in vertex.sizes]
    if vertex.begin:
        raw["begin"] = vertex.begin
    if vertex.duration is not None:
        raw["duration"] = vertex.duration
    for key in (*_keys(vertex), *(key for key in _HANDED_OUT if getattr(vertex, key))):
        raw[key] = True
    if vertex.after:
        raw["after"] = [names.get(other, other) for other in vertex.after]
    if vertex.inplace:
        raw["inplace"] = _inplace(vertex)
    if vertex.may_inplace:
        raw["may_inplace"] = list(vertex.may_inplace)
    return raw


def _keys(vertex: Vertex) -> tuple[str, ...]:
    """What version 1 calls the traits of ``vertex``. Raises GraphFileError."""
    if vertex.traits.access is Access.FOREIGN and vertex.kind is VertexKind.INPUT:
        return ("late", "external") if vertex.traits.arrival is Arrival.GATE else ("external",)
    for keys, traits in _TRAITS.items():
        if vertex.traits == traits:
            return keys
    but = " but renewed by the host" if vertex.traits.renewed else ""
    but = " but written by a transfer" if vertex.traits.arrival is Arrival.MADE else but
    raise GraphFileError(
        f"{called(vertex)}: version 1 has no word for a value that lives over {vertex.traits.lifetime} and is "
        f"{vertex.traits.access}{but}: write version 2 (on the command line --schema 2)"
    )


def _inplace(vertex: Vertex) -> int:
    [*others, (output, position)] = vertex.inplace
    if others or output:
        raise GraphFileError(
            f"{called(vertex)}: inplace: version 1 changes output 0 in place, and no other: write version 2 (on the "
            "command line --schema 2)"
        )
    return position
