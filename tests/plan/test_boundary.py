"""Plans that begin with the weights which another plan of the same model has in its arena between two steps."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from disco_accel.graph.copies import is_resident_range
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.timed.search import build_at_boundary, build_timed
from disco_accel.simulate.simulator import Link, Machine, simulate
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph, prefill_graph
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets
from tests.support.oracles.adversary import run_reference

SHAPE = LoraShape(layers=6, hidden=256, ffn=704, vocabulary=1024, tokens=256, flops=2e11)
LINK = Link(2e9, 1e-6)
MACHINE = Machine(links={TO_DEVICE: LINK, TO_HOST: LINK})


def residents(plan: MemGraph) -> dict[int, int]:
    """INPUT → its offset, for those that are on the device, as a whole, when a step begins."""
    inputs = (v for v in plan.vertices if v.kind is VertexKind.INPUT and not is_resident_range(v))
    return {v.id: plan.slots[v.id, 0].offset for v in inputs if host_copy_exists(v) and (v.id, 0) in plan.slots}


def by_name(graph: TaskGraph) -> dict[str, int]:
    return {v.op: v.id for v in graph.vertices if v.kind is VertexKind.INPUT}


def weights(graph: TaskGraph) -> dict[int, int]:
    return {v.id: v.sizes[0] for v in graph.vertices if v.kind is VertexKind.INPUT and host_copy_exists(v)}


def of_training(share: float, forward: TaskGraph) -> Mapping[int, int]:
    """The boundary of a training step with ``share`` of the weights as memory, by inputs of ``forward``."""
    step = lora_graph(SHAPE, int(share * sum(weights(forward).values())) // 256 * 256)
    plan = build_timed(step, MACHINE, cyclic=True)
    names, own = {vertex: name for name, vertex in by_name(step).items()}, by_name(forward)
    return {own[names[vertex]]: offset for vertex, offset in residents(plan).items()}


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_a_forward_begins_with_the_weights_of_a_training_step(share: float) -> None:
    """At the same offsets, as fast as without, and the same plan each time."""
    forward = prefill_graph(SHAPE, int(share * sum(weights(prefill_graph(SHAPE, 1)).values())) // 256 * 256)
    boundary = of_training(share, forward)
    without = simulate(build_timed(forward, MACHINE, cyclic=True), MACHINE).makespan
    plan = build_at_boundary(forward, MACHINE, boundary, good=1.01 * without, work=SearchWork())
    verify(forward, plan)
    run_reference(forward, plan, 1)
    found = residents(plan)
    assert found and found.items() <= boundary.items()
    size = weights(forward)
    assert sum(size[vertex] for vertex in found) >= 0.95 * sum(size[vertex] for vertex in boundary)
    assert simulate(plan, MACHINE).makespan <= 1.01 * without
    assert plan == build_at_boundary(forward, MACHINE, boundary, good=1.01 * without, work=SearchWork())


def test_offsets_beyond_the_memory_are_not_wished_for() -> None:
    """The other plan had more memory: what lies below this one's end stays, the rest lies elsewhere or is loaded."""
    whole = prefill_graph(SHAPE, 1)
    forward = prefill_graph(SHAPE, int(0.4 * sum(weights(whole).values())) // 256 * 256)
    boundary = of_training(0.8, forward)
    plan = build_at_boundary(forward, MACHINE, boundary, good=0.0, work=SearchWork())
    verify(forward, plan)
    found, size = residents(plan), weights(forward)
    assert all(offset + size[vertex] <= forward.devices[0].memory for vertex, offset in found.items())
    assert found.items() <= boundary.items() and len(found) < len(boundary)


@pytest.mark.parametrize("alone", [True, False])
def test_plans_of_random_graphs_from_any_boundary_pass_both_judges(alone: bool) -> None:
    """Also where the offsets are those of other memory sizes, and not all of the inputs are there."""
    planned = kept = 0
    for seed in range(90):
        rng = random.Random(seed)
        graph = with_working_sets(
            random_taskgraph(rng, Shape(vertices=rng.choice((8, 24, 40)))), rng.choice((1.2, 2, 4))
        )
        link = Link(rng.choice((1e7, 1e9)), 1e-6)
        machine = Machine(links={TO_DEVICE: link, TO_HOST: link})
        try:
            boundary = residents(build_timed(graph, machine, cyclic=True))
            asked = {vertex: offset for vertex, offset in boundary.items() if rng.random() < 0.8}
            plan = build_at_boundary(graph, machine, asked, good=0.0, work=SearchWork(), alone=alone)
        except Infeasible:
            continue
        planned += 1
        verify(graph, plan)
        run_reference(graph, plan, seed)
        found = residents(plan)
        assert all(asked[vertex] == offset for vertex, offset in found.items() if vertex in asked)
        kept += bool(asked.keys() & found.keys())
    assert planned > 35 and kept > 12, "nearly nothing was judged"
