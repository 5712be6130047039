"""From a plan back to its task graph: the value in each copy."""

from __future__ import annotations

from dataclasses import replace

from disco_accel.errors import PlanError
from disco_accel.graph.copies import copies_bytes, is_resident_range
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import Ref, TaskGraph
from disco_accel.graph.values import host_copy_exists, lasting_versions


def carried_values(plan: MemGraph) -> dict[Ref, Ref]:
    """Return for each value of ``plan``, copies included, the task graph's value that it holds. Raises PlanError naming
    a vertex if copies only copy each other."""
    by_id = {vertex.id: vertex for vertex in plan.vertices}
    carried: dict[Ref, Ref] = {}
    for vertex in plan.vertices:
        for k in range(len(vertex.sizes)):
            path = [(vertex.id, k)]
            passed = set(path)
            while path[-1] not in carried and copies_bytes(by_id[path[-1][0]]):
                source = by_id[path[-1][0]].inputs[0]
                if source in passed:
                    raise PlanError(f"vertex {source[0]} copies what is made of its own copy")
                path.append(source)
                passed.add(source)
            value = carried.get(path[-1], path[-1])
            carried.update(dict.fromkeys(path, value))
    return carried


def inputs_held(plan: MemGraph) -> dict[Ref, int]:
    """Return value of ``plan`` → the input that the host has of it: for inputs themselves, their copies and their
    versions."""
    inputs = {(v.id, 0): v.id for v in plan.vertices if host_copy_exists(v) and not is_resident_range(v)}
    for state, versions in lasting_versions(taskgraph_of(plan).vertices).items():
        inputs.update(dict.fromkeys(versions, state[0]))
    return {ref: inputs[value] for ref, value in carried_values(plan).items() if value in inputs}


def taskgraph_of(plan: MemGraph) -> TaskGraph:
    """Return the task graph that ``plan`` plans: without copies, every vertex reading the values themselves."""
    carried = carried_values(plan)
    copies = {vertex.id for vertex in plan.vertices if copies_bytes(vertex)}
    further = {(vertex.id, 0) for vertex in plan.vertices if vertex.begin}
    vertices = []
    for v in plan.vertices:
        if v.id not in copies:
            inputs = tuple(carried[ref] for ref in v.inputs if ref not in further)
            after = tuple(other for other in v.after if other not in copies)
            same = inputs == v.inputs and after == v.after
            vertices.append(v if same else replace(v, inputs=inputs, after=after))
    return TaskGraph(plan.name, plan.spaces, tuple(vertices))
