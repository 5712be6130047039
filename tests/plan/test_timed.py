"""The timed planner: safe on any graph, and near the bound where the plain walk is not."""

from __future__ import annotations

import random

import pytest

from disco_accel.execute.reference import run_reference
from disco_accel.plan import make_plan
from disco_accel.plan.bound import bound_of
from disco_accel.plan.sim_malloc import Infeasible
from disco_accel.plan.simulate import Link, Machine, simulate
from disco_accel.plan.timed import build_timed
from disco_accel.testing.lora_graph import LoraShape, lora_graph
from disco_accel.testing.strategies import Shape, random_taskgraph, with_memory
from disco_accel.verify import verify

FACTORS = (1.0, 1.2, 1.5, 2.0, 3.0, 10.0)
SMALL_STEP = LoraShape(layers=8, hidden=1024, ffn=2816, vocabulary=4096, tokens=1024, flops=2e13)


@pytest.mark.parametrize("start", range(0, 800, 200))
def test_plans_of_random_graphs_pass_both_judges(start: int) -> None:
    planned = 0
    for seed in range(start, start + 200):
        rng = random.Random(seed)
        shape = Shape(vertices=rng.choice((8, 24, 40)))
        graph = with_memory(random_taskgraph(rng, shape), rng.choice(FACTORS))
        link = Link(rng.choice((1e7, 1e9)), 1e-6)
        try:
            plan = build_timed(graph, Machine(h2d=link, d2h=link), cyclic=rng.random() < 0.5)
        except Infeasible:
            continue
        planned += 1
        verify(graph, plan)
        run_reference(graph, plan, seed)
        assert simulate(plan).makespan >= 0
    assert planned > 80, "nearly every graph was refused, so nothing was judged"


def test_copies_hide_behind_compute() -> None:
    graph = lora_graph(SMALL_STEP, 84 << 20)
    machine = Machine(h2d=Link(2e10, 1e-5), d2h=Link(2e10, 1e-5))
    plan = make_plan(graph, cyclic=True, machine=machine, planner="timed")
    verify(graph, plan)
    assert simulate(plan, machine).makespan <= 1.02 * bound_of(graph, machine).bound
