"""The timed planner: safe on any graph, and near the bound where the plain walk is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.copies import swaps_out
from disco_accel.graph.files import read_taskgraph
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import TaskGraph, with_at_least
from disco_accel.graph.values import host_copy_exists
from disco_accel.plan import make_plan
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.summary import peak_bytes
from disco_accel.plan.timed.requirements import requirements_of
from disco_accel.plan.timed.search import build_timed
from disco_accel.simulate.simulator import Link, Machine, simulate
from disco_accel.verify.static import verify
from tests.support.graphs.lora_graph import LoraShape, lora_graph, prefill_graph
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets
from tests.support.oracles.adversary import run_reference

GRAPHS = Path(__file__).parent.parent / "data" / "graphs"
FACTORS = (1.0, 1.2, 1.5, 2.0, 3.0, 10.0)
SMALL_STEP = LoraShape(layers=8, hidden=1024, ffn=2816, vocabulary=4096, tokens=1024, flops=2e13)


@pytest.mark.parametrize("start", range(0, 800, 200))
def test_plans_of_random_graphs_pass_both_judges(start: int) -> None:
    planned = 0
    for seed in range(start, start + 200):
        rng = random.Random(seed)
        shape = Shape(vertices=rng.choice((8, 24, 40)))
        graph = with_working_sets(random_taskgraph(rng, shape), rng.choice(FACTORS))
        link = Link(rng.choice((1e7, 1e9)), 1e-6)
        try:
            plan = build_timed(graph, Machine(links={TO_DEVICE: link, TO_HOST: link}), cyclic=rng.random() < 0.5)
        except Infeasible:
            continue
        planned += 1
        verify(graph, plan)
        run_reference(graph, plan, seed)
        assert simulate(plan).makespan >= 0
    assert planned > 80, "nearly every graph was refused, so nothing was judged"


def test_buffers_that_the_running_vertex_reads_are_never_evicted_for_its_outputs() -> None:
    """Found by the random search: held for later, but read right now."""
    rng = random.Random(3449)
    factor = rng.choice(FACTORS)
    graph = with_working_sets(random_taskgraph(rng, Shape(vertices=rng.choice((8, 24, 60)))), factor)
    cyclic = rng.random() < 0.5
    links = [Link(rng.choice((1e7, 1e9)), 1e-6) for _ in range(2)]
    verify(graph, build_timed(graph, Machine(links={TO_DEVICE: links[0], TO_HOST: links[1]}), cyclic=cyclic))


def weights(graph: TaskGraph) -> int:
    return sum(vertex.sizes[0] for vertex in graph.vertices if host_copy_exists(vertex))


@pytest.mark.parametrize(
    ("make", "share", "bandwidth", "limit"),
    [
        (lora_graph, 0.4, 2e10, 1.01),
        (lora_graph, 0.25, 5e10, 1.03),
        (lora_graph, 0.4, 1e9, 1.25),
        (lora_graph, 0.6, 1e9, 1.15),
        (prefill_graph, 0.4, 1e10, 1.20),
    ],
)
def test_steps_come_near_the_bound(
    make: Callable[[LoraShape, int], TaskGraph], share: float, bandwidth: float, limit: float
) -> None:
    """Compute limits the first, the link the others; small graphs, so a layer is a large part of memory."""
    graph = make(SMALL_STEP, int(share * weights(make(SMALL_STEP, 1))))
    machine = Machine(links={TO_DEVICE: Link(bandwidth, 1e-5), TO_HOST: Link(bandwidth, 1e-5)})
    plan = make_plan(graph, cyclic=True, machine=machine, planner="timed")
    verify(graph, plan)
    run_reference(graph, plan, 0)
    assert simulate(plan, machine).makespan <= limit * bound_of(graph, machine).bound


def test_the_arena_of_a_step_that_fits_is_its_live_peak() -> None:
    graph = read_taskgraph(GRAPHS / "lora_small.taskgraph.json")
    plan = make_plan(graph, memory=1 << 34, cyclic=True, planner="timed")
    requirements = requirements_of(graph, Machine(), None)
    live = int(requirements.pinned_bytes[0].max()) + sum(buffer.block for buffer in requirements.swappable)
    assert peak_bytes(plan) <= 1.02 * live


def test_a_value_is_not_offloaded_twice_and_frozen_weights_never() -> None:
    graph = lora_graph(SMALL_STEP, 40 << 20)
    plan = make_plan(graph, cyclic=True, planner="timed")
    verify(graph, plan)
    clean = {vertex.id for vertex in graph.vertices if host_copy_exists(vertex)}
    sources = [vertex.inputs[0] for vertex in plan.vertices if swaps_out(vertex)]
    assert sources and len(sources) == len(set(sources))
    assert clean.isdisjoint(source for source, _ in sources)


def test_the_needed_budget_works_and_one_unit_less_does_not() -> None:
    refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        cyclic = rng.random() < 0.5
        graph = with_working_sets(random_taskgraph(rng, Shape(vertices=14)), rng.choice((0.5, 0.6, 0.75)))
        try:
            make_plan(graph, cyclic=cyclic, planner="timed")
        except BudgetTooSmall as error:
            refused += 1
            make_plan(with_at_least(graph, error.needed), cyclic=cyclic, planner="timed")
            with pytest.raises(BudgetTooSmall):
                make_plan(with_at_least(graph, error.needed - 256), cyclic=cyclic, planner="timed")
    assert refused > 20
