"""The bound of a cyclic plan: exact where it can be worked out by hand, and never above what a plan takes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.carried_values import taskgraph_of
from disco_accel.graph.taskgraph import Device, TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import BROUGHT, FROZEN, LATE
from disco_accel.plan import make_plan
from disco_accel.plan.bound import bound_of
from disco_accel.plan.summary import copied_bytes
from disco_accel.simulate.simulator import Link, Machine, simulate
from disco_accel.testing.strategies import Shape, random_taskgraph, with_working_sets

MACHINE = Machine(h2d=Link(1000.0, 0.0), d2h=Link(1000.0, 0.0))


def ring(weights: int, memory: int, seconds: float) -> TaskGraph:
    """One kernel after another, each with a weight of 1000 bytes and a result of no size."""
    vertices = [Vertex(i, VertexKind.INPUT, 0, "w", sizes=(1000,), traits=FROZEN) for i in range(weights)]
    for i in range(weights):
        before = ((weights + i - 1, 0),) if i else ()
        vertices.append(Vertex(weights + i, VertexKind.KERNEL, 0, "k", ((i, 0), *before), (0,), seconds))
    return TaskGraph("ring", (Device(0, memory, 1),), tuple(vertices))


def test_a_ring_of_weights_loads_what_does_not_fit() -> None:
    """Ten weights, room for four: three can stay through everything, and one place is always that of the kernel."""
    bound = bound_of(ring(10, 4000, 0.5), MACHINE)
    assert bound.compute == pytest.approx(5.0) == bound.critical_path
    # Each of the ten gaps spans nine kernels, at each of which three weights fit beside the one that is read.
    assert bound.lp_reload_bytes == pytest.approx(10_000 - 10 * 3_000 / 9, abs=1)
    assert bound.bound == pytest.approx(bound.link)


def test_what_follows_the_gate_takes_turns_behind_all_that_comes_before() -> None:
    """Two seconds elsewhere before the loss's kernel, of one second, and two of one second each behind the gate: no
    chain is longer than four, no device busy for longer than three."""
    quiet, busy = Device(0, 1000, 1), Device(1, 1000, 1)
    vertices = (
        Vertex(0, VertexKind.KERNEL, 1, "update", (), (0,), 2.0),
        Vertex(1, VertexKind.KERNEL, 0, "loss", (), (0,), 1.0, after=(0,), out=True),
        Vertex(2, VertexKind.INPUT, 0, "tangent", sizes=(8,), traits=LATE),
        *(Vertex(3 + i, VertexKind.KERNEL, 0, "k", ((2, 0),), (0,), 1.0) for i in range(2)),
    )
    graph = TaskGraph("gate", (quiet, busy), vertices)
    assert bound_of(graph, MACHINE).bound == pytest.approx(5.0)
    both = replace(MACHINE, compute_streams=2)
    assert bound_of(graph, both).bound == pytest.approx(4.0)
    early = replace(graph, vertices=(*vertices[:2], replace(vertices[2], traits=BROUGHT), *vertices[3:]))
    assert bound_of(early, MACHINE).bound == pytest.approx(3.0)


def test_with_room_for_everything_compute_is_the_bound() -> None:
    bound = bound_of(ring(10, 10_000, 0.5), MACHINE)
    assert (bound.lp_reload_bytes, bound.bound) == (0, pytest.approx(5.0))


@pytest.mark.parametrize("planner", ["build", "timed"])
def test_no_plan_of_a_random_graph_beats_the_bound(planner: str) -> None:
    """The link's part is the bytes that have to come back, so those of the plan are no fewer either.

    The bound is that of the order the plan has: the timed planner may have found a better one than the graph's.
    """
    judged = 0
    for seed in range(120):
        rng = random.Random(seed)
        graph = with_working_sets(random_taskgraph(rng, Shape(devices=1, keep=0.0)), rng.choice((1.2, 1.5, 2.0)))
        machine = Machine(h2d=Link(1e7, 1e-6), d2h=Link(1e7, 1e-6))
        try:
            plan = make_plan(graph, cyclic=True, planner=planner, machine=machine)
        except BudgetTooSmall:
            continue
        bound = bound_of(taskgraph_of(plan), machine)
        judged += bound.lp_reload_bytes > 0
        assert copied_bytes(plan, VertexKind.RELOAD) >= bound.lp_reload_bytes - 1
        assert simulate(plan, machine).makespan >= max(bound.link, bound.critical_path) * (1 - 1e-9)
    assert judged > 10


PARTS = ("compute", "link", "critical_path", "phases")


def tight_chain(rng: random.Random) -> TaskGraph:
    """A chain of kernels over weights that do not fit, so that every part of the bound has something to say."""
    count = rng.randint(3, 16)
    align = 64
    vertices = [
        Vertex(i, VertexKind.INPUT, 0, "w", sizes=(rng.randint(1, 40) * align,), traits=FROZEN) for i in range(count)
    ]
    last: tuple[tuple[int, int], ...] = ()
    for i in range(count + rng.randint(0, count)):
        reads = ((rng.randrange(count) if i >= count else i, 0), *last)
        seconds = rng.choice((1e-6, 1e-4, 3e-4))
        vertices.append(Vertex(len(vertices), VertexKind.KERNEL, 0, "k", reads, (rng.randint(0, 8) * align,), seconds))
        last = ((vertices[-1].id, 0),)
    vertices[-1] = replace(vertices[-1], keep=True)
    graph = with_working_sets(
        TaskGraph("chain", (Device(0, 1, align),), tuple(vertices)), rng.choice((1.3, 1.8, 2.5, 4.0))
    )
    return graph


@pytest.mark.parametrize("planner", ["build", "timed"])
def test_no_part_of_the_bound_is_above_a_repeating_plan(planner: str) -> None:
    """On the makespan of one cyclic step, and on what each further of several steps takes. Each part is the largest
    somewhere, so that none goes untested."""
    largest = dict.fromkeys(PARTS, 0)
    for seed in range(45):
        rng = random.Random(seed)
        if rng.random() < 0.4:
            graph = with_working_sets(random_taskgraph(rng, Shape(keep=0.05)), rng.choice((1.5, 2.0, 4.0)))
        else:
            graph = tight_chain(rng)
        bandwidth = rng.choice((3e6, 1e7, 1e9))
        machine = Machine(h2d=Link(bandwidth, 1e-6), d2h=Link(bandwidth, 1e-6))
        try:
            plan = make_plan(graph, cyclic=True, planner=planner, machine=machine)
        except BudgetTooSmall:
            continue
        bound = bound_of(taskgraph_of(plan), machine)
        makespan = simulate(plan, machine).makespan
        for part in PARTS:
            assert getattr(bound, part) <= makespan * (1 + 1e-9), f"seed {seed}: {part}"
            largest[part] += bound.bound > 0 and getattr(bound, part) >= bound.bound * (1 - 1e-9)
    assert all(largest.values()), largest
