"""The bound of any plan is the bound of the kernels that were measured, in the step's arena."""

from __future__ import annotations

import pytest

from benchmarks.common.any_plan import any_plan_of, kernel_seconds
from benchmarks.common.subjects import Pair, Shape
from benchmarks.engine.suite import any_plan_seconds
from disco_accel import DiscoConfig
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.plan.summary import swapped_bytes
from disco_accel.simulate.simulator import Link, Machine


@pytest.fixture(scope="module")
def pair() -> Pair:
    config = DiscoConfig(memory_budget=3 << 19, compute_threads=1, link_bandwidth=1e8, planner="build", plan_cache=None)
    return Pair(Shape(hidden=128, layers=2, tokens=16), config)


def test_every_kernel_of_a_step_is_measured(pair: Pair) -> None:
    """And the steps after it are not traced."""
    seconds = kernel_seconds(pair.step, lambda: pair.run(pair.planned))
    assert seconds.keys() == {v.id for v in pair.step.graph.vertices if v.kind is VertexKind.KERNEL}
    assert all(value > 0 for value in seconds.values())
    pair.run(pair.planned)
    assert not pair.step.executor.events()


def test_slow_kernels_rule_the_bound_and_fast_ones_leave_it_to_the_link(pair: Pair) -> None:
    link = Machine(links={TO_DEVICE: Link(1e8, 0.0), TO_HOST: Link(1e8, 0.0)})
    kernels = [v.id for v in pair.step.graph.vertices if v.kind is VertexKind.KERNEL]
    assert any_plan_of(pair.step, dict.fromkeys(kernels, 1.0), link) == pytest.approx(len(kernels))
    least = any_plan_of(pair.step, dict.fromkeys(kernels, 0.0), link)
    assert 0 < least <= swapped_bytes(pair.step.plan, swaps_in) / 1e8
    assert any_plan_of(
        pair.step, dict.fromkeys(kernels, 0.0), Machine(links={TO_DEVICE: Link(5e7, 0.0)})
    ) == pytest.approx(2 * least)


def test_kernels_as_recorded_give_the_bound_of_the_other_benchmarks(pair: Pair) -> None:
    recorded = {v.id: v.duration or 0.0 for v in pair.step.graph.vertices}
    machine = Machine(links={TO_DEVICE: Link(1e8, 0.0), TO_HOST: Link(1e8, 0.0)})
    expected = any_plan_seconds(pair, 1e8, pair.step.compute_seconds)
    assert any_plan_of(pair.step, recorded, machine) == pytest.approx(expected)
