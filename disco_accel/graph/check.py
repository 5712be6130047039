"""Rules of a TaskGraph: a file must obey them, a captured graph does by construction."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

from disco_accel.errors import GraphFileError
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.home_uses import HomeUses
from disco_accel.graph.memgraph import Edge
from disco_accel.graph.spaces import HOST, is_backing
from disco_accel.graph.strict_json import plain
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import MADE_FOREIGN, PER_STEP, Arrival
from disco_accel.graph.values import (
    arrives_at_gate,
    changes_over_steps,
    handed_out_at_gate,
    host_copy_exists,
    is_foreign,
    overwrites,
)


def dependencies(vertex: Vertex) -> list[int]:
    """Ids of the vertices that ``vertex`` waits for: producers of its inputs, then ``after``, each once, in order."""
    return list(dict.fromkeys([producer for producer, _ in vertex.inputs] + list(vertex.after)))


def stable_topological_order(vertices: Sequence[Vertex], edges: Iterable[Edge] = ()) -> list[Vertex] | None:
    """Return ``vertices`` so that each follows its dependencies, moving none without need; None if there is a cycle.
    ``edges`` are further pairs of ids; all ids must exist. A topological order comes back unchanged."""
    place = {vertex.id: at for at, vertex in enumerate(vertices)}
    successors: list[list[int]] = [[] for _ in vertices]
    waiting = [0] * len(vertices)
    for before, then in (*((dep, vertex.id) for vertex in vertices for dep in dependencies(vertex)), *edges):
        successors[place[before]].append(place[then])
        waiting[place[then]] += 1
    ready = [at for at, count in enumerate(waiting) if count == 0]
    order: list[Vertex] = []
    while ready:
        at = heapq.heappop(ready)
        order.append(vertices[at])
        for successor in successors[at]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                heapq.heappush(ready, successor)
    return order if len(order) == len(vertices) else None


def after_gate(vertices: Sequence[Vertex], edges: Iterable[Edge] = ()) -> set[int]:
    """Ids of ``late`` inputs and of all that comes after one, by value, ``after`` or ``edges``. ``vertices`` must be in
    a topological order of all of these."""
    predecessors: dict[int, list[int]] = {}
    for before, then in edges:
        predecessors.setdefault(then, []).append(before)
    behind: set[int] = set()
    for vertex in vertices:
        if (
            arrives_at_gate(vertex)
            or any(p in behind for p in dependencies(vertex))
            or any(p in behind for p in predecessors.get(vertex.id, ()))
        ):
            behind.add(vertex.id)
    return behind


def _fail(vertex: Vertex, key: str, message: str) -> GraphFileError:
    return GraphFileError(f"{called(vertex)}: {key}: {message}")


def called(vertex: Vertex) -> str:
    """Return how messages call ``vertex``."""
    return f"vertex {vertex.id} ({plain(vertex.op) or vertex.kind.name.lower()})"


def _some(ids: set[int]) -> str:
    return ", ".join(map(str, sorted(ids)[:8])) + (", ..." if len(ids) > 8 else "")


def check_taskgraph(graph: TaskGraph) -> TaskGraph:
    """Return ``graph`` with its vertices in a topological order, or raise GraphFileError naming vertex and key."""
    devices = {device.id for device in graph.devices}
    if graph.devices and all(device.is_host_device for device in graph.devices):
        raise GraphFileError("devices: all are the host's: a plan needs one whose memory it shares out")
    spaces = {space.id for space in graph.spaces}
    by_id: dict[int, Vertex] = {}
    for vertex in graph.vertices:
        if vertex.id in by_id:
            raise _fail(vertex, "id", "used by two vertices")
        by_id[vertex.id] = vertex
    for vertex in graph.vertices:
        if swaps_in(vertex) or swaps_out(vertex):
            raise _fail(vertex, "source", "copies from and to spaces where no kernels run belong to a memgraph")
        if vertex.space not in devices:
            raise _fail(vertex, "space", f"{vertex.space} is not one of the devices {_some(devices)}")
        _check_home(vertex, spaces)
        _check_references(vertex, by_id)
        _check_flags(vertex)
        _check_inplace(vertex, by_id)
    order = stable_topological_order(graph.vertices)
    if order is None:
        raise GraphFileError(f"inputs/after: the vertices depend on each other in a cycle: {_some_cycle(graph)}")
    home_uses = HomeUses.of(replace(graph, vertices=tuple(order)))
    for vertex in order:
        _check_devices(vertex, by_id, home_uses)
    _check_versions(order, home_uses)
    behind = after_gate(order)
    for vertex in order:
        if handed_out_at_gate(vertex) and vertex.id in behind:
            raise _fail(vertex, "out", "depends on a late input, which arrives only after every out vertex")
    return replace(graph, vertices=tuple(order))


def _check_references(vertex: Vertex, by_id: dict[int, Vertex]) -> None:
    for position, (producer, output) in enumerate(vertex.inputs):
        source = by_id.get(producer)
        if source is None:
            raise _fail(vertex, f"inputs[{position}]", f"there is no vertex {producer}")
        if producer == vertex.id:
            raise _fail(vertex, f"inputs[{position}]", "a vertex cannot read its own output")
        if not 0 <= output < len(source.sizes):
            raise _fail(vertex, f"inputs[{position}]", f"vertex {producer} has no output {output}")
    for other in vertex.after:
        if other not in by_id:
            raise _fail(vertex, "after", f"there is no vertex {other}")
        if other == vertex.id:
            raise _fail(vertex, "after", "a vertex cannot wait for itself")
    if vertex.kind is VertexKind.COPY:
        if len(vertex.inputs) != 1 or len(vertex.sizes) != 1:
            raise _fail(vertex, "inputs", "a copy has exactly one value as its input, and one output")
        producer, output = vertex.inputs[0]
        if vertex.sizes[0] > by_id[producer].sizes[output]:
            raise _fail(vertex, "size", "a copy cannot be larger than its source")
        if is_foreign(vertex) and is_foreign(by_id[producer]):
            raise _fail(vertex, "inputs[0]", "from the user's memory to the user's memory: the user can copy that")


def _check_devices(vertex: Vertex, by_id: dict[int, Vertex], home_uses: HomeUses) -> None:
    """A kernel reads values of its own device; one of a host device also values at their homes."""
    for position, ref in enumerate(vertex.inputs):
        device = home_uses.device_of(ref, by_id[ref[0]])
        moves = vertex.kind is VertexKind.COPY
        if moves and is_foreign(vertex) and vertex.space not in home_uses.hosts:
            raise _fail(vertex, "space", f"{vertex.space} is not the host's: no copy to the user's memory there")
        if moves and ref in home_uses.written:
            raise _fail(vertex, f"inputs[{position}]", "lies at a home, from where a plan loads it: no copy")
        if home_uses.at_home(vertex, ref) and by_id[home_uses.homes[ref][0]].source != HOST:
            home = home_uses.homes[ref][0]
            raise _fail(
                vertex, f"inputs[{position}]", f"vertex {home} has its home in storage: no kernel uses it there"
            )
        if vertex.kind is VertexKind.KERNEL and device != vertex.space and not home_uses.at_home(vertex, ref):
            raise _fail(vertex, f"inputs[{position}]", f"vertex {ref[0]} lives on device {device}: add a copy")
        if moves and vertex.source != device:
            raise _fail(vertex, "source", f"{vertex.source}, but vertex {ref[0]} lives on device {device}")
        if moves and device in home_uses.hosts and ref in home_uses.homes:
            raise _fail(vertex, f"inputs[{position}]", "has its home on the host: let its device be the target's")
    for output, ref in overwrites(vertex):
        if home_uses.at_home(vertex, ref) and (vertex.id, output) not in home_uses.written:
            raise _fail(vertex, "inplace", f"over {called(by_id[ref[0]])} at its home, where no kernel changes it")


def _check_home(vertex: Vertex, spaces: set[int]) -> None:
    if vertex.kind is VertexKind.COPY or vertex.source == HOST:
        return
    if not host_copy_exists(vertex):
        raise _fail(vertex, "home", "only an input that lives over steps, and is not foreign, has one")
    if not is_backing(vertex.source) or vertex.source not in spaces:
        raise _fail(vertex, "home", f"{vertex.source} is not a space of the graph in which no kernels run")


def _check_flags(vertex: Vertex) -> None:
    if vertex.kind is not VertexKind.INPUT:
        if vertex.traits != PER_STEP and (vertex.kind is not VertexKind.COPY or vertex.traits != MADE_FOREIGN):
            raise _fail(vertex, "traits", "only an input can have any, and a copy to the user's memory")
        return
    if vertex.inputs or vertex.after:
        raise _fail(
            vertex, "inputs" if vertex.inputs else "after", "an input exists before the step and waits for nothing"
        )
    if len(vertex.sizes) != 1:
        raise _fail(vertex, "outputs", "an input has exactly one output")
    if wrong := vertex.traits.contradiction():
        raise _fail(vertex, *wrong)
    if vertex.traits.arrival is Arrival.MADE:
        raise _fail(vertex, "traits", "an input is brought: it arrives at the start or at the gate")
    if arrives_at_gate(vertex) and handed_out_at_gate(vertex):
        raise _fail(vertex, "late", "a late input arrives only after every out vertex, so it cannot be one")


def _check_inplace(vertex: Vertex, by_id: dict[int, Vertex]) -> None:
    for position in vertex.may_inplace:
        if not 0 <= position < len(vertex.inputs):
            raise _fail(vertex, "may_inplace", f"there is no input position {position}")
    if vertex.inplace and vertex.kind is not VertexKind.KERNEL:
        raise _fail(vertex, "inplace", "only a kernel can write over its input")
    for written, position in vertex.inplace:
        if not 0 <= position < len(vertex.inputs):
            raise _fail(vertex, "inplace", f"there is no input position {position}")
        if not 0 <= written < len(vertex.sizes):
            raise _fail(vertex, "inplace", f"there is no output {written}")
        producer, output = vertex.inputs[position]
        source = by_id[producer]
        if vertex.sizes[written] > source.sizes[output]:
            too_large = f"output {written} is larger than the value of vertex {producer} it must be written over"
            raise _fail(vertex, "inplace", too_large)
        if is_foreign(source):
            raise _fail(vertex, "inplace", f"vertex {producer} is external: its memory is not the plan's to overwrite")
    overwritten = {ref for _, ref in overwrites(vertex)}
    if len(overwritten) < len(vertex.inplace) or len(dict(vertex.inplace)) < len(vertex.inplace):
        raise _fail(vertex, "inplace", "an output is written over one input, and an input by one output")


def _check_versions(order: Sequence[Vertex], home_uses: HomeUses) -> None:
    """The versions of a value that changes over steps form one chain: its home has room for one of them at a time.
    All are written on the device, or all at home."""
    state: dict[Ref, Ref] = {}
    overwritten_by: dict[Ref, int] = {}
    by_id = {vertex.id: vertex for vertex in order}
    for vertex in order:
        if changes_over_steps(vertex):
            state[vertex.id, 0] = (vertex.id, 0)
        for output, ref in overwrites(vertex):
            if ref not in state:
                continue
            changed = called(by_id[state[ref][0]])
            if ref in overwritten_by:
                raise _fail(
                    vertex, "inplace", f"vertex {overwritten_by[ref]} writes over the same version of {changed} already"
                )
            if vertex.sizes[output] != by_id[ref[0]].sizes[ref[1]]:
                raise _fail(vertex, "inplace", f"output {output} is a version of {changed}, but has other bytes")
            if ref != state[ref] and (ref in home_uses.written) != (vertex.space in home_uses.hosts):
                raise _fail(vertex, "inplace", f"writes {changed} on another device than vertex {ref[0]} does")
            overwritten_by[ref] = vertex.id
            state[vertex.id, output] = state[ref]


def _some_cycle(graph: TaskGraph) -> str:
    """Name the vertices of one cycle, at most eight of them."""
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    readers: dict[int, list[int]] = {vertex.id: [] for vertex in graph.vertices}
    waiting = {vertex.id: len(dependencies(vertex)) for vertex in graph.vertices}
    for vertex in graph.vertices:
        for dep in dependencies(vertex):
            readers[dep].append(vertex.id)
    done = [vertex for vertex, count in waiting.items() if not count]
    for vertex_id in done:
        for reader in readers[vertex_id]:
            waiting[reader] -= 1
            if not waiting[reader]:
                done.append(reader)
    alive = set(by_id).difference(done)
    # What is left depends on something that is left, so walking that way comes round.
    walk, place = [min(alive)], {min(alive): 0}
    while True:
        following = min(dep for dep in dependencies(by_id[walk[-1]]) if dep in alive)
        if following in place:
            break
        place[following] = len(walk)
        walk.append(following)
    cycle = [*walk[place[following] :], following][::-1]
    return " -> ".join(map(str, cycle[:8])) + (" -> ..." if len(cycle) > 8 else "")


def largest_need(graph: TaskGraph, device: int) -> tuple[int, Vertex | None]:
    """Return the most bytes that one vertex needs on ``device`` by itself, and the vertex. Inputs and outputs together,
    rounded up to the alignment; output 0 costs nothing where it may lie on an input."""
    unit = next(each.alignment for each in graph.devices if each.id == device)
    by_id = {vertex.id: vertex for vertex in graph.vertices}
    home_uses = HomeUses.of(graph)
    most, culprit = 0, None
    for vertex in graph.vertices:
        sizes = {}
        for producer, output in vertex.inputs:
            source, ref = by_id[producer], (producer, output)
            elsewhere = is_foreign(source) or home_uses.at_home(vertex, ref)
            if home_uses.device_of(ref, source) == device and not elsewhere:
                sizes[ref] = source.sizes[output]
        over = (vertex.inputs[position] for position in vertex.may_inplace)
        reuses = {0} if any(ref in sizes for ref in over) else set()
        reuses |= {k for k, ref in overwrites(vertex) if ref in sizes or (vertex.id, k) in home_uses.written}
        # A clean input that nobody reads stays on the host.
        if vertex.space == device and not is_foreign(vertex) and not host_copy_exists(vertex):
            sizes |= {(vertex.id, k): size for k, size in enumerate(vertex.sizes) if k not in reuses}
        need = sum(-(-size // unit) * unit for size in sizes.values())
        if need > most:
            most, culprit = need, vertex
    return most, culprit
