"""What the step program keeps between two uses, as the drafts of the timed planner have it."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

from disco_accel.errors import PlanError
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST, Space
from disco_accel.graph.taskgraph import TaskGraph, Vertex, VertexKind
from disco_accel.graph.traits import FROZEN
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.timed.drafts import draft_of
from disco_accel.plan.timed.kept_gaps import kept_gaps
from disco_accel.plan.timed.requirements import requirements_of
from disco_accel.plan.timed.search import build_in_ranges, build_timed
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.plan.timed.step_buffers import STEP_START, StepRequirements
from disco_accel.simulate.simulator import Link, Machine
from disco_accel.verify.static import verify
from tests.support.graphs.strategies import random_taskgraph, with_working_sets
from tests.support.graphs.weight_chains import tight_chain
from tests.support.oracles.adversary import run_reference
from tests.support.plans.host_updated_plans import HOST_UPDATED_SHAPES
from tests.support.plans.state_plans import TIMED_SHAPES

MACHINE = Machine(links={TO_DEVICE: Link(1e9, 0.0), TO_HOST: Link(1e9, 0.0)})


def dip() -> TaskGraph:
    """Ten kernels with a weight each of 1000 bytes, forward and backward, and a loss between them that takes 5000."""
    vertices = [Vertex(i, VertexKind.INPUT, 0, "w", sizes=(1000,), traits=FROZEN) for i in range(10)]
    for i, weight in enumerate((*range(10), None, *reversed(range(10)))):
        before = ((9 + i, 0),) if i else ()
        reads = before if weight is None else ((weight, 0), *before)
        size = 5000 if weight is None else 10
        vertices.append(Vertex(10 + i, VertexKind.KERNEL, 0, "k", reads, (size,), 1e-6))
    return TaskGraph("dip", (Space(0, 8000, 1),), tuple(vertices))


def left_over(requirements: StepRequirements, memory: int, kept: dict[int, frozenset[int]]) -> list[int]:
    """Bytes by position that are left beside what each position needs and what is kept through it."""
    left = [memory - int(each) for each in requirements.pinned_bytes[0] + requirements.unevictable_bytes[0]]
    for buffer in requirements.swappable:
        for use in buffer.uses:
            left[use] -= buffer.block
    for i, behind in kept.items():
        buffer = requirements.swappable[i]
        for last in behind - {STEP_START}:
            until = min((use for use in buffer.uses if use > last), default=requirements.end + 1)
            for position in range(last + 1, until):
                left[position] -= buffer.block
        for position in range(buffer.uses[0] if STEP_START in behind else 0):
            left[position] -= buffer.block
    return left


def test_what_is_kept_fits_beside_what_every_kernel_needs() -> None:
    kept_at_all = 0
    for seed in range(60):
        graph = tight_chain(random.Random(seed))
        memory = graph.devices[0].memory
        for size in (None, memory // 20):
            try:
                requirements = requirements_of(graph, MACHINE, None, range_bytes=size)
            except Infeasible:
                continue
            program = kept_gaps(requirements, MACHINE, memory)
            assert program is not None
            _, kept = program
            if min(left_over(requirements, memory, {})) >= 0:
                assert min(left_over(requirements, memory, dict(kept))) >= 0
                kept_at_all += sum(map(len, kept.values()))
    assert kept_at_all > 300


def test_a_draft_with_the_programs_gaps_is_about_as_fast_as_the_program() -> None:
    """Beside the loss there is room for two weights; a draft that keeps these loads no more than one that does not."""
    graph = dip()
    requirements = requirements_of(graph, MACHINE, None)
    program = kept_gaps(requirements, MACHINE, 8000)
    assert program is not None
    seconds, kept = program
    through_loss = [i for i, behind in kept.items() if min(requirements.swappable[i].uses) in behind]
    assert len(through_loss) == 2
    draft = draft_of(requirements, MACHINE, {0: 8000}, (), kept, cyclic=True)
    assert draft.schedule.seconds <= 1.1 * seconds
    nothing_kept = draft_of(requirements, MACHINE, {0: 8000}, (), {}, cyclic=True)
    assert draft.schedule.reloaded <= nothing_kept.schedule.reloaded


def test_several_devices_have_no_program() -> None:
    vertices = (
        Vertex(0, VertexKind.KERNEL, 0, "k", (), (8,), 1.0),
        Vertex(1, VertexKind.KERNEL, 1, "k", (), (8,), 1.0),
    )
    graph = TaskGraph("two", (Space(0, 100, 1), Space(1, 100, 1)), vertices)
    assert kept_gaps(requirements_of(graph, MACHINE, None), MACHINE, 100) is None


def test_plans_with_the_programs_gaps_pass_both_judges() -> None:
    planned = 0
    for seed in range(80):
        graph = tight_chain(random.Random(seed))
        settings = TimedSettings(program_gaps_from=0, min_gap_ratios=(None,))
        try:
            plan = build_in_ranges(graph, MACHINE, 0.05, cyclic=True, work=SearchWork(), settings=settings)
        except Infeasible:
            continue
        planned += 1
        verify(graph, plan)
        run_reference(graph, plan, seed)
    assert planned > 15


def test_values_that_change_pass_both_judges_too() -> None:
    """States that a step changes, and inputs that the host updates, beside those that stay as they are."""
    planned = 0
    settings = TimedSettings(program_gaps_from=0, redrafts=2)
    for seed in range(120):
        rng = random.Random(seed)
        graph = random_taskgraph(rng, replace(rng.choice((*TIMED_SHAPES, *HOST_UPDATED_SHAPES)), devices=1))
        graph = with_working_sets(graph, rng.choice((1.1, 1.3, 1.6, 2.0)))
        with suppress(Infeasible, PlanError):
            plan = build_timed(graph, MACHINE, cyclic=rng.random() < 0.7, settings=settings)
            planned += 1
            verify(graph, plan)
            run_reference(graph, plan, seed)
    assert planned > 40
