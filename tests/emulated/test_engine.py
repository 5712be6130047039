"""What engines of one process owe each other, the caller's streams and the budget on a CUDA device."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from threading import Event as Flag
from threading import Thread, Timer
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prepare
from disco_accel.errors import DeviceLost, ExecutionError, Stalled
from disco_accel.execute.executor import EngineOptions, Event
from disco_accel.native.backend import workspace_bytes
from disco_accel.step.run.session import Session, find_state
from tests.emulated import device
from tests.emulated.models import CUDA, assert_same, least, step
from tests.execute.programs import step as plan_step
from tests.execute.state_plans import PLANS, Trained, training, weights_of

MIB = 1 << 20
_ROUNDING = 22 * MIB
"""What PyTorch's allocator may take from the driver beyond what it hands out."""


def llama() -> Any:
    base, _ = arena_llama(SMALL, dtype=torch.float32, attention="eager", source=CUDA)
    return with_adapter(base, rank=4, checkpointing=True)


def batch(length: int = 16) -> dict[str, torch.Tensor]:
    return batch_for(SMALL["vocab_size"], 2, length, CUDA)


def planned() -> tuple[Any, dict[str, torch.Tensor]]:
    """A model under its least budget that has run, and what eager makes of a step of it."""
    model = llama()
    expected = step(copy.deepcopy(model).to(CUDA), batch())
    return least(model, lambda m: step(m, batch())), expected


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_step(model: Any, loss: torch.Tensor, expected: Mapping[str, torch.Tensor]) -> None:
    got = {"loss": loss.detach(), **gradients(model)}
    assert_same(got, {name: expected[name] for name in got})


def state_of(model: Any) -> Session:
    state = find_state(model)
    assert state is not None
    return state


def test_a_forward_of_another_prepared_model_between_forward_and_backward() -> None:
    """Also where that one makes a plan first, and so measures workspaces."""
    (first, expected), (second, _) = planned(), planned()
    for length in (16, 12):
        first.zero_grad()
        second.zero_grad()
        loss, other = first(**batch()).loss, second(**batch(length)).loss
        loss.backward()
        assert_step(first, loss, expected)
        other.backward()


def test_workspaces_that_are_cleared_between_forward_and_backward() -> None:
    model, expected = planned()
    model.zero_grad()
    loss = model(**batch()).loss
    torch._C._cuda_clearCublasWorkspaces()
    loss.backward()
    assert_step(model, loss, expected)


def test_workspaces_that_another_thread_clears_all_the_time() -> None:
    """As another model does, whenever it takes up another plan."""
    model, expected = planned()
    over = Flag()

    def clear() -> None:
        while not over.wait(1e-4):
            torch._C._cuda_clearCublasWorkspaces()

    thread = Thread(target=clear)
    thread.start()
    try:
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            loss = model(**batch()).loss
            loss.backward()
            assert_step(model, loss, expected)
    finally:
        over.set()
        thread.join()


def test_steps_on_streams_that_nothing_orders() -> None:
    """Each writes gradients that its own stream copies out in its own time; the next must not overwrite them."""
    model, expected = planned()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    torch.cuda.synchronize()
    for number in range(8):
        with torch.cuda.stream(streams[number % 2]):
            # The copies of the step before are still to come.
            torch.cuda._sleep(1 << 20)
            model.zero_grad(set_to_none=True)
            loss = model(**batch_on(streams[number % 2])).loss
            loss.backward()
            results.append({"loss": loss.detach(), **gradients(model)})
    torch.cuda.synchronize()
    for result in results:
        assert_same(result, {name: expected[name] for name in result})


def test_an_engine_ends_after_the_copies_of_its_results() -> None:
    """Whoever gets the arena's memory next would write under them."""
    model, _ = planned()
    current = state_of(model).memory.current
    assert current is not None
    device.hang(torch.cuda.current_stream())
    timer, due = released_after(1.0)
    current.executor.leave(current.groups[1])
    current.unload()
    assert due.is_set(), "the copies wait until then"
    timer.join()


def released_after(seconds: float) -> tuple[Timer, Flag]:
    """A timer that releases the device, and what it sets just before."""
    due = Flag()

    def release() -> None:
        due.set()
        device.release()

    timer = Timer(seconds, release)
    timer.start()
    return timer, due


def batch_on(stream: torch.cuda.Stream) -> dict[str, torch.Tensor]:
    with torch.cuda.stream(stream):
        return batch()


def test_many_batch_shapes_take_no_more_of_the_device_than_one() -> None:
    """What counts is what the driver gave, at any moment, while plans are made too."""
    torch.cuda.empty_cache()
    before = device.live_bytes()
    model = llama()
    budget = 2 * workspace_bytes(CUDA) + 8 * MIB
    prepare(model, DiscoConfig(memory_budget=budget, device="cuda", buckets="off", self_check="off"))
    device.reset_peak()
    # The second time nothing is measured, which would give unused memory back.
    for length in (8, 12, 16, 20, 24) * 2:
        step(model, batch(length))
    torch.cuda.synchronize()
    assert len({key[0] for key in state_of(model).memory.plans}) == 5
    assert device.live_bytes(peak=True) - before <= budget + _ROUNDING


