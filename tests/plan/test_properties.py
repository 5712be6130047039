"""Any random graph, budget, policy and look-ahead: a plan passes both judges, or no plan is found."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disco_accel.errors import BudgetTooSmall
from disco_accel.eviction import POLICIES
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, with_at_least
from disco_accel.graph.values import host_copy_exists, overwrites
from disco_accel.plan import make_plan
from disco_accel.plan.buildmemgraph.builder import build
from disco_accel.plan.buildmemgraph.residents import Residents
from disco_accel.plan.infeasible import Infeasible
from disco_accel.simulate.simulator import simulate
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, taskgraphs, with_working_sets
from tests.support.oracles.adversary import run_reference

FACTORS = (1.0, 1.2, 1.5, 2.0, 3.0, 10.0)


def judge(graph: TaskGraph, plan: MemGraph, seeds: int = 2) -> None:
    verify(graph, plan)
    for seed in range(seeds):
        run_reference(graph, plan, seed)


def random_plan(seed: int) -> tuple[TaskGraph, MemGraph | None]:
    rng = random.Random(seed)
    graph = with_working_sets(random_taskgraph(rng), rng.choice(FACTORS))
    clean = [vertex.id for vertex in graph.vertices if host_copy_exists(vertex) and rng.random() < 0.4]
    permanent = tuple(vertex for vertex in clean if rng.random() < 0.4)
    residents = Residents(permanent, tuple(vertex for vertex in clean if vertex not in permanent))
    policy = POLICIES[rng.choice(sorted(POLICIES))]
    lookahead = rng.choice((0, 2, None, None))
    try:
        return graph, build(graph, policy, lookahead=lookahead, residents=residents, cyclic=rng.random() < 0.5)
    except Infeasible:
        return graph, None


@pytest.mark.parametrize("start", range(0, 1600, 400))
def test_plans_of_random_graphs_pass_both_judges(start: int) -> None:
    planned = 0
    for seed in range(start, start + 400):
        graph, plan = random_plan(seed)
        if plan is not None:
            planned += 1
            judge(graph, plan)
    assert planned > 200, "nearly every graph was refused, so nothing was judged"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(taskgraphs(Shape(vertices=16)), st.sampled_from(FACTORS), st.sampled_from(sorted(POLICIES)), st.booleans())
def test_make_plan_is_safe_and_runs_to_its_end(graph: TaskGraph, factor: float, policy: str, cyclic: bool) -> None:
    graph = with_working_sets(graph, factor)
    try:
        plan = make_plan(graph, policy=policy, cyclic=cyclic)
    except BudgetTooSmall:
        return
    judge(graph, plan)
    assert simulate(plan).makespan >= 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(taskgraphs(Shape(vertices=14)), st.sampled_from(FACTORS), st.booleans())
def test_the_needed_budget_works_and_one_unit_less_does_not(graph: TaskGraph, factor: float, cyclic: bool) -> None:
    graph = with_working_sets(graph, factor / 2)
    try:
        make_plan(graph, cyclic=cyclic)
    except BudgetTooSmall as error:
        needed = error.needed
        assert needed > min(device.memory for device in graph.devices)
        enough = with_at_least(graph, needed)
        judge(enough, make_plan(enough, cyclic=cyclic))
        unit = max(device.alignment for device in graph.devices)
        with pytest.raises(BudgetTooSmall):
            make_plan(with_at_least(graph, needed - unit), cyclic=cyclic)


@settings(max_examples=40, deadline=None)
@given(taskgraphs(Shape(vertices=16)), st.booleans())
def test_with_room_for_everything_nothing_is_copied(graph: TaskGraph, cyclic: bool) -> None:
    overwritten = {ref[0] for v in graph.vertices for _, ref in overwrites(v)}
    if any(vertex.id in overwritten for vertex in graph.vertices):
        # Overwriting a value that is still wanted takes a copy whatever the room.
        return
    plan = make_plan(with_working_sets(graph, 1000.0), cyclic=cyclic)
    assert len(plan.vertices) == len(graph.vertices)
