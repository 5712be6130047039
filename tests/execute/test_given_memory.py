"""Transfers to memory of the user's, bound in each step: right bytes there, and nothing anywhere else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import pytest
import torch

from disco_accel.errors import ExecutionError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.check import after_gate
from disco_accel.plan import make_plan
from tests.execute.given_memory import FILL, Given, GivingBuilder, Made, program, run
from tests.execute.programs import measured

STEPS = 4
SCHEDULES = {
    "priority": EngineOptions(),
    "random": EngineOptions(dispatch="random", seed=1, lookahead=4, compute_streams=2),
    "fixed": EngineOptions(dispatch="fixed"),
    "synchronous": EngineOptions(dispatch="synchronous"),
    "throttled": EngineOptions(link_bandwidth=20e6, link_latency=1e-5),
}


@pytest.fixture(scope="module", params=["least", "all"])
def made(request: pytest.FixtureRequest) -> Made:
    return Made.of(request.param)


def test_the_plan_has_transfers_on_both_sides_of_the_gate(made: Made) -> None:
    b, plan = made.b, made.plan
    behind = after_gate(plan.vertices, (*plan.data_edges, *plan.memory_edges))
    assert {name for name, value in b.given.items() if value.ref[0] not in behind} == {"early"}
    assert not any(value.ref in plan.slots for value in b.given.values())


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_each_step_writes_to_the_memory_that_it_was_given(made: Made, options: EngineOptions) -> None:
    """Other memory in each step; that of steps before keeps what it has."""
    steps = [Given(program(seed)) for seed in range(STEPS)]
    with made.executor(options) as engine:
        for seed, given in enumerate(steps):
            run(engine, given, in_two=seed % 2 == 0)
            for before in steps[:seed]:
                before.assert_given()
            for later in steps[seed + 1 :]:
                later.assert_untouched()
        assert engine.counters()["c10_allocations"] == 0


def _left_out(memory: dict[int, torch.Tensor], vertex: int) -> None:
    del memory[vertex]


def _short(memory: dict[int, torch.Tensor], vertex: int) -> None:
    memory[vertex] = memory[vertex].flatten()[:-1]


def _long(memory: dict[int, torch.Tensor], vertex: int) -> None:
    memory[vertex] = torch.empty(memory[vertex].numel() + 1)


def _meta(memory: dict[int, torch.Tensor], vertex: int) -> None:
    memory[vertex] = torch.empty_like(memory[vertex], device="meta")


def _with_holes(memory: dict[int, torch.Tensor], vertex: int) -> None:
    """As many bytes from the first to the last element."""
    count = memory[vertex].numel()
    memory[vertex] = torch.full((count,), FILL).as_strided((2,), (count - 1,))


REFUSED: Mapping[Callable[[dict[int, torch.Tensor], int], None], str] = {
    _left_out: "no tensor was given for {}",
    _short: "the tensor for {} covers {short} bytes where the plan has {bytes}",
    _long: "the tensor for {} covers {long} bytes where the plan has {bytes}",
    _meta: "the tensor for {} is on meta, the plan has it on cpu",
    _with_holes: "the tensor for {} does not fill its memory",
}


@pytest.mark.parametrize("spoil", REFUSED)
@pytest.mark.parametrize("name", ["early", "g2"])
def test_memory_that_is_none_for_a_transfer_is_refused_by_name(
    made: Made, name: str, spoil: Callable[[dict[int, torch.Tensor], int], None]
) -> None:
    """Before anything is written; with the right memory the step goes on, or begins."""
    given = Given(program(1))
    vertex, size = given.b.given[name].ref[0], given.b.given[name].tensor.nbytes
    begin, late = given.begin(), given.late()
    spoil(begin if name == "early" else late, vertex)
    called = rf"the memory that vertex {vertex} \(transfer of vertex \d+ \(aten::.*\)\) writes to"
    message = REFUSED[spoil].format(called, bytes=size, short=size - 4, long=size + 4)
    with made.executor() as engine:
        if name == "early":
            with pytest.raises(ExecutionError, match=message):
                engine.begin(begin)
            assert not engine.running
            given.assert_untouched()
        else:
            engine.run_out(begin)
            with pytest.raises(ExecutionError, match=message):
                engine.deliver(late)
            given.assert_untouched(*(other for other in given.around if other != "early"))
            engine.run_end(given.late())
            given.assert_given()
        run(engine, Given(program(2)))


@pytest.mark.parametrize("waits", [False, True])
def test_an_abandoned_step_writes_nothing_to_memory_of_a_later_one(made: Made, waits: bool) -> None:
    """Its transfers, slowed down, would come late; what was to be given at its gate is nobody's target."""
    with made.executor(EngineOptions(link_bandwidth=2e6, link_latency=1e-4)) as engine:
        for seed in range(3):
            dropped, next_one = Given(program(seed)), Given(program(seed + 10))
            engine.begin(dropped.begin())
            if waits:
                engine.wait_out()
            engine.abandon()
            dropped.assert_untouched(*(name for name in dropped.around if name != "early"))
            next_one.assert_untouched()
            written = dropped.around["early"].clone()
            run(engine, next_one)
            assert torch.equal(dropped.around["early"], written)


def test_a_step_dropped_behind_its_gate_has_ended_its_transfers(made: Made) -> None:
    with made.executor(EngineOptions(link_bandwidth=2e6, link_latency=1e-4)) as engine:
        for seed in range(3):
            dropped = Given(program(seed))
            engine.run_out(dropped.begin())
            engine.deliver(dropped.late())
            engine.abandon()
            written = {name: around.clone() for name, around in dropped.around.items()}
            run(engine, Given(program(seed + 10)), in_two=True)
            assert all(torch.equal(dropped.around[name], was) for name, was in written.items())


def test_inputs_that_are_released_are_freed_and_memory_that_is_given_lives_until_the_end(made: Made) -> None:
    given, plan = Given(program(3)), made.plan
    behind = after_gate(plan.vertices, (*plan.data_edges, *plan.memory_edges))
    vertex = next(iter(given.b.external))
    assert not any(v.id in behind for v in plan.vertices if (vertex, 0) in v.inputs)
    with made.executor() as engine:
        shift = given.b.external[vertex].clone()
        freed, memory = weakref.ref(shift), weakref.ref(given.tensors["early"])
        engine.run_out(given.begin() | {vertex: shift})
        del shift, given.tensors["early"]
        assert freed() is not None and memory() is not None, "bound, so kept"
        engine.release_inputs([vertex])
        assert freed() is None and memory() is not None
        engine.run_end(given.late())
        assert memory() is None
        result = given.b.results["y"]
        assert torch.equal(engine.value(result.ref, result.spec), result.tensor)
        with pytest.raises(ExecutionError, match="no step is running"):
            engine.release_inputs([vertex])
        run(engine, Given(program(4)))


def test_zero_bytes_may_leave() -> None:
    """Memory without bytes is bound as any other."""
    b = GivingBuilder()
    x = b.input(torch.randn(0, 4))
    b.call("tanh", b.input(torch.ones(4)), keep="y")
    b.give("none", b.call("neg", x))
    graph, records = measured(b)
    plan = make_plan(graph, memory=4096, planner="timed", cyclic=True)
    with Executor(plan, graph.ops, records, clean={}) as engine:
        given = b.external | {b.given["none"].ref[0]: torch.empty(0, 4)}
        engine.begin(given)
        engine.wait_end()
        y = b.results["y"]
        assert torch.equal(engine.value(y.ref, y.spec), y.tensor)
