"""Inputs and states that the host updates between two steps: every judge accepts good plans, and none in which one is
resident, or a state's last version not at its home."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import replace

import pytest

from disco_accel.errors import PlanError, Stalled, VerifyError
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN, HOST_UPDATED, HOST_UPDATED_STATE, STATE, Traits
from disco_accel.graph.values import outlives_step
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import Shape, random_taskgraph, with_room
from tests.support.oracles.adversary import run_reference
from tests.support.oracles.naive_judge import is_safe
from tests.support.plans.host_updated_plans import HOST_UPDATED_FAULTS, host_updated_plans


@functools.cache
def plans() -> list[tuple[TaskGraph, MemGraph]]:
    return host_updated_plans(160)


def refused_by_adversary(graph: TaskGraph, plan: MemGraph, orders: int) -> bool:
    try:
        for seed in range(orders):
            run_reference(graph, plan, seed)
    except (VerifyError, Stalled):
        return True
    return False


IS_RESIDENT = "is resident, but the host renews it: each step has to reload it"
MESSAGES = dict.fromkeys(HOST_UPDATED_FAULTS, IS_RESIDENT) | {
    "host_updated_state_not_written_home": "its home does not have its last version when the step ends"
}


def test_every_judge_accepts_good_plans() -> None:
    states = 0
    for graph, plan in plans():
        states += any(vertex.traits == HOST_UPDATED_STATE for vertex in plan.vertices)
        verify(graph, plan)
        assert is_safe(graph, plan)
        assert not refused_by_adversary(graph, plan, 4)
    assert states >= 25


@pytest.mark.parametrize("name", HOST_UPDATED_FAULTS)
def test_every_judge_notices_a_planted_fault(name: str) -> None:
    """The adversary wherever a vertex of the second step, or the host, reads what the first has left."""
    rng = random.Random(7)
    planted = 0
    for graph, plan in plans():
        bad = HOST_UPDATED_FAULTS[name](plan, rng)
        if bad is None:
            continue
        planted += 1
        with pytest.raises(VerifyError, match=rf"vertex \d+ .*{MESSAGES[name]}"):
            verify(graph, bad)
        assert not is_safe(graph, bad)
        assert refused_by_adversary(graph, bad, 1)
    assert planted >= 10


@pytest.mark.parametrize("cyclic", [True, False])
def test_a_plan_made_for_frozen_inputs_is_refused_once_the_host_renews_them(cyclic: bool) -> None:
    """Only the trait differs, so nothing else can be what the judges object to. A plan that is not cyclic is run once
    by the adversary, which has no second content then."""
    refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        graph = random_taskgraph(rng, Shape(vertices=10, devices=1, inplace=0.0))
        plan = make_plan(with_room(graph, 3.0), planner="timed", cyclic=cyclic)
        graph = replace(graph, spaces=plan.devices, vertices=_host_updated(graph.vertices))
        stale = replace(plan, vertices=_host_updated(plan.vertices))
        resident = [v for v in graph.vertices if not outlives_step(v) and v.sizes[0] and (v.id, 0) in plan.slots]
        if not resident:
            verify(graph, stale)
            continue
        refused += 1
        with pytest.raises(VerifyError, match="is resident, but the host renews it"):
            verify(graph, stale)
        assert not is_safe(graph, stale)
        assert refused_by_adversary(graph, stale, 1) == cyclic
    assert refused > 20


@pytest.mark.parametrize("memory", [1.2, 3.0])
def test_a_plan_made_for_states_is_refused_once_the_host_changes_them_too(memory: float) -> None:
    """Where one is resident; other plans for states are as good for these."""
    said: Counter[bool] = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        graph = random_taskgraph(rng, Shape(vertices=10, devices=1, inputs=6, states=0.7, inplace=0.0))
        states = {vertex.id for vertex in graph.vertices if vertex.traits == STATE and vertex.sizes[0]}
        if not states:
            continue
        try:
            plan = make_plan(with_room(graph, memory), planner="timed", cyclic=True)
        except PlanError:
            continue
        graph = replace(graph, spaces=plan.devices, vertices=_host_updated(graph.vertices, STATE, HOST_UPDATED_STATE))
        other = replace(plan, vertices=_host_updated(plan.vertices, STATE, HOST_UPDATED_STATE))
        resident = any((state, 0) in plan.slots for state in states)
        said[resident] += 1
        assert is_safe(graph, other) != resident
        assert refused_by_adversary(graph, other, 2) == resident
        if resident:
            with pytest.raises(VerifyError, match=IS_RESIDENT):
                verify(graph, other)
        else:
            verify(graph, other)
        host_updated = make_plan(with_room(graph, memory), planner="timed", cyclic=True)
        assert not any((state, 0) in host_updated.slots for state in states)
        verify(replace(graph, spaces=host_updated.devices), host_updated)
    assert said[True] > 10


def test_a_kept_host_updated_input_needs_no_copy_on_the_device() -> None:
    """The host has it when the step ends."""
    weight = Vertex(0, VertexKind.INPUT, 0, sizes=(512,), traits=HOST_UPDATED, keep=True)
    kernel = Vertex(1, VertexKind.KERNEL, 0, inputs=((0, 0),), sizes=(512,))
    graph = replace(plans()[0][0], spaces=plans()[0][0].devices[:1], vertices=(weight, kernel, replace(kernel, id=2)))
    plan = make_plan(graph, memory=1024, planner="timed", cyclic=True)
    graph = replace(graph, spaces=plan.devices)
    verify(graph, plan)
    assert is_safe(graph, plan) and not refused_by_adversary(graph, plan, 3)


def _host_updated(
    vertices: tuple[Vertex, ...], before: Traits = FROZEN, host_updated: Traits = HOST_UPDATED
) -> tuple[Vertex, ...]:
    return tuple(replace(v, traits=host_updated) if v.traits == before else v for v in vertices)
