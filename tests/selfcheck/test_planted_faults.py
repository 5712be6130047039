"""The self-check passes on a sound host device, and each fault that is planted in it is found and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from disco_accel.errors import ExecutionError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.copies import swaps_in
from disco_accel.graph.memgraph import MemGraph
from disco_accel.selfcheck import orders, self_check
from disco_accel.selfcheck import trial as trial_module
from disco_accel.selfcheck.outcome import Outcome
from disco_accel.selfcheck.self_check import check
from disco_accel.selfcheck.subject import Subject, make_subject
from disco_accel.selfcheck.trial import Trial

CPU = torch.device("cpu")
LINK = 1 << 20


@pytest.fixture(scope="module")
def subject() -> Subject:
    return make_subject(CPU)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outcome_with(subject: Subject) -> Outcome:
    return check(CPU, lambda _: subject, LINK)


def test_a_sound_device_passes_and_every_part_has_run(subject: Subject) -> None:
    """The plan moves values both ways and recomputes, all steps are compared bit for bit."""
    state = torch.get_rng_state()
    found = outcome_with(subject)
    assert found.passed, found.differences
    assert found.figures["compared"] == "bits"
    assert found.figures["plan"]["offloads"] > 10 and found.figures["plan"]["reloads"] > 10
    assert found.figures["link"]["copy"] > 0
    assert torch.equal(torch.get_rng_state(), state), "the user's generator is where it was"
    replays = [call for call in subject.graph.ops.values() if call.rng is not None and call.rng.replay]
    assert replays, "a recomputation draws again what its forward drew"


def test_the_callers_circumstances_make_no_difference(subject: Subject) -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert outcome_with(subject).passed


def without_memory_edges(plan: MemGraph) -> MemGraph:
    """What is written over need not have been read: all reloads of weights are ready as a step begins."""
    return replace(plan, memory_edges=())


def with_two_values_in_one_place(plan: MemGraph) -> MemGraph:
    """All reloads write to the lowest address."""
    reloads = {(v.id, 0) for v in plan.vertices if swaps_in(v)}
    return replace(plan, slots={k: replace(s, offset=0) if k in reloads else s for k, s in plan.slots.items()})


@pytest.mark.parametrize("damage", [without_memory_edges, with_two_values_in_one_place])
def test_a_plan_that_is_wrong_is_found(damage: Callable[[MemGraph], MemGraph], subject: Subject) -> None:
    """Past the verifier, as a fault of the engine that ignores an edge or an address would be."""
    broken = damage(subject.plan)
    assert broken != subject.plan
    found = outcome_with(replace(subject, plan=broken))
    assert not found.passed
    assert any("gradient of blocks" in d.what or d.what == "loss" for d in found.differences)


def test_a_flipped_bit_in_host_memory_is_found(subject: Subject) -> None:
    """The plan's copy of one weight differs from plain PyTorch's in its last byte."""
    vertex, data = next((v, t) for v, t in subject.clean.items() if t.numel() >= 1 << 18)
    corrupted = data.clone()
    corrupted[-1] ^= 0x40
    found = outcome_with(replace(subject, clean={**subject.clean, vertex: corrupted}))
    assert not found.passed
    assert found.differences[0].apart and found.differences[0].expected != ""


def test_an_op_with_another_result_is_found(subject: Subject) -> None:
    vertex, call = next((v, c) for v, c in subject.graph.ops.items() if c.name == "aten::gelu")
    assert call.args[1] == "none"
    ops = {**subject.graph.ops, vertex: replace(call, args=(call.args[0], "tanh"))}
    found = outcome_with(replace(subject, graph=replace(subject.graph, ops=ops)))
    assert not found.passed and "of the norm" in str(found.differences[0])


def test_a_copy_that_loses_a_byte_is_found(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    """The link's own part: what comes back from the device is compared byte by byte."""
    rate = "disco_accel.selfcheck.link._rate"
    real = self_check.link.__globals__["_rate"]

    def losing(copy: Callable[[], Any], nbytes: int, wait: Callable[[], None]) -> float:
        measured: float = real(copy, nbytes, wait)
        copy().view(-1)[nbytes // 2] ^= 1
        return measured

    monkeypatch.setattr(rate, losing)
    found = outcome_with(subject)
    assert [d.part for d in found.differences] == ["link"] and "1 bytes" in found.differences[0].got


def test_memory_that_a_step_takes_is_found(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    real = Executor.counters
    monkeypatch.setattr(Executor, "counters", lambda self: {**real(self), "c10_allocations": 3})
    found = outcome_with(subject)
    assert [(d.part, d.got) for d in found.differences] == [("memory inside a step", "3")]


def test_an_error_inside_is_a_difference_with_its_traceback(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    def failing(self: Trial, *_: Any) -> None:
        raise ExecutionError("vertex 7 failed: planted")

    monkeypatch.setattr(Trial, "end", failing)
    found = outcome_with(subject)
    assert not found.passed
    assert "vertex 7 failed: planted" in str(found.differences[0]) and "steps as planned" in str(found.differences[0])
    assert "planted" in found.figures["traceback"]


def test_a_shortage_of_memory_is_no_fault_of_the_device(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    def short(self: Trial, *_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Trial, "end", short)
    with pytest.raises(RuntimeError, match="out of memory"):
        outcome_with(subject)


@pytest.mark.parametrize("case", list(orders.CASES))
def test_each_case_of_the_order_compares_what_it_ran(
    case: str, monkeypatch: pytest.MonkeyPatch, subject: Subject
) -> None:
    """A device that hands out results of another step is found in each case by itself."""
    with Trial(subject, EngineOptions()) as trial:
        monkeypatch.setattr(orders, "CASES", {case: orders.CASES[case]})
        assert orders.orders(trial) == []
        real = trial.gradients
        monkeypatch.setattr(trial, "gradients", lambda: {n: g + 1 for n, g in real().items()})
        found = orders.orders(trial)
    assert {d.part for d in found} == {case} and len(found) >= 12


def test_a_plan_that_moves_nothing_is_no_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a planner that keeps all in memory would pass for a proof of the link."""
    from disco_accel.errors import PlanError
    from disco_accel.selfcheck import subject as module

    monkeypatch.setattr(module, "_TINY", 64 << 20)
    with pytest.raises(PlanError, match="moves nothing"):
        make_subject(CPU)


def test_a_device_that_does_not_repeat_its_bits_passes_and_is_still_watched(
    monkeypatch: pytest.MonkeyPatch, subject: Subject
) -> None:
    """Noise of 1e-3 in plain PyTorch's gradients and in the plan's: a tenth too much is found."""
    real, gradients, noise = trial_module.eager_step, Trial.gradients, torch.Generator().manual_seed(0)

    def noisy(found: Mapping[str, torch.Tensor], more: float = 0.0) -> dict[str, torch.Tensor]:
        return {n: g * (1 + more + 1e-3 * torch.randn(g.shape, generator=noise)) for n, g in found.items()}

    def eager(*given: Any) -> dict[str, torch.Tensor]:
        step = real(*given)
        return {"loss": step.pop("loss"), **noisy(step)}

    monkeypatch.setattr(trial_module, "eager_step", eager)
    monkeypatch.setattr(Trial, "gradients", lambda self: noisy(gradients(self)))
    found = outcome_with(subject)
    assert found.passed and found.figures["compared"] == "up to the distance of its own runs", found.differences
    monkeypatch.setattr(Trial, "gradients", lambda self: noisy(gradients(self), 0.1))
    found = outcome_with(subject)
    assert not found.passed and "up to 0.001" in found.differences[0].apart
