"""States that the host changes too, between steps: each step begins with what is at home, and ends with it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from disco_accel.errors import ExecutionError, StatesTorn, VerifyError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, VertexKind
from disco_accel.graph.values import outlives_step
from disco_accel.verify.static import verify
from tests.execute.programs import build, measured, step, step_in_two
from tests.execute.state_plans import Trained, plan_of, training, weights_of
from tests.execute.test_host_updated import SCHEDULES, STEPS, planned
from tests.support.engine_faults import failing

LAYERS = 5


def _trained(memory: str, options: EngineOptions | None = None, plan: MemGraph | None = None) -> Trained:
    def planner(graph: TaskGraph, _: Sequence[int]) -> MemGraph:
        return plan or planned(graph, memory)

    return Trained(partial(training, twice=True, host_updated=True), weights_of(LAYERS), planner, options)


def _rewritten(trained: Trained, seed: int) -> None:
    """As a user's optimizer does: other values for some of the weights, at home."""
    for i, home in enumerate(trained.homes):
        if (i + seed) % 3:
            home.mul_(0.75).add_(seed / 32)
    trained.eager = [home.clone() for home in trained.homes]


@pytest.mark.parametrize("memory", ["least", "some", "all"])
def test_each_step_takes_up_what_the_host_has_and_leaves_it_there(memory: str) -> None:
    """Under each schedule: results have eager's bits, homes the last versions as soon as a step has ended, without
    store_states(); nothing is on the device when a step starts."""
    plan: MemGraph | None = None
    for options in SCHEDULES.values():
        trained = _trained(memory, options, plan)
        plan = trained.plan
        host_updated = {v.id for v in plan.vertices if not outlives_step(v)}
        assert host_updated == set(trained.states) and not host_updated & {vertex for vertex, _ in plan.slots}
        with trained.executor as executor:
            for seed in range(STEPS):
                trained.step(seed, step if seed % 2 else step_in_two)
                trained.assert_homes()
                _rewritten(trained, seed)
            executor.invalidate()
            trained.step(STEPS)
        trained.assert_homes()
    assert plan is not None
    loads, backs = (sum(map(swaps, plan.vertices)) for swaps in (swaps_in, swaps_out))
    if memory == "all":
        assert loads == backs == LAYERS
    else:
        assert loads > LAYERS, "short of memory, they come and go"


def test_an_abandoned_step_without_an_update_is_followed_by_one_with_what_the_host_has_by_then() -> None:
    """Reloads of the abandoned step, slowed down, bring nothing into the next one."""
    trained = _trained("some", EngineOptions(link_bandwidth=2e6, link_latency=1e-4))
    with trained.executor as executor:
        for seed in range(3):
            executor.begin(trained.inputs(seed).external)
            if seed:
                executor.wait_out()
            executor.abandon()
            trained.assert_homes()
            _rewritten(trained, seed)
            trained.step(seed)
            trained.assert_homes()


def test_a_step_that_fails_among_its_updates_asks_for_right_values() -> None:
    trained = _trained("all", EngineOptions(dispatch="synchronous"))
    kernels = [v for v in trained.plan.vertices if v.kind is VertexKind.KERNEL]
    updates = [op for op, kernel in enumerate(kernels) if kernel.inplace]
    with trained.executor as executor:
        trained.step(0)
        with pytest.raises(ExecutionError, match="a test asked for it"), failing(executor, updates[2]):
            step(executor, trained.inputs(1))
        with pytest.raises(StatesTorn, match=r"restore_states\(\)"):
            step(executor, trained.inputs(1))
        for home, eager in zip(trained.homes, trained.eager, strict=True):
            home.copy_(eager)
        executor.restore_states()
        trained.step(1)
        trained.assert_homes()


def test_a_plan_that_keeps_one_on_the_device_is_refused() -> None:
    """One that is made for states that the host leaves alone would compute with those of the step before."""
    builder = build(training(weights_of(LAYERS), host_updated=True))
    graph, records = measured(builder)
    plan = plan_of(graph, resident=list(builder.states))
    with pytest.raises(VerifyError, match="is resident, but the host renews it"):
        verify(replace(graph, spaces=plan.devices), plan)
    with pytest.raises(ExecutionError, match=r"has input 1 on the device when a step starts, but the host renews it"):
        Executor(plan, graph.ops, records, clean={}, states=builder.states)