def test_a_large_budget_is_not_exceeded_by_what_the_driver_gave() -> None:
    """PyTorch takes memory in pieces: the arena leaves room for what they are rounded up by."""
    model = llama()
    prepare(model, DiscoConfig(memory_budget="2GiB", device="cuda"))
    step(model, batch())
    current = state_of(model).memory.current
    assert current is not None and current.budget.rounding == _ROUNDING


def test_waiting_for_the_callers_stream_is_not_stalling() -> None:
    model, expected = planned()
    short_of_time(model)
    given = batch()
    torch.cuda.synchronize()
    device.hang(torch.cuda.current_stream())
    timer, due = released_after(2.0)
    model.zero_grad(set_to_none=True)
    loss = model(**given).loss
    assert due.is_set(), "the step waits for the caller's stream"
    loss.backward()
    timer.join()
    assert_step(model, loss, expected)


def short_of_time(model: Any) -> None:
    """From now on half a second without progress counts as stalled."""
    state = state_of(model)
    current = state.memory.current
    assert current is not None
    executor = current.make_executor(dataclasses.replace(current.engine, stall_timeout=0.5), arenas=state.memory.arenas)
    before = current.use(executor)
    assert before is not None
    before.close()
    executor.invalidate()
    step(model, batch())


def traced(model: Any, given: Mapping[str, torch.Tensor]) -> list[Event]:
    current = state_of(model).memory.current
    assert current is not None
    current.executor.set_tracing(True)
    model.zero_grad(set_to_none=True)
    model(**given).loss.backward()
    current.executor.set_tracing(False)
    return current.executor.events()


def test_a_trace_tells_when_things_ran_also_behind_work_of_the_caller() -> None:
    model, _ = planned()
    given = batch()
    torch.cuda.synchronize()
    for busy in (False, True):
        if busy:
            device.hang(torch.cuda.current_stream())
            Timer(1.0, device.release).start()
        events = traced(model, given)
        current = state_of(model).memory.current
        assert current is not None
        seconds = current.executor.counters()["step_seconds"]
        assert max(event.end for event in events) <= seconds
        # To the fraction of a second that this thread may not have run meanwhile.
        early = [event for event in events if event.start < event.issue - 0.25]
        assert not early, "nothing starts before it is handed over"


@pytest.mark.parametrize("streams", [2, 3])
def test_several_compute_streams_have_workspaces_of_their_own(streams: int) -> None:
    model, expected = planned()
    state = state_of(model)
    current = state.memory.current
    assert current is not None
    engine = dataclasses.replace(current.engine, compute_streams=streams)
    executor = current.make_executor(engine, arenas=state.memory.arenas)
    before = current.use(executor)
    assert before is not None
    before.close()
    executor.invalidate()
    for _ in range(3):
        got = step(model, batch())
        assert_same(
            {k: v for k, v in got.items() if k != "generator"}, {k: expected[k] for k in expected if k != "generator"}
        )


def test_a_fault_of_a_kernel_is_told_with_the_ops_that_were_in_flight() -> None:
    """The runtime says it at some later call, whatever that asks for."""
    model, _ = planned()
    given = batch()
    device.inject_fault("aten::mm", nth=30)
    with pytest.raises(DeviceLost) as caught:
        step(model, given)
    text = str(caught.value)
    assert "illegal memory access" in text and "CUDA_LAUNCH_BLOCKING=1" in text, text
    assert re.search(r"in flight: vertex \d+ \(aten::.* in .*layers", text), text
    # Whatever of PyTorch's or ours comes first.
    with pytest.raises((DeviceLost, torch.AcceleratorError)):
        step(model, given)


def test_states_that_a_lost_device_had_changed_are_not_taken_for_whole() -> None:
    """Some updates of the step are done when its last product fails: no step goes on, and none of them is stored."""
    trained = Trained(training, weights_of(), PLANS["resident"], EngineOptions(device="cuda"))
    with trained.executor as executor:
        trained.step(0)
        executor.store_states()
        inputs = trained.inputs(1)
        torch.cuda.synchronize()
        device.inject_fault("aten::mm", nth=9)
        with pytest.raises(DeviceLost, match="illegal memory access"):
            plan_step(executor, inputs)
        with pytest.raises(ExecutionError, match="begun to change"):
            executor.begin(inputs.external)
    trained.assert_homes()


def test_a_kernel_that_never_ends_is_reported_although_the_step_cannot_drain() -> None:
    model, expected = planned()
    short_of_time(model)
    device.inject_hang("aten::mm", nth=30)
    with pytest.raises(Stalled, match=r"in flight .*aten::.*; the device has not ended that work"):
        step(model, batch())
    with pytest.raises(Stalled, match="the device has not ended that work"):
        step(model, batch())
    # It was only slow.
    device.release()
    got = step(model, batch())
    assert_same({k: got[k] for k in got if k != "generator"}, {k: expected[k] for k in got if k != "generator"})
