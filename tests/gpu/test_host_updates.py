"""Optimizers on a device in host memory, beside the run's device: weights and moments change at their homes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from disco_accel.errors import ExecutionError, StatesTorn
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.execute.host_programs import FORMS, HOST, Homes, HostBuilder, HostRun
from tests.execute.programs import assert_bits, measured, step
from tests.support.engine_faults import failing, kernels

STEPS = 4


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("form", FORMS)
def test_steps_have_the_bits_of_eager_training(device: torch.device, form: str, pinned: bool) -> None:
    """Results, weights, moments and counts after each step, in the least memory and with room for all."""
    for memory, options in (
        ("least", EngineOptions(device=str(device))),
        ("all", EngineOptions(device=str(device), dispatch="random", seed=2, lookahead=3)),
    ):
        homes = Homes.pinned(device) if pinned else Homes()
        with HostRun(FORMS[form], memory, options, homes) as run:
            for seed in range(STEPS):
                run.step(seed)
                run.assert_homes()


def test_copies_take_the_lanes_of_the_device(device: torch.device) -> None:
    options = EngineOptions(device=str(device))
    with HostRun(FORMS["tail"], "least", options, Homes.pinned(device)) as run:
        run.executor.set_tracing(True)
        run.step(0)
        events = run.executor.events()
        seconds = run.executor.counters()["step_seconds"]
    assert {(e.device, e.lane) for e in events} == {(0, "compute0"), (0, "d2h"), (0, "h2d"), (HOST, "compute0")}
    assert all(e.start <= e.end <= seconds for e in events)
    producers = {v.id: [ref[0] for ref in v.inputs] for v in run.plan.vertices}
    ends = {e.vertex: e.end for e in events}
    host = [e for e in events if e.device == HOST]
    # What another stream has made is booked by events, to the microsecond at best.
    assert all(e.start >= ends[p] - 1e-3 for e in host for p in producers[e.vertex] if p in ends)


def _exchange(seed: int, device: torch.device) -> HostBuilder:
    b = HostBuilder(device=device)
    x = b.on_host(b.input, torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)))
    b.on_host(b.call, "logsumexp", x, [1], keep="sums")
    normed = b.on_host(b.call, "native_layer_norm", x, [8], None, None, 1e-5)[0]
    there = b.call("tanh", b.transfer(normed, 0), keep="there")
    b.call("mul.Tensor", b.transfer(x, 0), there, keep="product")
    b.on_host(b.call, "exp", b.transfer(there, HOST), keep="back")
    return b


def test_ops_of_both_kinds_allocate_where_the_plan_says(device: torch.device) -> None:
    """Temporaries and results of ops on the host come from the host's arena, and values go both ways."""
    graph, records = measured(_exchange(0, device))
    plan = make_plan(graph, memory=1024, planner="timed", cyclic=True)
    verify(replace(graph, spaces=plan.devices), plan)
    with Executor(plan, graph.ops, records, clean={}, options=EngineOptions(device=str(device))) as executor:
        for seed in range(STEPS):
            inputs = _exchange(seed, device)
            assert_bits(step(executor, inputs), inputs)
        assert executor.counters()["c10_allocations"] == 0


def test_an_input_of_the_host_device_is_a_cpu_tensor(cuda: torch.device) -> None:
    first = _exchange(0, cuda)
    graph, records = measured(first)
    plan = make_plan(graph, memory=1024, planner="timed", cyclic=True)
    with Executor(plan, graph.ops, records, clean={}, options=EngineOptions(device=str(cuda))) as executor:
        wrong = {vertex: tensor.to(cuda) for vertex, tensor in first.external.items()}
        with pytest.raises(ExecutionError, match="is on cuda:0, the plan has it on cpu"):
            executor.begin(wrong)
        assert_bits(step(executor, first), first)


def test_a_step_that_fails_during_its_updates_leaves_states_torn(device: torch.device) -> None:
    """Each kernel of the second step fails in turn; with right values in the homes training goes on."""
    options = EngineOptions(device=str(device), dispatch="synchronous")
    with HostRun(FORMS["tail"], "least", options, Homes.pinned(device)) as run:
        vertices = {v.id: v for v in run.plan.vertices}
        ordered = kernels(run.plan)
        for seed, op in enumerate(range(0, len(ordered), 3)):
            run.step(seed)
            with pytest.raises(ExecutionError, match="a test asked for it"), failing(run.executor, op):
                run.begin(seed + 1)
                run.executor.wait_end()
            if any(vertices[kernel].inplace for kernel in ordered[: op + 1]):
                with pytest.raises(StatesTorn, match=r"begun to change .*restore_states\(\)"):
                    run.begin(seed + 1)
                run.restore()
        run.step(len(ordered))
        run.assert_homes()
