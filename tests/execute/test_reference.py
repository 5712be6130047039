"""The dynamic judge: good plans run in any order, and wrong data or a deadlock does not go unnoticed."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from disco_accel.errors import Stalled, VerifyError
from disco_accel.graph.memgraph import MemGraph, Slot
from disco_accel.graph.spaces import Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN, LATE_FOREIGN
from tests.support.faults.faults import FAULTS
from tests.support.oracles.adversary import run_reference
from tests.support.plans.plans import tight_plans


@functools.cache
def plans() -> list[tuple[TaskGraph, MemGraph]]:
    return tight_plans(120, first_seed=10_000)


@pytest.mark.parametrize("name", ["drop_data_edge", "drop_memory_edge", "reload_other_value", "share_host_address"])
def test_some_order_shows_a_planted_fault(name: str) -> None:
    """One random order may miss a missing edge, twenty find most of them."""
    rng = random.Random(7)
    planted = caught = 0
    for graph, plan in plans():
        bad = FAULTS[name](plan, rng)
        if bad is None or bad == plan:
            continue
        planted += 1
        try:
            for seed in range(20):
                run_reference(graph, bad, seed)
        except (VerifyError, Stalled):
            caught += 1
    assert planted >= 5
    assert caught >= 0.6 * planted, f"{name}: {caught} of {planted}"


def test_a_cycle_is_a_stall() -> None:
    caught = 0
    for graph, plan in plans():
        bad = FAULTS["close_a_cycle"](plan, random.Random(1))
        if bad is not None:
            with pytest.raises(Stalled):
                run_reference(graph, bad, 0)
            caught += 1
    assert caught >= 50


def test_a_resident_that_is_not_back_spoils_the_second_step() -> None:
    vertices = (
        Vertex(0, VertexKind.INPUT, 0, "w", sizes=(256,), traits=FROZEN),
        Vertex(1, VertexKind.KERNEL, 0, "a", ((0, 0),), (256,)),
        Vertex(2, VertexKind.KERNEL, 0, "b", ((1, 0),), (256,)),
    )
    graph = TaskGraph("g", (Space(0, 512),), vertices)
    slots = {(0, 0): Slot(0, 0), (1, 0): Slot(0, 256), (2, 0): Slot(0, 0)}
    plan = MemGraph("g", graph.devices, vertices, slots, ((1, 2),), ())
    run_reference(graph, plan, 0)
    with pytest.raises(VerifyError, match="not back"):
        run_reference(graph, replace(plan, cyclic=True), 0)


def test_late_values_arrive_only_when_everything_is_handed_out() -> None:
    vertices = (
        Vertex(0, VertexKind.INPUT, 0, "tangent", sizes=(4,), traits=LATE_FOREIGN),
        Vertex(1, VertexKind.KERNEL, 0, "loss", (), (256,), out=True),
        Vertex(2, VertexKind.KERNEL, 0, "grad", ((0, 0),), (256,), keep=True),
    )
    graph = TaskGraph("g", (Space(0, 512),), vertices)
    slots = {(1, 0): Slot(0, 0), (2, 0): Slot(0, 0)}
    plan = MemGraph("g", graph.devices, vertices, slots, ((0, 2),), ())
    for seed in range(20):
        run_reference(graph, plan, seed)
    with pytest.raises(Stalled):
        run_reference(graph, replace(plan, memory_edges=((2, 1),)), 0)


def test_a_kept_value_must_be_left_somewhere() -> None:
    vertices = (
        Vertex(0, VertexKind.KERNEL, 0, "a", (), (256,), keep=True),
        Vertex(1, VertexKind.KERNEL, 0, "b", ((0, 0),), (256,)),
        Vertex(2, VertexKind.KERNEL, 0, "c", ((1, 0),), (256,)),
    )
    graph = TaskGraph("g", (Space(0, 512),), vertices)
    slots = {(0, 0): Slot(0, 0), (1, 0): Slot(0, 256), (2, 0): Slot(0, 0)}
    with pytest.raises(VerifyError, match="must be kept"):
        run_reference(graph, MemGraph("g", graph.devices, vertices, slots, ((0, 1), (1, 2)), ()), 0)
