"""What makes a version-2 graph meaningful: each message names the value or vertex, the key, and what is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from disco_accel.errors import GraphFileError
from disco_accel.graph.schema2 import GATE, Graph, SpaceKind, Value, Version, Vertex, Work, overwrites
from disco_accel.graph.stable_order import stable_order
from disco_accel.graph.strict_json import plain
from disco_accel.graph.traits import Access, Arrival, Lifetime
from disco_accel.sizes import MAX_SIZE


def check_graph(graph: Graph) -> Graph:
    """Return ``graph`` with its vertices in a topological order, the given one where it is. Raises GraphFileError."""
    _check_spaces(graph)
    _check_values(graph)
    _check_vertices(graph)
    _check_versions(graph)
    _check_made_foreign(graph)
    _check_homes(graph)
    ordered = _ordered(graph)
    _check_gate(ordered)
    return ordered


def called(vertex: Vertex) -> str:
    """How messages call ``vertex``."""
    return f"vertex {vertex.id} ({plain(vertex.op) or vertex.work})"


def _of(value: Value, key: str, message: str) -> GraphFileError:
    name = f" ({plain(value.name)})" if value.name else ""
    return GraphFileError(f"value {value.id}{name}: {key}: {message}")


def _at(vertex: Vertex, key: str, message: str) -> GraphFileError:
    return GraphFileError(f"{called(vertex)}: {key}: {message}")


def _unique(ids: Collection[int], what: str) -> None:
    if len(set(ids)) != len(ids):
        raise GraphFileError(f"{what}: two have the same id")


def _check_spaces(graph: Graph) -> None:
    _unique([space.id for space in graph.spaces], "spaces")
    for space in graph.spaces:
        if space.alignment < 1:
            raise GraphFileError(f"space {space.id}: alignment: must be 1 or more bytes")
        if space.kernels and space.kind is not SpaceKind.HOST:
            raise GraphFileError(f"space {space.id}: kernels: says of a space of the host that kernels run in it")
        if space.bytes is None and space.is_arena:
            raise GraphFileError(f"space {space.id}: bytes: a device's memory has a size")
    if not any(space.kind is SpaceKind.DEVICE for space in graph.spaces):
        raise GraphFileError("spaces: there is no device")


def _check_values(graph: Graph) -> None:
    _unique([value.id for value in graph.values], "values")
    total = 0
    for value in graph.values:
        total += value.bytes
        if value.bytes < 0 or total > MAX_SIZE:
            raise _of(value, "bytes", f"all values up to this one take {total} bytes, beyond 0 to {MAX_SIZE}")
        if value.space not in graph.space or not graph.space[value.space].is_arena:
            raise _of(value, "space", f"{value.space} is not one of the devices")
        if wrong := value.traits.contradiction():
            raise _of(value, *wrong)
        if value.traits.lifetime is Lifetime.STEPS:
            _check_lasting(graph, value)
        elif value.home is not None:
            raise _of(value, "home", "a value of one step has none; lifetime: steps gives it one")


def _check_lasting(graph: Graph, value: Value) -> None:
    if value.traits.access is Access.FOREIGN:
        if value.home is not None:
            raise _of(value, "home", "foreign memory has no home; it is where its owner keeps it")
    elif value.home is None:
        raise _of(value, "home", "missing: the space that holds it between steps")
    elif value.home not in graph.space or graph.space[value.home].is_arena:
        raise _of(value, "home", f"{value.home} is not a space of the host or of storage where no kernels run")


def _check_vertices(graph: Graph) -> None:
    ids = {vertex.id for vertex in graph.vertices}
    _unique([vertex.id for vertex in graph.vertices], "vertices")
    for vertex in graph.vertices:
        if vertex.space not in graph.space:
            raise _at(vertex, "space", f"there is no space {vertex.space}")
        for key, versions in (("reads", vertex.reads), ("writes", vertex.writes)):
            for version in versions:
                _check_version(graph, vertex, key, version)
        if len(set(vertex.writes)) != len(vertex.writes):
            raise _at(vertex, "writes", "the same version twice")
        for other in vertex.after:
            if other == vertex.id:
                raise _at(vertex, "after", "a vertex cannot wait for itself")
            if other != GATE and other not in ids:
                raise _at(vertex, "after", f"there is no vertex {other}")
        for position in vertex.may_overwrite:
            if not 0 <= position < len(vertex.reads):
                raise _at(vertex, "may_overwrite", f"there is no position {position} in reads")
        if vertex.work is Work.COPY:
            _check_copy(graph, vertex)


def _check_version(graph: Graph, vertex: Vertex, key: str, version: Version) -> None:
    value = graph.value.get(version[0])
    if value is None or version[1] < 0:
        raise _at(vertex, key, f"there is no version {list(version)}")
    copied = key == "reads" and vertex.work is Work.COPY
    if value.space != vertex.space and not copied and not graph.at_home(vertex, value):
        raise _at(vertex, key, f"value {value.id} is in space {value.space}, not {vertex.space}: add a copy")


def _check_copy(graph: Graph, vertex: Vertex) -> None:
    if len(vertex.reads) != 1 or len(vertex.writes) != 1 or vertex.writes[0][1]:
        raise _at(vertex, "writes", "a copy reads one version and makes one value")
    if graph.value[vertex.writes[0][0]].bytes > graph.value[vertex.reads[0][0]].bytes:
        raise _at(vertex, "writes", "a copy cannot be larger than its source")


def _check_versions(graph: Graph) -> None:
    """Each version has one writer, or arrives; and each value's versions are 0, 1, 2 ... without a gap."""
    written: dict[Version, Vertex] = {}
    for vertex in graph.vertices:
        for version in vertex.writes:
            if version in written:
                raise _at(vertex, "writes", f"{list(version)} is written by vertex {written[version].id} too")
            written[version] = vertex
            value = graph.value[version[0]]
            if version[1] == 0 and value.traits.arrival is not Arrival.MADE:
                raise _at(vertex, "writes", f"value {value.id} arrives at {value.traits.arrival}; write its version 1")
            if version[1] and value.traits.access is not Access.READ_WRITE:
                raise _at(vertex, "writes", f"value {value.id} is {value.traits.access}: no vertex may change it")
        for lost, new in overwrites(vertex):
            if lost not in vertex.reads:
                raise _at(vertex, "writes", f"{list(new)} takes the place of {list(lost)}, which must be in reads")
    arriving = {value.id for value in graph.values if value.traits.arrival is not Arrival.MADE}
    for number, count in sorted(written):
        if count and (number, count - 1) not in written and not (count == 1 and number in arriving):
            raise _at(written[number, count], "writes", f"nothing writes version {count - 1} of value {number}")
    for value in graph.values:
        if value.id not in arriving and (value.id, 0) not in written:
            raise _of(value, "arrival", "made, but no vertex writes it; start or gate if it is brought")
    exists = written.keys() | {(number, 0) for number in arriving}
    for vertex in graph.vertices:
        for version in vertex.reads:
            if version not in exists:
                raise _at(vertex, "reads", f"nothing writes {list(version)}")
    for key, versions in (("at_gate", graph.at_gate), ("at_end", graph.at_end)):
        for version in versions:
            if version not in exists:
                raise GraphFileError(f"{key}: nothing writes {list(version)}")


