"""The parts of a budget: each is as large as the pages say, and the least budget is the least."""

from __future__ import annotations

import random

import pytest

from disco_accel.execute.engine_options import EngineOptions, makes_graphs
from disco_accel.step.compile.budget_parts import Budget

MIB = 1 << 20


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_least_budget_leaves_the_arena_and_none_below_does(in_blocks: bool, has_graphs: bool) -> None:
    draw = random.Random(7)
    for _ in range(300):
        size = 1 << draw.randrange(8, 36)
        given = Budget(1, *(draw.randrange(size) for _ in range(3)), has_graphs=has_graphs)
        budget = given.split(draw.choice([0, 2 * MIB, 32 * MIB]), in_blocks=in_blocks)
        arena = draw.randrange(1, size)
        least = budget.total_for(arena)
        assert budget.within(least).arena == arena
        assert budget.within(least - 1).arena < arena


def test_graphs_take_the_64th_part_and_64_mib_at_most() -> None:
    budget = Budget(1 << 30, 0, 0, has_graphs=True).split()
    assert (budget.graphs, budget.arena) == (16 * MIB, (1 << 30) - 16 * MIB)
    assert budget.as_dict()["graphs"] == 16 * MIB
    assert budget.within(64 << 30).graphs == 64 * MIB
    assert Budget(1 << 30, 0, 0).split().as_dict()["graphs"] == 0


def test_beside_a_step_with_more_outside_the_arena_is_that_steps() -> None:
    """Also where parts of the smaller budget are smaller."""
    budget = Budget(1 << 30, 1000, 1000, has_graphs=True).split(2 * MIB, in_blocks=True)
    beside = budget.within(1 << 30, others=300 * MIB)
    assert beside.arena == (1 << 30) - 300 * MIB
    assert beside.total < 1 << 30 and beside.graphs < budget.graphs


def test_graphs_are_made_where_the_engine_can() -> None:
    assert makes_graphs(EngineOptions("cuda")) and makes_graphs(EngineOptions("cuda:1", dispatch="random"))
    assert not makes_graphs(EngineOptions())
    for refused in (
        EngineOptions("cuda", launch_graphs=False),
        EngineOptions("cuda", lookahead=0),
        EngineOptions("cuda", compute_streams=2),
        EngineOptions("cuda", dispatch="fixed"),
    ):
        assert not makes_graphs(refused)
