"""A graph that is spread over devices is the same graph: transfers and copies of inputs taken away, nothing differs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from disco_accel.decompose.spread import SpreadGraph, spread
from disco_accel.errors import BudgetTooSmall, CaptureError
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.spaces import HOST, Space
from disco_accel.graph.taskgraph import Ref, TaskGraph, Vertex, VertexKind, with_memory
from disco_accel.graph.traits import FROZEN, STATE
from disco_accel.graph.values import changes_over_steps, host_copy_exists, is_handed_out
from disco_accel.plan import make_plan
from disco_accel.simulate.simulator import simulate
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.oracles.adversary import run_reference


def handed_out(graph: TaskGraph) -> list[Ref]:
    return [(v.id, k) for v in graph.vertices if is_handed_out(v) for k in range(len(v.sizes))]


def randomly(graph: TaskGraph, rng: random.Random, devices: int) -> tuple[SpreadGraph, Mapping[int, int]]:
    """Each kernel on a device drawn, but kernels that change one state on one of them."""
    made = [Space(k, 1 << 40) for k in (0, *range(10, 9 + devices))]
    places = {v.id: rng.choice(made).id for v in graph.vertices if v.kind is VertexKind.KERNEL}
    return spread(graph, places, made, handed_out(graph)), places


def assert_same(graph: TaskGraph, done: SpreadGraph, places: Mapping[int, int]) -> None:
    """``done`` has the vertices of ``graph``, whose inputs lead, through transfers and copies, to the same values."""
    by_id = {v.id: v for v in done.graph.vertices}
    added = by_id.keys() - {v.id for v in graph.vertices}

    def origin(ref: Ref) -> Ref:
        while ref[0] in added:
            vertex = by_id[ref[0]]
            ref = vertex.inputs[0] if is_transfer(vertex) else (done.copies[vertex.id], 0)
        return ref

    order = [v.id for v in done.graph.vertices if v.id not in added]
    assert order == [v.id for v in graph.vertices]
    for vertex in graph.vertices:
        other = by_id[vertex.id]
        assert tuple(map(origin, other.inputs)) == vertex.inputs
        same = replace(
            other, inputs=vertex.inputs, space=vertex.space, source=vertex.source, out=vertex.out, keep=vertex.keep
        )
        assert same == vertex
        if vertex.kind is VertexKind.KERNEL:
            assert other.space == places[vertex.id]
        elif not host_copy_exists(vertex):
            assert other.space == 0, "the user has one device"
    for ref in handed_out(graph):
        there = by_id[done.home[ref][0]]
        assert origin(done.home[ref]) == ref and there.space == 0
        assert (there.out, there.keep) == (by_id[ref[0]].out, by_id[ref[0]].keep) or there.id != ref[0]
        assert there.out >= next(v for v in graph.vertices if v.id == ref[0]).out
    for copy, of in done.copies.items():
        assert host_copy_exists(by_id[copy]) and not changes_over_steps(by_id[copy])
        assert by_id[copy].space != by_id[of].space and by_id[copy].sizes == by_id[of].sizes
    moved = [(origin(v.inputs[0]), v.space) for v in done.graph.vertices if v.id in added and v.inputs]
    assert len(moved) == len(set(moved)), "a value goes to a device once"


def spread_of(seed: int) -> tuple[TaskGraph, SpreadGraph, Mapping[int, int]]:
    rng = random.Random(seed)
    graph = random_taskgraph(rng, Shape(devices=1))
    return graph, *randomly(graph, rng, rng.randint(2, 8))


@pytest.mark.parametrize("start", [0, 150])
def test_random_graphs_on_several_devices(start: int) -> None:
    """Each is the same graph, obeys the rules, and has plans that both judges pass."""
    planned = 0
    for seed in range(start, start + 150):
        graph, done, places = spread_of(seed)
        assert_same(graph, done, places)
        checked = with_room(check_taskgraph(done.graph), random.Random(seed).choice((1.2, 2.0, 4.0)))
        try:
            plan = make_plan(checked, planner="build", cyclic=seed % 2 == 0)
        except BudgetTooSmall:
            continue
        planned += 1
        verify(checked, plan)
        run_reference(checked, plan, seed)
        simulate(plan)
    assert planned > 75, "nearly every graph was refused, so nothing was judged"


def chain(kernels: int, *weights: Vertex) -> TaskGraph:
    """Kernels in a row, each of which reads all of ``weights``."""
    x = Vertex(0, VertexKind.INPUT, 0, "x", sizes=(256,))
    refs = tuple((w.id, 0) for w in weights)
    made = [
        Vertex(k, VertexKind.KERNEL, 0, "f", ((k - 1 if k > 10 else 0, 0), *refs), (256,))
        for k in range(10, 10 + kernels)
    ]
    return TaskGraph("chain", (Space(0, 1 << 20),), (x, *weights, *made[:-1], replace(made[-1], keep=True)))


def test_a_weight_is_an_input_of_each_device_and_a_result_goes_to_the_first() -> None:
    graph = chain(4, Vertex(1, VertexKind.INPUT, 0, "w", sizes=(512,), traits=FROZEN))
    devices = [Space(0, 1 << 20), Space(1, 1 << 20)]
    done = spread(graph, {10: 0, 11: 0, 12: 1, 13: 1}, devices, [(13, 0)])
    kinds = [(v.kind, v.source, v.space, v.inputs) for v in done.graph.vertices if v.kind is not VertexKind.KERNEL]
    (copy,) = done.copies
    assert (VertexKind.INPUT, HOST, 0, ()) in kinds and done.graph.vertices[0].id == copy
    assert [k for k in kinds if k[0] is VertexKind.COPY] == [
        (VertexKind.COPY, 0, 1, ((11, 0),)),
        (VertexKind.COPY, 1, 0, ((13, 0),)),
    ]
    assert done.graph.vertices[-1].keep and not next(v for v in done.graph.vertices if v.id == 13).keep
    plan = make_plan(with_memory(done.graph, lambda _: 2048), cyclic=True)
    verify(with_memory(done.graph, lambda _: 2048), plan)


def test_a_state_that_two_devices_change_is_refused() -> None:
    state = Vertex(1, VertexKind.INPUT, 0, "w", sizes=(256,), traits=STATE)
    first = Vertex(2, VertexKind.KERNEL, 0, "f", ((1, 0),), (256,), inplace=((0, 0),))
    last = Vertex(3, VertexKind.KERNEL, 0, "f", ((2, 0),), (256,), inplace=((0, 0),))
    graph = TaskGraph("state", (Space(0, 1 << 20),), (state, first, last))
    devices = [Space(0, 1 << 20), Space(1, 1 << 20)]
    with pytest.raises(CaptureError, match=r"vertex 1 \(w\) is changed on two devices; use one device"):
        spread(graph, {2: 0, 3: 1}, devices, [])
    done = spread(graph, {2: 1, 3: 1}, devices, [])
    assert {v.space for v in done.graph.vertices} == {1}
