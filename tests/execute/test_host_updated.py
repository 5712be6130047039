"""Weights that the host updates between two steps: a step computes with what the host has when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from disco_accel.errors import BudgetTooSmall, ExecutionError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.graph.traits import FROZEN, HOST_UPDATED
from disco_accel.graph.values import outlives_step
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.execute.programs import Builder, Program, Value, assert_bits, build, bump_plan, measured, step, step_in_two
from tests.execute.state_plans import RATE, ROWS, WIDTH, weights_of

STEPS = 4
LAYERS = 5
SCHEDULES = {
    "priority": EngineOptions(),
    "random": EngineOptions(dispatch="random", seed=1, lookahead=4, compute_streams=2),
    "fixed": EngineOptions(dispatch="fixed"),
    "throttled": EngineOptions(link_bandwidth=20e6, link_latency=1e-5),
}


def gradients(weights: Sequence[torch.Tensor]) -> Program:
    """Forward, gate and backward of a chain over ``weights``, every other of which is frozen; the gradient of each
    host-updated one is kept, as ``g<i>``."""

    def program(b: Builder, g: torch.Generator) -> None:
        hidden = [b.input(torch.randn(ROWS, WIDTH, generator=g))]
        values = [b.weight(weight) if i % 2 else b.host_updated(weight) for i, weight in enumerate(weights)]
        for value in values:
            hidden.append(b.call("tanh", b.call("mm", hidden[-1], value)))
        b.call("sum", hidden[-1], out="loss")
        grad: Value = b.call("mul.Tensor", hidden[-1], b.input(torch.rand((), generator=g) + 0.5, late=True))
        for i in reversed(range(len(values))):
            if not i % 2:
                b.call("mm", hidden[i].view(lambda t: t.t()), grad, keep=f"g{i}")
            grad = b.call("mm", grad, values[i].view(lambda t: t.t()))

    return program


def planned(graph: TaskGraph, memory: str) -> MemGraph:
    """In the ``least`` memory, in that and ``some`` of the weights', or in memory where ``all`` values have places."""
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(graph, memory=256, planner="timed", cyclic=True)
    least = caught.value.needed
    nbytes = {"least": least, "some": least + 2048, "all": bump_plan(graph).devices[0].memory}[memory]
    # The same plan on any machine, at any time.
    timeless = replace(graph, vertices=tuple(replace(v, duration=v.duration and 1e-5) for v in graph.vertices))
    plan = make_plan(timeless, memory=nbytes, planner="timed", cyclic=True)
    verify(replace(timeless, spaces=plan.devices), plan)
    return plan


@pytest.mark.parametrize("memory", ["least", "some", "all"])
@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_each_step_computes_with_what_the_host_has_when_it_begins(options: EngineOptions, memory: str) -> None:
    """The host overwrites the weights as soon as a step has ended, first with NaN and then by a step of SGD: the bits
    of eager execution in every step, and a reload of every host-updated weight in each."""
    weights = weights_of(LAYERS)
    builder = build(gradients(weights))
    graph, records = measured(builder)
    plan = planned(graph, memory)
    host_updated = {v.id for v in plan.vertices if not outlives_step(v)}
    reloads = [v.inputs[0][0] for v in plan.vertices if swaps_in(v)]
    assert host_updated <= set(reloads) and not host_updated & {vertex for vertex, _ in plan.slots}
    if memory == "all":
        assert sorted(reloads) == sorted(host_updated), "nothing else is reloaded, and these once"
    with Executor(plan, graph.ops, records, clean=builder.clean, options=options) as executor:
        for seed in range(STEPS):
            inputs = build(gradients(weights), seed)
            newer = [weight.clone() for weight in weights]
            results = (step if seed % 2 else step_in_two)(executor, inputs)
            for i in range(0, LAYERS, 2):
                weights[i].fill_(torch.nan)
                newer[i] -= RATE * inputs.results[f"g{i}"].tensor
            assert_bits(results, inputs)
            for i in range(0, LAYERS, 2):
                weights[i].copy_(newer[i])
            nbytes = sum(v.sizes[0] for v in plan.vertices if swaps_in(v))
            residents = [v for v in plan.vertices if v.id in builder.clean and (v.id, 0) in plan.slots]
            loads = sum(v.sizes[0] for v in residents) if seed == 0 else 0
            assert executor.counters()["reload_bytes"] == nbytes + loads


def test_a_step_after_an_abandoned_one_computes_with_what_the_host_has_by_then() -> None:
    """Reloads of the abandoned step, slowed down, bring nothing into the next one, which loads all of them anew."""
    weights = weights_of(LAYERS)
    builder = build(gradients(weights))
    graph, records = measured(builder)
    plan = planned(graph, "some")
    options = EngineOptions(link_bandwidth=2e6, link_latency=1e-4)
    with Executor(plan, graph.ops, records, clean=builder.clean, options=options) as executor:
        for seed in range(2):
            executor.begin(build(gradients(weights), seed).external)
            executor.abandon()
            for weight in weights[::2]:
                weight.mul_(0.5)
            inputs = build(gradients(weights), seed)
            assert_bits(step(executor, inputs), inputs)


def test_a_plan_that_keeps_a_host_updated_weight_on_the_device_is_refused() -> None:
    """It was made for frozen weights: after the first step it would compute with those of the step before."""
    weights = weights_of(LAYERS)
    builder = build(gradients(weights))
    graph, records = measured(builder)
    frozen = tuple(replace(v, traits=FROZEN) if v.traits == HOST_UPDATED else v for v in graph.vertices)
    plan = make_plan(replace(graph, vertices=frozen), memory=1 << 20, planner="timed", cyclic=True)
    traits = {v.id: v.traits for v in graph.vertices}
    stale = replace(plan, vertices=tuple(replace(v, traits=traits.get(v.id, v.traits)) for v in plan.vertices))
    with pytest.raises(ExecutionError, match=r"has input 1 on the device when a step starts, but the host renews it"):
        Executor(stale, graph.ops, records, clean=builder.clean)
