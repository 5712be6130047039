"""The gate between a step's forward and its backward: early return, late tangents, abandoned steps."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch

from disco_accel.errors import BudgetTooSmall
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.check import after_gate
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.measure.record import OpRecord
from disco_accel.plan import make_plan
from tests.execute import samples
from tests.execute.device_programs import reloading_plan
from tests.execute.programs import Builder, assert_bits, build, measured, step


@cache
def _planned(share: float) -> tuple[Builder, TaskGraph, dict[int, OpRecord], MemGraph]:
    builder = build(samples.dense)
    graph, records = measured(builder)
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(graph, memory=256, cyclic=True)
    memory = int(caught.value.needed * share) // 256 * 256
    return builder, graph, records, make_plan(graph, memory=memory, cyclic=True)


def _executor(share: float, options: EngineOptions) -> Executor:
    builder, graph, records, plan = _planned(share)
    return Executor(plan, graph.ops, records, clean=builder.clean, options=options)


def _finish(executor: Executor, inputs: Builder) -> None:
    executor.deliver(inputs.late)
    executor.wait_end()
    got = {n: executor.value(v.ref, v.spec).clone() for n, v in inputs.results.items()}
    assert_bits(got, inputs)


def _streaming(b: Builder, g: torch.Generator) -> None:
    """A loss at once, and a backward that reads three weights."""
    x = b.input(torch.randn(32, 32, generator=g))
    b.call("sum", x, out="loss")
    grad = b.call("mul.Tensor", x, b.input(torch.rand((), generator=g), late=True))
    for seed in range(3):
        grad = b.call("mm", grad, b.weight(torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))))
    b.call("tanh", grad, keep="grad")


def test_forward_returns_before_copies_for_the_backward_have_arrived() -> None:
    """wait_out comes back although no weight of the backward ever arrives."""
    builder = build(_streaming)
    graph, records = measured(builder)
    options = EngineOptions(link_latency=3600.0)
    with Executor(reloading_plan(graph), graph.ops, records, clean=builder.clean, options=options) as executor:
        executor.begin(builder.external)
        executor.wait_out()
        loss = builder.results["loss"]
        assert torch.equal(executor.value(loss.ref, loss.spec), next(iter(builder.external.values())).sum())


def test_copies_for_the_backward_go_on_while_the_tangent_is_awaited() -> None:
    """All weights are on the device before the gate opens, and nothing behind the gate starts before."""
    builder = build(_streaming)
    graph, records = measured(builder)
    behind, plan = after_gate(graph.vertices), reloading_plan(graph)
    with Executor(plan, graph.ops, records, clean=builder.clean) as executor:
        step(executor, builder)
        executor.set_tracing(True)
        inputs = build(_streaming, 1)
        (arena,) = executor._memory.devices.values()
        arena.zero_()
        executor.begin(inputs.external)
        executor.wait_out()
        loads = [v for v in plan.vertices if swaps_in(v)]
        slots = [(plan.slots[v.id, 0].offset, v.sizes[0]) for v in loads]
        assert len(slots) == 3
        while not all(arena[begin : begin + size].any() for begin, size in slots):
            time.sleep(0.001)
        _finish(executor, inputs)
        events = executor.events()
    copied = max(e.start for e in events if e.lane == "h2d")
    assert sum(e.vertex in behind for e in events) == 5
    assert all(e.start >= copied for e in events if e.vertex in behind)


@pytest.mark.parametrize("delay", [0.0, 0.1])
@pytest.mark.parametrize("dispatch", ["priority", "random", "fixed", "synchronous"])
def test_late_tangents_change_nothing(delay: float, dispatch: str) -> None:
    """A tangent delivered at once or 100 ms late gives the same bits, in every mode."""
    with _executor(1.0, EngineOptions(dispatch=dispatch, seed=5)) as executor:
        for data in range(2):
            inputs = build(samples.dense, data)
            executor.begin(inputs.external)
            executor.wait_out()
            loss = inputs.results["loss"]
            before = executor.value(loss.ref, loss.spec).clone()
            time.sleep(delay)
            assert torch.equal(executor.value(loss.ref, loss.spec), before)
            _finish(executor, inputs)


def test_a_hundred_abandoned_steps_in_a_row() -> None:
    """Dropped at the gate, mid-forward or mid-backward: the step that follows them all has eager's bits."""
    with _executor(1.0, EngineOptions(dispatch="random", seed=9, link_latency=1e-4)) as executor:
        for i in range(100):
            inputs = build(samples.dense, i % 3)
            executor.begin(inputs.external)
            if i % 3 > 0:
                executor.wait_out()
            if i % 3 > 1:
                executor.deliver(inputs.late)
            executor.abandon()
            assert not executor.running
        inputs = build(samples.dense, 7)
        assert_bits(step(executor, inputs), inputs)
