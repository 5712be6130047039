"""Kernels on a host device, which use homes: every judge accepts good plans of them, and notices each planted fault."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import replace

import pytest

from disco_accel.errors import Stalled, VerifyError
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.traits import HOST_UPDATED_STATE, MADE_FOREIGN, Traits
from disco_accel.verify.static import verify
from tests.support.faults.home_faults import HOME_FAULTS, HOME_RUN_FAULTS
from tests.support.oracles.adversary import run_reference
from tests.support.oracles.naive_judge import is_safe
from tests.support.plans.home_plans import home_plans


@functools.cache
def plans() -> list[tuple[TaskGraph, MemGraph]]:
    return home_plans(240)


def refused_by_adversary(graph: TaskGraph, plan: MemGraph, orders: int) -> bool:
    try:
        for seed in range(orders):
            run_reference(graph, plan, seed)
    except (VerifyError, Stalled):
        return True
    return False


def test_every_judge_accepts_good_plans() -> None:
    traits: Counter[Traits] = Counter()
    for graph, plan in plans():
        traits.update({vertex.traits for vertex in plan.vertices if vertex.sizes[0]})
        verify(graph, plan)
        assert is_safe(graph, plan)
        assert not refused_by_adversary(graph, plan, 4)
    assert traits[MADE_FOREIGN] >= 20 and traits[HOST_UPDATED_STATE] >= 20, (
        "the user's memory, and states host-updated there"
    )


@pytest.mark.parametrize("name", sorted(HOME_FAULTS))
def test_every_judge_notices_a_planted_fault(name: str) -> None:
    """The adversary, which draws orders by lot, most of those that an execution can show."""
    rng, planted, shown = random.Random(5), 0, 0
    for graph, plan in plans():
        bad = HOME_FAULTS[name](plan, rng)
        if bad is None:
            continue
        planted += 1
        graph = replace(graph, spaces=tuple(replace(d, memory=1 << 40) for d in graph.devices))
        with pytest.raises(VerifyError):
            verify(graph, bad)
        assert not is_safe(graph, bad)
        shown += name in HOME_RUN_FAULTS and refused_by_adversary(graph, bad, 20)
    assert planted >= 8
    assert shown > 0.6 * planted or name not in HOME_RUN_FAULTS
