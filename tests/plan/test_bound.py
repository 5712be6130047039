"""The bound of a cyclic plan: exact where it can be worked out by hand, and never above what a plan takes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.planner.bound_hunt import PARTS, trials
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.carried_values import taskgraph_of
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST, Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN, LATE, PER_STEP
from disco_accel.plan import make_plan
from disco_accel.plan.bound.device_facts import DeviceFacts
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.bound.ordered_starts import Precedence
from disco_accel.plan.bound.step_program import StepProgram
from disco_accel.plan.summary import swapped_bytes
from disco_accel.simulate.simulator import Link, Machine, simulate
from tests.support.graphs.strategies import Shape, random_taskgraph, with_working_sets
from tests.support.oracles.naive_schedules import random_chain, shortest_step

MACHINE = Machine(links={TO_DEVICE: Link(1000.0, 0.0), TO_HOST: Link(1000.0, 0.0)})


def ring(weights: int, memory: int, seconds: float) -> TaskGraph:
    """One kernel after another, each with a weight of 1000 bytes and a result of no size."""
    vertices = [Vertex(i, VertexKind.INPUT, 0, "w", sizes=(1000,), traits=FROZEN) for i in range(weights)]
    for i in range(weights):
        before = ((weights + i - 1, 0),) if i else ()
        vertices.append(Vertex(weights + i, VertexKind.KERNEL, 0, "k", ((i, 0), *before), (0,), seconds))
    return TaskGraph("ring", (Space(0, memory, 1),), tuple(vertices))


def test_a_ring_of_weights_loads_what_does_not_fit() -> None:
    """Ten weights, room for four: three can stay through everything, and one place is always that of the kernel."""
    bound = bound_of(ring(10, 4000, 0.5), MACHINE)
    assert bound.compute == pytest.approx(5.0) == bound.critical_path
    # Each of the ten gaps spans nine kernels, at each of which three weights fit beside the one that is read.
    assert bound.lp_reload_bytes == pytest.approx(10_000 - 10 * 3_000 / 9, abs=1)
    assert bound.link == pytest.approx(bound.lp_reload_bytes / 1000, abs=1e-3)
    # While a kernel runs its weight takes a place of the four, so that the link stands still at times.
    assert bound.bound == bound.phases > bound.link


def test_what_follows_the_gate_takes_turns_behind_all_that_comes_before() -> None:
    """Two seconds elsewhere before the loss's kernel, of one second, and two of one second each behind the gate: no
    chain is longer than four, no device busy for longer than three."""
    quiet, busy = Space(0, 1000, 1), Space(1, 1000, 1)
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
    early = replace(graph, vertices=(*vertices[:2], replace(vertices[2], traits=PER_STEP), *vertices[3:]))
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
        machine = Machine(links={TO_DEVICE: Link(1e7, 1e-6), TO_HOST: Link(1e7, 1e-6)})
        try:
            plan = make_plan(graph, cyclic=True, planner=planner, machine=machine)
        except BudgetTooSmall:
            continue
        bound = bound_of(taskgraph_of(plan), machine)
        judged += bound.lp_reload_bytes > 0
        assert swapped_bytes(plan, swaps_in) >= bound.lp_reload_bytes - 1
        assert simulate(plan, machine).makespan >= max(bound.link, bound.critical_path) * (1 - 1e-9)
    assert judged > 10


def test_no_schedule_of_a_small_chain_beats_the_bound() -> None:
    """All schedules are tried. The bound is theirs for many chains, for some by the program over time alone."""
    machine = Machine(links={TO_DEVICE: Link(1.0, 0.0), TO_HOST: Link(1.0, 0.0)})
    equal = by_phases = 0
    for seed in range(24):
        chain = random_chain(random.Random(seed))
        least, bound = shortest_step(chain), bound_of(chain.graph, machine)
        assert bound.bound <= least * (1 + 1e-9), f"seed {seed}"
        equal += bound.bound >= least * (1 - 1e-9)
        by_phases += least * (1 - 1e-9) <= bound.phases > max(bound.compute, bound.link) * (1 + 1e-9)
    assert equal > 10 and by_phases > 2


def test_small_values_count() -> None:
    """A hundred values of which each is a five thousandth of the memory, and one that takes all but what they do."""
    small = [Vertex(i, VertexKind.INPUT, 0, "w", sizes=(200,), traits=FROZEN) for i in range(100)]
    large = Vertex(100, VertexKind.INPUT, 0, "w", sizes=(990_000,), traits=FROZEN)
    kernels = [Vertex(101, VertexKind.KERNEL, 0, "k", ((100, 0),), (0,), 0.5)]
    for i in range(100):
        kernels.append(Vertex(102 + i, VertexKind.KERNEL, 0, "k", ((i, 0), (101 + i, 0)), (0,), 0.0))
    graph = TaskGraph("small", (Space(0, 1_000_000, 1),), (*small, large, *kernels))
    assert bound_of(graph, MACHINE).lp_reload_bytes == pytest.approx(10_000, rel=0.03)


def test_a_large_kernel_is_a_mark_beside_a_larger_one() -> None:
    """Two large kernels side by side among a thousand small ones: the program in 16 starts says what it says in all."""
    sizes = [990_000 if i in (501, 502) else 100_000 if i in (500, 503) else 100 for i in range(1000)]
    inputs = [Vertex(i, VertexKind.INPUT, 0, "w", sizes=(size,), traits=FROZEN) for i, size in enumerate(sizes)]
    kernels = [Vertex(1000, VertexKind.KERNEL, 0, "k", ((0, 0),), (0,), 0.4)]
    for i in range(1, 1000):
        kernels.append(Vertex(1000 + i, VertexKind.KERNEL, 0, "k", ((i, 0), (999 + i, 0)), (0,), 0.4))
    graph = TaskGraph("pair", (Space(0, 1_000_000, 1),), (*inputs, *kernels))
    facts, precedence = DeviceFacts(graph, MACHINE, 0, 1_000_000), Precedence.of(graph, MACHINE)
    few, all_of_them = (StepProgram(facts, precedence, most).seconds() for most in (16, 5000))
    assert few > 2000 and few == pytest.approx(all_of_them, rel=0.01)


def test_kernels_may_run_in_another_order_than_the_serial_one() -> None:
    """What the serial order costs is no part of the bound where no kernel depends on another."""
    graph = ring(10, 4000, 0.5)
    free = replace(graph, vertices=tuple(replace(v, inputs=v.inputs[:1]) for v in graph.vertices))
    assert bound_of(free, MACHINE).phases < bound_of(graph, MACHINE).phases


def test_ranges_loaded_for_the_next_step_are_one_copy_only_where_they_lie_side_by_side() -> None:
    """Two ranges of a weight that no kernel reads again have places of their own: one copy of both would lie outside
    the memory."""
    assert len(list(trials(2101))) == 2


def test_no_run_of_a_plan_beats_a_part_of_the_bound() -> None:
    """In the order of the list, of readiness and at random; a further step too. Each part is the largest somewhere."""
    largest = dict.fromkeys(PARTS, 0)
    for seed in range(50):
        for trial in trials(seed):
            assert not list(trial.beaten())
            for part in PARTS:
                largest[part] += getattr(trial.bound, part) >= trial.bound.bound * (1 - 1e-9) > 0
    assert all(largest.values()), largest
