"""Plans with an optimizer on a device in host memory: weights and moments change at their homes, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from disco_accel.errors import ConfigError, ExecutionError, StatesTorn
from disco_accel.execute.engine_options import threads_beside
from disco_accel.execute.executor import EngineOptions, Executor, arena_bytes
from disco_accel.graph import spaces
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.home_uses import HomeUses
from disco_accel.native.arena import host_arena
from disco_accel.plan import make_plan
from disco_accel.verify.static import verify
from tests.execute.host_programs import FORMS, HOST, LAYERS, HostBuilder, HostRun
from tests.execute.programs import assert_bits, measured, step
from tests.support.engine_faults import failing, kernels

SCHEDULES = {
    "priority": EngineOptions(),
    "random": EngineOptions(dispatch="random", seed=1, lookahead=4, compute_streams=2),
    "fixed": EngineOptions(dispatch="fixed"),
    "synchronous": EngineOptions(dispatch="synchronous"),
    "throttled": EngineOptions(link_bandwidth=20e6, link_latency=1e-5, host_threads=2),
}
STEPS = 4


@pytest.mark.parametrize("memory", ["least", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_steps_have_the_bits_of_eager_training(form: str, memory: str) -> None:
    """Results, weights, moments and counts after each step, under each schedule; the op allocates nothing."""
    for options in SCHEDULES.values():
        with HostRun(FORMS[form], memory, options) as run:
            for seed in range(STEPS):
                run.step(seed)
                run.assert_homes()
            assert run.executor.counters()["c10_allocations"] == 0


def test_the_comparison_notices_a_wrong_update() -> None:
    with HostRun(FORMS["tail"]) as run:
        run.step(0)
        run.homes.squares[1][3, 3] *= 2
        with pytest.raises(AssertionError, match="w1"):
            run.step(1)


@pytest.mark.parametrize("form", FORMS)
def test_states_lie_at_their_homes_alone(form: str) -> None:
    """The host device has no place for a state, a value is its home, and each update counts as a change."""
    with HostRun(FORMS[form], "all") as run:
        states = HomeUses.of(run.graph)
        assert len(states.written) == LAYERS * (3 * FORMS[form].pieces + 1)
        assert not any(slot.space == HOST and ref in states.homes for ref, slot in run.plan.slots.items())
        run.step(0)
        for i, last in enumerate(run.training.last):
            assert run.executor.value(last.ref, last.spec).data_ptr() == run.homes.weights[i].data_ptr()
        counters = run.executor.counters()
        assert counters["changes"] == LAYERS * (FORMS[form].pieces + 1)
        moved = sum(v.sizes[0] for v in run.plan.vertices if is_transfer(v))
        assert counters["offload_bytes"] == moved, "gradients alone go to the host"
        assert counters["arena_bytes"] == arena_bytes(run.plan) == arena_bytes(run.plan, 0)
        assert counters["host_bytes"] == arena_bytes(run.plan, HOST)


def test_updates_and_copies_are_on_lanes_of_their_own() -> None:
    """Gradients go out on the device's d2h lane; updates run on the host device; reloads come in after them."""
    with HostRun(FORMS["tail"], "all") as run:
        run.executor.set_tracing(True)
        run.step(0)
        events = {event.vertex: event for event in run.executor.events()}
    vertices = {vertex.id: vertex for vertex in run.plan.vertices}
    lanes = {(vertices[v].source, vertices[v].space, event.device, event.lane) for v, event in events.items()}
    assert lanes == {
        (spaces.HOST, 0, 0, "compute0"),
        (spaces.HOST, HOST, HOST, "compute0"),
        (0, HOST, 0, "d2h"),
        (spaces.HOST, 0, 0, "h2d"),
    }


@pytest.mark.parametrize("form", ["tail", "head in pieces"])
def test_a_failure_before_any_update_leaves_states_whole_and_one_later_does_not(form: str) -> None:
    """Each kernel in turn fails in the second step. The next step goes on if no update was launched, and is refused
    otherwise until right values are in the homes."""
    with HostRun(FORMS[form], options=EngineOptions(dispatch="synchronous")) as run:
        vertices = {v.id: v for v in run.plan.vertices}
        ordered = kernels(run.plan)
        torn, seed = 0, 0
        for op in range(len(ordered)):
            run.step(seed)
            with pytest.raises(ExecutionError, match="a test asked for it"), failing(run.executor, op):
                run.begin(seed + 1)
                run.executor.wait_end()
            if any(vertices[kernel].inplace for kernel in ordered[: op + 1]):
                torn += 1
                with pytest.raises(StatesTorn, match=r"begun to change .*restore_states\(\)"):
                    run.begin(seed + 1)
                run.restore()
            seed += 1
            run.step(seed)
            run.assert_homes()
            seed += 1
        assert 0 < torn < len(ordered) or (torn == len(ordered) - 1 and FORMS[form].head)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_dropped_after_an_update_is_torn(form: str) -> None:
    """Its caller takes it for not done, even if it has ended."""
    with HostRun(FORMS[form]) as run:
        run.step(0)
        run.begin(1)
        while run.executor._engine.wait_end(0.1) != 0:
            pass
        run.executor.abandon()
        with pytest.raises(StatesTorn, match="begun to change"):
            run.begin(1)
        run.restore()
        run.step(1)
        run.assert_homes()


