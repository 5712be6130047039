"""Questions of planners, judges, the simulator and the engine about values. A new trait of values is answered here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from disco_accel.graph.taskgraph import Ref, Vertex, VertexKind
from disco_accel.graph.traits import Access, Arrival


def host_copy_exists(vertex: Vertex) -> bool:
    """Whether the host has the value when a step starts: it may be loaded, and dropped while no kernel changed it."""
    return vertex.kind is VertexKind.INPUT and vertex.traits.host_has_it


def never_changes(vertex: Vertex) -> bool:
    """Whether the value is the host's and the same in all steps: nothing writes to it, on the device or elsewhere."""
    return host_copy_exists(vertex) and vertex.traits.access is Access.READ and not vertex.traits.host_updated


def outlives_step(vertex: Vertex) -> bool:
    """Whether the device's copy of a value that the host has is good for the next step too."""
    return not vertex.traits.host_updated


def may_be_resident(vertex: Vertex) -> bool:
    """Whether the host has the value, and its device may have it too when a step starts."""
    return host_copy_exists(vertex) and outlives_step(vertex)


def may_leave(vertex: Vertex) -> bool:
    """Whether a value that the host has may make room on its device, in a plan that is run step after step."""
    return not vertex.traits.stays


def is_foreign(vertex: Vertex) -> bool:
    """Whether the value lies in memory that is not the plan's: it has no offset, and never leaves."""
    return vertex.traits.access is Access.FOREIGN


def arrives_at_gate(vertex: Vertex) -> bool:
    """Whether the value is brought at the gate, after all that is handed out there. Its memory is never shared."""
    return vertex.traits.arrival is Arrival.GATE


def handed_out_at_gate(vertex: Vertex) -> bool:
    """Whether the user reads the outputs at the gate, where nothing behind the gate has run."""
    return vertex.out


def must_survive_step(vertex: Vertex) -> bool:
    """Whether the user wants the outputs when the step has ended."""
    return vertex.keep


def is_handed_out(vertex: Vertex) -> bool:
    """Whether the user gets the outputs, at the gate or when the step has ended."""
    return vertex.keep or vertex.out


def changes_over_steps(vertex: Vertex) -> bool:
    """Whether kernels may change the value and the next step starts with their last version."""
    return vertex.kind is VertexKind.INPUT and vertex.traits.changes_over_steps


def overwrites(vertex: Vertex) -> Iterator[tuple[int, Ref]]:
    """Each output that is written over an input of the vertex, at the same offset, with that input."""
    for output, position in vertex.inplace:
        yield output, vertex.inputs[position]


def lasting_versions(vertices: Iterable[Vertex]) -> Mapping[Ref, list[Ref]]:
    """INPUT value that changes over steps → its versions in order, the first being the input itself. ``vertices`` in a
    topological order, of a task graph or of a plan without its copies."""
    versions: dict[Ref, list[Ref]] = {}
    of: dict[Ref, list[Ref]] = {}
    for vertex in vertices:
        if changes_over_steps(vertex):
            of[vertex.id, 0] = versions[vertex.id, 0] = [(vertex.id, 0)]
        for output, ref in overwrites(vertex):
            if ref in of:
                of[vertex.id, output] = of[ref]
                of[ref].append((vertex.id, output))
    return versions