def _check_made_foreign(graph: Graph) -> None:
    """Memory of the user's is written by copies to the host alone."""
    for value in graph.values:
        if value.traits.access is not Access.FOREIGN or value.traits.arrival is not Arrival.MADE:
            continue
        writer = graph.writers[value.id, 0]
        if writer.work is not Work.COPY or not graph.space[value.space].kernels:
            message = "foreign, but made: only a copy to a space of the host with kernels writes there"
            raise _of(value, "access", message)
        if graph.value[writer.reads[0][0]].traits.access is Access.FOREIGN:
            raise _of(value, "access", "foreign, and copied from foreign memory: the user can copy that")


def _check_homes(graph: Graph) -> None:
    """The versions of a value are all written in its space, or all at its home, where only plans copy from."""
    for vertex in graph.vertices:
        for value, version in vertex.writes:
            former = (value, version - 1)
            at_home = former in graph.written_at_home
            if version > 1 and at_home != ((value, version) in graph.written_at_home):
                other = graph.writers[former]
                raise _at(vertex, "writes", f"changes value {value} in another space than vertex {other.id} does")
        for read in vertex.reads if vertex.work is Work.COPY else ():
            copied = graph.value[read[0]]
            if read in graph.written_at_home:
                raise _at(vertex, "reads", f"{list(read)} lies at a home, from where a plan loads it: no copy")
            if copied.home is not None and graph.space[copied.space].kernels:
                raise _at(vertex, "reads", f"value {copied.id} has its home on the host: let its space be the target's")


def _ordered(graph: Graph) -> Graph:
    """``graph`` in the first topological order in terms of the given positions."""
    pairs: list[tuple[int, int]] = []
    for vertex in graph.vertices:
        # A reader of a version that was changed in place needs no edge: a plan may have copied it elsewhere.
        before = [graph.writers[version].id for version in vertex.reads if version in graph.writers]
        pairs += [(other, vertex.id) for other in dict.fromkeys([*before, *(a for a in vertex.after if a != GATE)])]
    places = stable_order([vertex.id for vertex in graph.vertices], pairs)
    if places is None:
        stuck = _some_of_cycle(graph, pairs)
        raise GraphFileError(f"reads/writes/after: the vertices depend on each other in a cycle; among them: {stuck}")
    return graph if places == sorted(places) else replace(graph, vertices=tuple(graph.vertices[at] for at in places))


def _some_of_cycle(graph: Graph, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Ids of vertices that wait for each other, or for such, at most eight of them."""
    waits: dict[int, set[int]] = {vertex.id: set() for vertex in graph.vertices}
    for before, then in pairs:
        waits[then].add(before)
    while free := [number for number, others in waits.items() if not others & waits.keys()]:
        for number in free:
            del waits[number]
    return sorted(waits)[:8]


def behind_gate(graph: Graph) -> set[int]:
    """Ids of vertices that start only when the gate is open; ``vertices`` must be in a topological order."""
    behind: set[int] = set()
    arrives: Mapping[int, Value] = graph.value
    for vertex in graph.vertices:
        if GATE in vertex.after or any(other in behind for other in vertex.after):
            behind.add(vertex.id)
        for version in vertex.reads:
            writer = graph.writers.get(version)
            if writer.id in behind if writer is not None else arrives[version[0]].traits.arrival is Arrival.GATE:
                behind.add(vertex.id)
    return behind


def _check_gate(graph: Graph) -> None:
    behind = behind_gate(graph)
    for version in graph.at_gate:
        writer = graph.writers.get(version)
        late = graph.value[version[0]].traits.arrival is Arrival.GATE if writer is None else writer.id in behind
        if late:
            raise GraphFileError(f"at_gate: {list(version)} comes after the gate, at which it is to be handed out")