def _exchange(seed: int) -> HostBuilder:
    """Values that are made on the host device and on device 0, and go both ways."""
    b = HostBuilder()
    x = b.on_host(b.input, torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)))
    b.on_host(b.call, "logsumexp", x, [1], keep="sums")
    normed = b.on_host(b.call, "native_layer_norm", x, [8], None, None, 1e-5)[0]
    there = b.call("tanh", b.transfer(normed, 0), keep="there")
    given = b.transfer(x, 0)
    b.call("mul.Tensor", given, there, keep="product")
    b.on_host(b.call, "exp", b.transfer(there, HOST), keep="back")
    return b


def test_other_values_of_the_host_device_lie_in_its_arena() -> None:
    """Ops with temporaries of their own, foreign inputs copied to the device, values that come back and are kept."""
    first = _exchange(0)
    graph, records = measured(first)
    assert any(records[v.id].scratch_bytes for v in graph.vertices if v.space == HOST and v.id in records)
    plan = make_plan(graph, memory=1024, planner="timed", cyclic=True)
    verify(replace(graph, spaces=plan.devices), plan)
    arena = {HOST: host_arena(arena_bytes(plan, HOST))}
    with Executor(plan, graph.ops, records, clean={}, arena=arena) as executor:
        executor.set_tracing(True)
        for seed in range(STEPS):
            inputs = _exchange(seed)
            assert_bits(step(executor, inputs), inputs)
        assert executor.counters()["c10_allocations"] == 0
        lanes = {(event.device, event.lane) for event in executor.events()}
    assert lanes == {(0, "compute0"), (0, "h2d"), (0, "d2h"), (HOST, "compute0")}


def test_an_op_that_writes_to_frozen_bytes_is_refused() -> None:
    """Whatever the plan says of it."""
    b = HostBuilder()
    frozen = b.on_host(b.weight, torch.ones(64))
    b.on_host(b.call_writing, "_foreach_add_.Scalar", [frozen], 1, written=[])
    b.call("tanh", b.input(torch.ones(4)), keep="y")
    graph, records = measured(b)
    plan = make_plan(graph, memory=1024, planner="timed", cyclic=True)
    with pytest.raises(ExecutionError, match=r"_foreach_add_.* would write to host memory that is only read"):
        Executor(plan, graph.ops, records, clean=b.clean)


def test_what_cannot_run_is_refused() -> None:
    """No threads for the host, an arena on another device, host bytes of another size."""
    with HostRun(FORMS["tail"]) as run:
        given = {"clean": run.training.b.clean, "states": run.training.b.states}
        with pytest.raises(ConfigError, match="host_threads"):
            Executor(run.plan, run.graph.ops, run.records, **given, options=EngineOptions(host_threads=0))
        arena = {HOST: torch.empty(1 << 20, device="meta", dtype=torch.uint8)}
        with pytest.raises(ExecutionError, match=r"arena of device 1 is on meta.*host_arena\(\)"):
            Executor(run.plan, run.graph.ops, run.records, **given, arena=arena)
        short = {vertex: held[:-1] for vertex, held in run.training.b.clean.items()}
        with pytest.raises(ExecutionError, match="needs 4 host bytes, it was given 3"):
            Executor(run.plan, run.graph.ops, run.records, clean=short, states=given["states"])


@pytest.mark.parametrize(
    ("device", "compute", "all_threads", "left"),
    [("cpu", 1, 4, 3), ("cpu", 4, 4, 1), ("cpu", None, 4, 4), ("cuda", None, 4, 3), ("cuda", 1, 1, 1)],
)
def test_kernels_on_the_host_leave_threads_to_others(
    device: str, compute: int | None, all_threads: int, left: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(all_threads)
    try:
        assert threads_beside(device, compute) == left
    finally:
        torch.set_num_threads(before)
