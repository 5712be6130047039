"""The first demand of the static judge: a plan is one of its graph, for no more memory than the graph's devices have.

A plan adds addresses, copies and edges. Every other field must be the graph's, so that no code that runs a plan has to
decide which of the two to believe.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from disco_accel.errors import VerifyError
from disco_accel.graph.byte_ranges import is_resident_range
from disco_accel.graph.check import called
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import never_changes
from disco_accel.sizes import MAX_SIZE

_COPIES = (VertexKind.OFFLOAD, VertexKind.RELOAD)
_FIRST = ("kind", "device", "op", "sizes")
SAME = (*_FIRST, *(f.name for f in fields(Vertex) if f.name not in (*_FIRST, "id", "inputs")))
"""The fields of a task graph's vertex that its plan repeats: all but the inputs, which may be read from reloads."""

_repeated = attrgetter(*SAME)

_BARE = ("traits", "out", "keep", "after", "inplace", "may_inplace")
"""Fields that only a vertex of the task graph can have."""

_bare = attrgetter(*_BARE)
_rest = attrgetter(*_BARE[1:])
_PLAIN = Vertex(0, VertexKind.OFFLOAD, 0)


def check_same(graph: TaskGraph, plan: MemGraph) -> None:
    """Raise VerifyError unless ``plan`` has ``graph``'s devices and vertices, and besides them only plain copies."""
    planned = {vertex.id: vertex for vertex in plan.vertices}
    if len(planned) != len(plan.vertices):
        raise VerifyError("two vertices of the plan have the same id")
    for vertex in graph.vertices:
        _check_vertex(vertex, planned.get(vertex.id))
    _check_devices(graph, plan)
    _check_host(graph, plan)
    known = {vertex.id for vertex in graph.vertices}
    devices = {device.id for device in plan.devices}
    for vertex in plan.vertices:
        if vertex.device not in devices:
            raise VerifyError(f"{called(vertex)}: the plan has no device {vertex.device}")
        if vertex.id not in known and vertex.kind not in _COPIES and not is_resident_range(vertex):
            raise VerifyError(f"{called(vertex)} is not in the task graph and neither offload nor reload")
        for producer, output in vertex.inputs:
            if producer not in planned or not 0 <= output < len(planned[producer].sizes):
                raise VerifyError(f"{called(vertex)}: reads [{producer}, {output}], which does not exist")
    _check_copies(plan, known)
    _check_ranges(graph, plan, known)


def _check_devices(graph: TaskGraph, plan: MemGraph) -> None:
    own = {device.id: device for device in graph.devices}
    planned = {device.id: device for device in plan.devices}
    if len(planned) != len(plan.devices) or planned.keys() != own.keys():
        raise VerifyError(f"the plan is for devices {_some(plan.devices)}, the task graph for {_some(graph.devices)}")
    for device in plan.devices:
        allowed = own[device.id]
        if device.host != allowed.host:
            raise VerifyError(f"device {device.id}: the plan and the task graph differ in whether it is the host's")
        if device.memory > allowed.memory:
            raise VerifyError(
                f"device {device.id}: the plan counts on {device.memory} bytes of memory, the task graph has"
                f" {allowed.memory}; if it was planned for more, give that (on the command line --memory"
                f" {device.memory})"
            )
        if device.alignment < 1 or allowed.alignment < 1 or device.alignment % allowed.alignment:
            raise VerifyError(
                f"device {device.id}: the plan aligns to {device.alignment} bytes, which is not a multiple of the"
                f" task graph's {allowed.alignment}"
            )


def _some(devices: tuple[object, ...]) -> str:
    ids = [str(getattr(device, "id", device)) for device in devices]
    return ", ".join(ids[:8]) + (", ..." if len(ids) > 8 else "")


def _check_host(graph: TaskGraph, plan: MemGraph) -> None:
    if graph.host_memory is not None and plan.host_memory > graph.host_memory:
        raise VerifyError(
            f"host: the plan counts on {plan.host_memory} bytes for offloads, the task graph has {graph.host_memory}"
        )
    if not 0 <= plan.host_memory <= MAX_SIZE:
        raise VerifyError(f"host: memory is {plan.host_memory}, but must be from 0 to {MAX_SIZE} bytes")
    if plan.host_alignment < 1:
        raise VerifyError(f"host: alignment is {plan.host_alignment}, but must be 1 or more bytes")


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
        if source is None or len(vertex.inputs) != 1 or vertex.device != source.device:
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
