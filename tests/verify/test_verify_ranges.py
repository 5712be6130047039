"""Values in ranges of bytes: good plans pass all judges, and each planted fault is caught."""

from __future__ import annotations

import functools
import random

import pytest

from disco_accel.errors import PlanError, Stalled, VerifyError
from disco_accel.graph.copies import is_resident_range, ranged_values, swaps_in
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.simulate.simulator import simulate
from disco_accel.verify.static import verify
from tests.support.faults.range_faults import RANGE_FAULTS, ranged_plans
from tests.support.oracles.adversary import run_reference
from tests.support.oracles.naive_judge import is_safe

ADVERSARY_CANNOT_SEE = ("resident_range_of_a_copy",)
"""On tokens, what is there when a step starts has the right content whatever it is called."""


@functools.cache
def plans() -> list[tuple[TaskGraph, MemGraph]]:
    return ranged_plans(40)


def refused_by_adversary(graph: TaskGraph, plan: MemGraph, orders: int) -> bool:
    for seed in range(orders):
        try:
            run_reference(graph, plan, seed)
        except (VerifyError, Stalled, PlanError, KeyError):
            return True
    return False


def test_good_plans_pass_all_judges() -> None:
    residents = loads = 0
    for graph, plan in plans():
        verify(graph, plan)
        assert is_safe(graph, plan)
        assert not refused_by_adversary(graph, plan, 4)
        simulate(plan, steps=2 if plan.cyclic else 1)
        residents += sum(map(is_resident_range, plan.vertices))
        loads += sum(swaps_in(v) and (v.id, 0) in ranged_values(plan) for v in plan.vertices)
    assert residents > 40 and loads > 40, (residents, loads)


@pytest.mark.parametrize("name", RANGE_FAULTS)
def test_faults_are_caught(name: str) -> None:
    planted = seen = 0
    for number, (graph, plan) in enumerate(plans()):
        bad = RANGE_FAULTS[name](plan, random.Random(number))
        if bad is None:
            continue
        planted += 1
        assert not is_safe(graph, bad), number
        with pytest.raises(VerifyError):
            verify(graph, bad)
        seen += refused_by_adversary(graph, bad, 12)
    assert planted > 3
    assert seen > 0.6 * planted or name in ADVERSARY_CANNOT_SEE, (seen, planted)
