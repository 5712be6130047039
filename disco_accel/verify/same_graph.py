"""The first demand of the static judge: a plan is one of its graph, for no more memory than the graph's devices have.

A plan adds addresses, copies and edges. Every other field must be the graph's, so that no code that runs a plan has to
decide which of the two to believe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter

from disco_accel.errors import VerifyError
from disco_accel.graph.check import called
from disco_accel.graph.copies import copies_bytes
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import HOST, HOST_SPACE, Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import never_changes
from disco_accel.sizes import MAX_SIZE

_FIRST = ("kind", "space", "source", "op", "sizes")
SAME = (*_FIRST, *(f.name for f in fields(Vertex) if f.name not in (*_FIRST, "id", "inputs")))
"""The fields of a task graph's vertex that its plan repeats: all but the inputs, which may be read from reloads."""

_repeated = attrgetter(*SAME)

_BARE = ("traits", "out", "keep", "after", "inplace", "may_inplace")
"""Fields that only a vertex of the task graph can have."""

_bare = attrgetter(*_BARE)
_rest = attrgetter(*_BARE[1:])
_PLAIN = Vertex(0, VertexKind.COPY, 0)


def check_same(graph: TaskGraph, plan: MemGraph) -> None:
    """Raise VerifyError unless ``plan`` has ``graph``'s devices and vertices, and besides them only plain copies."""
    planned = {vertex.id: vertex for vertex in plan.vertices}
    if len(planned) != len(plan.vertices):
        raise VerifyError("two vertices of the plan have the same id")
    for vertex in graph.vertices:
        _check_vertex(vertex, planned.get(vertex.id))
    _check_spaces(graph, plan)
    known = {vertex.id for vertex in graph.vertices}
    spaces = {HOST, *(space.id for space in plan.spaces)}
    for vertex in plan.vertices:
        if vertex.space not in spaces or vertex.source not in spaces:
            raise VerifyError(f"{called(vertex)}: the plan has no space {vertex.space} or no space {vertex.source}")
        if vertex.id not in known and not copies_bytes(vertex):
            raise VerifyError(f"{called(vertex)} is not in the task graph and copies neither from nor to its homes")
        for producer, output in vertex.inputs:
            if producer not in planned or not 0 <= output < len(planned[producer].sizes):
                raise VerifyError(f"{called(vertex)}: reads [{producer}, {output}], which does not exist")
    _check_copies(plan, known)
    _check_ranges(graph, plan, known)


def named(space: Space) -> str:
    """How messages call ``space``."""
    return f"device {space.id}" if space.id >= 0 else "the host" if space.id == HOST else f"space {space.id}"


def _check_spaces(graph: TaskGraph, plan: MemGraph) -> None:
    own = {HOST: HOST_SPACE} | {space.id: space for space in graph.spaces}
    planned = {space.id: space for space in plan.spaces}
    if len(planned) != len(plan.spaces) or planned.keys() | {HOST} != own.keys():
        raise VerifyError(f"the plan is for spaces {_some(planned)}, the task graph for {_some(own)}")
    for space in plan.spaces:
        allowed = own[space.id]
        if space.kind is not allowed.kind:
            raise VerifyError(f"{named(space)}: {space.kind} in the plan, {allowed.kind} in the task graph")
        if not 0 <= space.memory <= MAX_SIZE:
            raise VerifyError(f"{named(space)}: memory is {space.memory}, but must be from 0 to {MAX_SIZE} bytes")
        if space.memory > allowed.memory:
            raise VerifyError(
                f"{named(space)}: the plan counts on {space.memory} bytes of memory, the task graph has"
                f" {allowed.memory}"
                + (
                    f"; if it was planned for more, give that (on the command line --memory {space.memory})"
                    if space.id >= 0
                    else ""
                )
            )
        if space.alignment < 1 or allowed.alignment < 1 or space.alignment % allowed.alignment:
            raise VerifyError(
                f"{named(space)}: the plan aligns to {space.alignment} bytes, which is not a multiple of the"
                f" task graph's {allowed.alignment}"
            )


def _some(ids: Iterable[int]) -> str:
    listed = [str(each) for each in ids]
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")


def _check_vertex(vertex: Vertex, planned: Vertex | None) -> None:
    if planned is None:
        raise VerifyError(f"{called(vertex)} of the task graph is missing from the plan")
    if _repeated(planned) != _repeated(vertex):
        key = next(key for key in SAME if getattr(planned, key) != getattr(vertex, key))
        raise VerifyError(f"{called(vertex)}: {key} differs from the task graph's")
    # Behind its inputs a kernel of the plan names the further ranges of those that it reads in several.
    more = vertex.kind is VertexKind.KERNEL and len(planned.inputs) > len(vertex.inputs)
    if len(planned.inputs) != len(vertex.inputs) and not more:
        raise VerifyError(f"{called(vertex)}: has {len(planned.inputs)} inputs, not {len(vertex.inputs)}")


def _check_ranges(graph: TaskGraph, plan: MemGraph, known: set[int]) -> None:
    """Raise VerifyError unless each resident range is one of an input that never changes."""
    inputs = {vertex.id: vertex for vertex in graph.vertices if never_changes(vertex)}
    for vertex in plan.vertices:
        if vertex.id in known or vertex.kind is not VertexKind.INPUT:
            continue
        source = inputs.get(vertex.inputs[0][0])
        if source is None or len(vertex.inputs) != 1 or vertex.space != source.space:
            raise VerifyError(f"{called(vertex)}: is no range of an input that never changes, on the device of that")
        if len(vertex.sizes) != 1 or vertex.begin < 0 or not 0 < vertex.sizes[0] <= source.sizes[0] - vertex.begin:
            raise VerifyError(f"{called(vertex)}: bytes from {vertex.begin} on are not of {called(source)}")
        if vertex.traits != source.traits or _rest(vertex) != _rest(_PLAIN):
            raise VerifyError(f"{called(vertex)}: a resident range has the traits of its input, and nothing else")


def _check_copies(plan: MemGraph, known: set[int]) -> None:
    """Raise VerifyError unless each added vertex is a plain copy."""
    for vertex in plan.vertices:
        if vertex.id in known or vertex.kind is VertexKind.INPUT:
            continue
        if _bare(vertex) != _bare(_PLAIN):
            key = next(key for key in _BARE if getattr(vertex, key) != getattr(_PLAIN, key))
            raise VerifyError(f"{called(vertex)}: {key}: only a vertex of the task graph can have it, not a copy")
