"""Steps that overlap are safe: two of them in a row, as one plan with the edges between steps, pass the judge."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from disco_accel.errors import PlanError, VerifyError
from disco_accel.graph.carried_values import carried_values, taskgraph_of
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.copies import is_transfer, swaps_in
from disco_accel.graph.memgraph import Edge, MemGraph, Slot
from disco_accel.graph.spaces import HOST
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind
from disco_accel.graph.values import host_copy_exists, is_foreign
from disco_accel.plan import make_plan
from disco_accel.simulate.step_boundary import CrossStepDependencies, cross_step_dependencies
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets

FAR = 1000
"""Added to the ids of the second step."""
SHAPE = Shape(vertices=18, gate=False, keep=0.15)


def twice(graph: TaskGraph, plan: MemGraph, cross_step: CrossStepDependencies) -> tuple[TaskGraph, MemGraph]:
    """Two steps as one graph and one plan. What the user brings for the second is made by a kernel without inputs."""
    clean = {v.id for v in graph.vertices if host_copy_exists(v)}
    back = _where_residents_end(plan)

    def second(ref: Ref, planned: bool) -> Ref:
        if ref[0] in clean:
            return back.get(ref, ref) if planned else ref
        return ref[0] + FAR, ref[1]

    def moved(v: Vertex, planned: bool) -> Vertex:
        brought = v.kind is VertexKind.INPUT and not is_foreign(v)
        host = swaps_in(v) and v.inputs[0][0] in clean
        inputs = v.inputs if host else tuple(second(ref, planned) for ref in v.inputs)
        after = tuple(other + FAR for other in v.after)
        return replace(v, id=v.id + FAR, kind=VertexKind.KERNEL if brought else v.kind, inputs=inputs, after=after)

    def both(vertices: tuple[Vertex, ...], planned: bool) -> tuple[Vertex, ...]:
        first = tuple(replace(v, keep=False) for v in vertices)
        return first + tuple(moved(v, planned) for v in vertices if v.id not in clean)

    user = _user(plan)
    task = TaskGraph("twice", graph.devices, (*both(graph.vertices, False), user))
    vertices = both(plan.vertices, True)
    slots = {**plan.slots, **{(id + FAR, k): s for (id, k), s in plan.slots.items() if id not in clean}}
    data = [*plan.data_edges, *((u + FAR, v + FAR) for u, v in plan.data_edges if u not in clean)]
    data += [(p, v.id) for v in vertices if v.id >= FAR for p, _ in v.inputs]
    data += [(producer, user.id) for producer, _ in user.inputs]
    memory = [*plan.memory_edges, *((u + FAR, v + FAR) for u, v in plan.memory_edges if u not in clean)]
    memory += _edges_between(plan, cross_step, clean, user.id)
    input_ids = {v.id for v in vertices if v.kind is VertexKind.INPUT}
    return task, replace(
        plan,
        vertices=(*vertices, user),
        slots=slots,
        data_edges=tuple(data),
        memory_edges=tuple(edge for edge in memory if edge[1] not in input_ids),
        cyclic=False,
    )


def _edges_between(plan: MemGraph, cross_step: CrossStepDependencies, clean: set[int], user: int) -> list[Edge]:
    ids = [v.id for v in plan.vertices]
    edges: list[Edge] = []
    for u, successors in cross_step.successors.items():
        for v in successors:
            if ids[v] not in clean:
                edges.append((ids[u], ids[v] + FAR))
            else:
                # A resident that comes back: whoever reads it in the second step waits for that.
                edges += [(ids[u], w.id + FAR) for w in plan.vertices if (ids[v], 0) in w.inputs]
    edges += [(ids[u] + FAR, ids[v] + FAR) for u, v in cross_step.within]
    edges += [(ids[worker], user) for worker in cross_step.workers]
    return edges + [(user, ids[gated] + FAR) for gated in cross_step.gated]


def _where_residents_end(plan: MemGraph) -> dict[Ref, Ref]:
    """Which copy lies at the place of each clean resident when a step has ended."""
    carried = carried_values(plan)
    ends: dict[Ref, Ref] = {}
    for v in plan.vertices:
        ref = (v.id, 0)
        home = plan.slots.get(carried[ref])
        if home is not None and swaps_in(v) and plan.slots[ref].offset == home.offset:
            ends[carried[ref]] = ref
    return ends


def _user(plan: MemGraph) -> Vertex:
    """A kernel that reads all that is kept on device 0 between the steps."""
    order = {v.id: i for i, v in enumerate(plan.vertices)}
    carried = carried_values(plan)
    kept = {(v.id, k) for v in plan.vertices if v.keep for k in range(len(v.sizes))}
    places = {
        (v.id, k): (plan.slots[v.id, k], size)
        for v in plan.vertices
        for k, size in enumerate(v.sizes)
        if (v.id, k) in plan.slots
    }
    inputs = []
    for ref, (slot, size) in places.items():
        later = (place for other, place in places.items() if order[other[0]] > order[ref[0]])
        if carried[ref] in kept and slot.space == 0 and not any(_overlap((slot, size), place) for place in later):
            inputs.append(ref)
    return Vertex(FAR - 1, VertexKind.KERNEL, 0, "user", tuple(inputs), (0,))


def _overlap(one: tuple[Slot, int], other: tuple[Slot, int]) -> bool:
    """Whether two slots, each with its bytes, share some."""
    (a, a_size), (b, b_size) = one, other
    return a.space == b.space and a.offset < b.offset + b_size and b.offset < a.offset + a_size


def cases(count: int) -> list[tuple[TaskGraph, MemGraph]]:
    rng = random.Random(7)
    made = []
    for _ in range(count):
        graph = with_working_sets(random_taskgraph(rng, SHAPE), rng.choice((2.5, 3, 4)))
        made.append((graph, make_plan(graph, planner=rng.choice(("build", "timed")), cyclic=True)))
    return made


def _task_refs(task: TaskGraph, plan: MemGraph) -> TaskGraph:
    """``task`` whose user reads the values themselves instead of their copies."""
    carried = carried_values(plan)
    *rest, user = task.vertices
    return check_taskgraph(
        replace(task, vertices=(*rest, replace(user, inputs=tuple(carried[ref] for ref in user.inputs))))
    )


def test_two_steps_in_a_row_share_the_memory_without_a_race() -> None:
    """And of the edges between them, some are needed: without them the judge objects."""
    needed = 0
    for graph, plan in cases(150):
        cross_step = cross_step_dependencies(plan)
        task, doubled = twice(graph, plan, cross_step)
        verify(_task_refs(task, doubled), doubled)
        for successors in ({}, dict(list(cross_step.successors.items())[1:])):
            task, loose = twice(graph, plan, replace(cross_step, successors=successors))
            try:
                verify(_task_refs(task, loose), loose)
            except VerifyError:
                needed += 1
    assert needed > 4


def test_the_task_graph_of_a_plan_is_the_one_that_was_planned() -> None:
    for graph, plan in cases(40):
        again = check_taskgraph(taskgraph_of(plan))
        assert sorted(again.vertices, key=lambda v: v.id) == sorted(graph.vertices, key=lambda v: v.id)
        if len(graph.devices) == 1:
            assert [v.id for v in again.vertices if v.kind is not VertexKind.INPUT] == [
                v.id for v in graph.vertices if v.kind is not VertexKind.INPUT
            ]


def _is_work(vertex: Vertex) -> bool:
    return vertex.kind is VertexKind.KERNEL or is_transfer(vertex)


def test_kept_values_wait_for_the_user() -> None:
    """Without the gate, what a step keeps would be overwritten by the next one's loads."""
    caught = 0
    for graph, plan in cases(150):
        cross_step = cross_step_dependencies(plan)
        kernels = [i for i in cross_step.gated if _is_work(plan.vertices[i])]
        task, loose = twice(graph, plan, replace(cross_step, gated=kernels))
        try:
            verify(_task_refs(task, loose), loose)
        except VerifyError:
            caught += 1
    assert caught > 3


def test_copies_of_each_other_are_an_error() -> None:
    ends = ((HOST, 0), (0, HOST))
    ring = tuple(
        Vertex(i, VertexKind.COPY, target, "copy", ((1 - i, 0),), (1,), source=source)
        for i, (source, target) in enumerate(ends)
    )
    _, plan = cases(1)[0]
    with pytest.raises(PlanError, match="vertex 0 copies"):
        carried_values(replace(plan, vertices=ring, slots={}, data_edges=(), memory_edges=()))
