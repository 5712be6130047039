"""Values that live over steps and change: bits after every step, whatever a plan keeps on the device."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from disco_accel.errors import BudgetTooSmall, ExecutionError
from disco_accel.execute.executor import EngineOptions, Executor
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.native.arena import device_arena
from disco_accel.native.host_memory import bytes_of
from disco_accel.plan import make_plan
from tests.execute.programs import build, bump_plan, measured, step, step_in_two
from tests.execute.state_plans import PLANS, Planner, Trained, adam, plan_of, training, weights_of
from tests.support.engine_faults import failing, kernels

STEPS = 5
SCHEDULES = {
    "priority": EngineOptions(),
    "random": EngineOptions(dispatch="random", seed=1, lookahead=4, compute_streams=2),
    "fixed": EngineOptions(dispatch="fixed"),
    "synchronous": EngineOptions(dispatch="synchronous"),
    "throttled": EngineOptions(link_bandwidth=20e6, link_latency=1e-5),
}


def _sgd(name: str, options: EngineOptions | None = None, *, twice: bool = False, count: int = 3) -> Trained:
    return Trained(partial(training, twice=twice), weights_of(count), PLANS[name], options)


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("name", PLANS)
def test_states_have_eagers_bits_after_every_step(name: str, twice: bool, options: EngineOptions) -> None:
    """Weights and results of five steps; at the end the homes hold what training made."""
    trained = _sgd(name, options, twice=twice)
    with trained.executor as executor:
        for seed in range(STEPS):
            trained.step(seed, step if seed % 2 else step_in_two)
        executor.store_states()
        trained.assert_homes()


def test_the_plans_do_what_their_names_say() -> None:
    """Copies and changes of one step of each plan; a reload lies between two updates of one weight."""
    for name, twice, expected in (
        ("resident", False, (0, 0)),
        ("away", False, (5, 3)),
        ("away", True, (7, 5)),
        ("mixed", False, (3, 2)),
        ("returning", True, (5, 3)),
    ):
        trained = _sgd(name, twice=twice)
        with trained.executor as executor:
            trained.step(0)
            trained.step(1)
            counters = executor.counters()
        copies = tuple(sum(map(swaps, trained.plan.vertices)) for swaps in (swaps_in, swaps_out))
        assert copies == expected, (name, twice)
        nbytes = trained.homes[0].nbytes
        assert (counters["reload_bytes"], counters["offload_bytes"]) == (copies[0] * nbytes, copies[1] * nbytes)
        assert counters["changes"] == copies[1] + (6 if twice else 3)


def _moments(count: int) -> list[torch.Tensor]:
    """Homes of weights with their two moments."""
    return [home for weight in weights_of(count) for home in (weight, weight * 0, weight * 0)]


_ADAM_PLANS: Mapping[str, Planner] = {
    "resident": PLANS["resident"],
    "away": lambda graph, states: plan_of(graph, buffers=3),
    "mixed": lambda graph, states: plan_of(graph, resident=states[::2], buffers=3),
}


@pytest.mark.parametrize("fused", [False, True], ids=["ops", "fused"])
@pytest.mark.parametrize("planner", _ADAM_PLANS.values(), ids=_ADAM_PLANS)
def test_an_optimizers_moments_are_states_too(planner: Planner, fused: bool) -> None:
    """Adam by lerp_, mul_, addcmul_ and addcdiv_ on weights and moments; ``fused``: one op that writes all of them."""
    trained = Trained(partial(adam, fused=fused), _moments(2), planner, EngineOptions(dispatch="random", seed=3))
    with trained.executor as executor:
        for seed in range(STEPS):
            trained.step(seed)
        executor.store_states()
    trained.assert_homes()


def _planned(graph: TaskGraph, states: Sequence[int], memory: str) -> MemGraph:
    """By the timed planner: in the ``least`` memory that it finds a plan for, in that and room for ``some`` of the
    states, or in memory where ``all`` values have places of their own."""
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(graph, memory=256, planner="timed", cyclic=True)
    least = caught.value.needed
    some = least + sum(v.sizes[0] for v in graph.vertices if v.id in states) // 4 // 256 * 256
    nbytes = {"least": least, "some": some, "all": bump_plan(graph).devices[0].memory}[memory]
    return make_plan(graph, memory=nbytes, planner="timed", cyclic=True)


@pytest.mark.parametrize("memory", ["least", "some", "all"])
@pytest.mark.parametrize("program", ["sgd", "twice", "adam", "fused"])
def test_plans_of_the_timed_planner_keep_states_too(program: str, memory: str) -> None:
    """Five steps under each schedule."""
    adams = program in ("adam", "fused")
    made = partial(adam, fused=program == "fused") if adams else partial(training, twice=program == "twice")
    plan: list[MemGraph] = []

    def planner(graph: TaskGraph, states: Sequence[int]) -> MemGraph:
        return plan[0] if plan else _planned(graph, states, memory)

    for options in SCHEDULES.values():
        trained = Trained(made, _moments(2) if adams else weights_of(6), planner, options)
        plan = [trained.plan]
        with trained.executor as executor:
            for seed in range(STEPS):
                trained.step(seed)
            executor.store_states()
            trained.assert_homes()
    assert any(map(swaps_in, plan[0].vertices)) == (memory != "all"), "copies where memory is short, and only there"


def test_homes_are_older_than_residents_until_these_are_stored() -> None:
    """Weights that a plan writes home are there after each step; a resident one is there after store_states()."""
    trained = _sgd("mixed")
    with trained.executor as executor:
        for seed in range(2):
            trained.step(seed)
            assert not torch.equal(trained.homes[0], trained.eager[0])
            assert all(torch.equal(h, e) for h, e in zip(trained.homes[1:], trained.eager[1:], strict=True))
        executor.store_states()
        trained.assert_homes()
        trained.step(2)
        executor.store_states()
        trained.assert_homes()


def test_closing_stores_states() -> None:
    trained = _sgd("resident")
    with trained.executor:
        trained.step(0)
    trained.assert_homes()


def test_states_on_the_device_alone_are_not_dropped() -> None:
    """invalidate() refuses until they are stored; afterwards the next step loads what was stored."""
    trained = _sgd("mixed")
    with trained.executor as executor:
        executor.invalidate()
        trained.step(0)
        with pytest.raises(ExecutionError, match=r"input 1 \(weight 0\) on the device .* store_states\(\) first"):
            executor.invalidate()
        trained.step(1)
        executor.store_states()
        executor.invalidate()
        executor._memory.devices[0].fill_(255)
        trained.step(2)
    trained.assert_homes()


def test_restored_states_replace_what_the_device_has() -> None:
    """As after loading a checkpoint: the homes win over newer residents."""
    trained = _sgd("resident")
    with trained.executor as executor:
        trained.step(0)
        for home, weight in zip(trained.homes, weights_of(), strict=True):
            home.copy_(weight / 2)
        trained.eager = [home.clone() for home in trained.homes]
        executor.restore_states()
        trained.step(1)
        trained.step(2)


def test_what_a_user_writes_to_a_home_reaches_states_that_are_not_resident() -> None:
    """Between steps; a resident one goes on as it was."""
    trained = _sgd("mixed")
    with trained.executor as executor:
        trained.step(0)
        for home in trained.homes:
            home.mul_(2)
        trained.eager = [trained.eager[0], *(eager * 2 for eager in trained.eager[1:])]
        trained.step(1)
        executor.store_states()
    trained.assert_homes()


def test_a_home_stays_in_use_when_its_tensor_gets_other_memory() -> None:
    trained = _sgd("away")
    (first, *_), home = trained.homes, trained.homes[0]
    parameter = torch.nn.Parameter(first)
    with trained.executor as executor:
        trained.step(0)
        parameter.data = torch.zeros_like(parameter)
        trained.step(1)
        trained.assert_homes()
        home.untyped_storage().resize_(0)
        with pytest.raises(ExecutionError, match=r"home of input 1 \(weight 0\) was freed or moved"):
            executor.begin(trained.inputs(2).external)


def _through_gate(trained: Trained, seed: int) -> None:
    inputs = trained.inputs(seed)
    trained.executor.begin(inputs.external)
    trained.executor.wait_out()


@pytest.mark.parametrize("name", PLANS)
def test_a_step_dropped_before_any_update_leaves_states_whole(name: str) -> None:
    """At the gate no weight was changed: training goes on from where it was, also with residents newer than homes."""
    trained = _sgd(name)
    with trained.executor as executor:
        for seed in range(3):
            trained.step(seed)
            _through_gate(trained, seed)
            executor.abandon()
            executor.abandon()
        trained.step(3)
        _through_gate(trained, 4)
        executor.abandon()
        executor.store_states()
        trained.assert_homes()


@pytest.mark.parametrize("name", PLANS)
def test_a_failure_before_any_update_leaves_states_whole_and_one_later_does_not(name: str) -> None:
    """Each kernel in turn fails in the third step. The next step goes on if no update was launched, and is refused
    otherwise until the states are restored."""
    whole = torn = 0
    for op in range(len(kernels(_sgd(name, count=2).plan))):
        trained = _sgd(name, EngineOptions(dispatch="synchronous"), count=2)
        vertices = {v.id: v for v in trained.plan.vertices}
        before = kernels(trained.plan)[: op + 1]
        with trained.executor as executor:
            trained.step(0)
            trained.step(1)
            with pytest.raises(ExecutionError, match="a test asked for it"), failing(executor, op):
                step(executor, trained.inputs(2))
            if any(vertices[kernel].inplace for kernel in before):
                torn += 1
                for call in (lambda: executor.begin({}), lambda: executor.run_out({}), executor.store_states):
                    with pytest.raises(ExecutionError, match=r"begun to change .*weight 0.*restore_states\(\)"):
                        call()
                for home, eager in zip(trained.homes, trained.eager, strict=True):
                    home.copy_(eager)
                executor.restore_states()
            else:
                whole += 1
            trained.step(3)
            trained.step(4)
            executor.store_states()
        trained.assert_homes()
    assert whole >= 5 and torn >= 3


def test_a_step_abandoned_behind_the_gate_is_torn_even_if_it_has_ended() -> None:
    """Its caller takes it for not done, so that its updates count as half done; close() stores none of them."""
    trained = _sgd("resident")
    with trained.executor as executor:
        trained.step(0)
        executor.store_states()
        inputs = trained.inputs(1)
        executor.begin(inputs.external)
        executor.deliver(inputs.late)
        while executor._engine.wait_end(0.1) != 0:
            time.sleep(0.001)
        executor.abandon()
        with pytest.raises(ExecutionError, match="begun to change"):
            executor.begin(trained.inputs(1).external)
    trained.assert_homes()


def test_executors_that_share_an_arena_store_their_states_first() -> None:
    """A step that would write over another executor's newer states is refused; stored, they come back."""
    arena = device_arena(1 << 20, torch.device("cpu"))
    one, two, three = (
        Trained(training, weights_of(), PLANS[name], arena=arena) for name in ("mixed", "resident", "away")
    )
    one.step(0)
    for other in (two, three):
        with pytest.raises(ExecutionError, match=r"another executor has input 1 \(weight 0\) in this arena"):
            other.step(0)
    one.executor.store_states()
    for seed in range(1, 4):
        for trained in (one, two, three):
            trained.executor.invalidate()
            trained.step(seed)
            trained.executor.store_states()
    for trained in (one, two, three):
        trained.assert_homes()
        trained.executor.close()


def test_an_executor_that_is_closed_leaves_its_arena_to_others() -> None:
    arena = device_arena(1 << 20, torch.device("cpu"))
    one, two = (Trained(training, weights_of(), PLANS["resident"], arena=arena) for _ in range(2))
    one.step(0)
    one.executor.close()
    two.step(0)
    two.executor.close()
    one.assert_homes()


def test_a_plan_that_is_not_cyclic_loads_its_residents_for_each_step() -> None:
    """Its residents need not be back, so that the homes have the last versions when a step ends."""

    def planner(graph: TaskGraph, states: Sequence[int]) -> MemGraph:
        return replace(plan_of(graph, returning=states, back=False), cyclic=False)

    trained = Trained(training, weights_of(), planner)
    with trained.executor:
        for seed in range(3):
            trained.step(seed)
            trained.assert_homes()


_WRONG = {
    "missing": (lambda home: None, "needs a home of 1024 host bytes, none was given"),
    "short": (lambda home: bytes_of(home)[:-1], "has 1023 bytes where the plan has 1024"),
    "dtype": (lambda home: home.reshape(-1), r"is float32\[256\]"),
    "shape": (lambda home: bytes_of(home).view(32, 32), r"is uint8\[32, 32\]"),
    "strides": (lambda home: torch.zeros(2048, dtype=torch.uint8)[::2], r"is uint8\[1024\] with strides \[2\]"),
    "device": (lambda home: torch.zeros(1024, dtype=torch.uint8, device="meta"), "on meta; it must be"),
}


@pytest.mark.parametrize("kind", _WRONG)
def test_a_wrong_home_is_named(kind: str) -> None:
    make, message = _WRONG[kind]
    homes = weights_of()
    builder = build(training(homes))
    graph, records = measured(builder)
    wrong = make(homes[1])
    states = {state: home for state, home in builder.states.items() if state != 2}
    states |= {2: wrong} if wrong is not None else {}
    with pytest.raises(ExecutionError, match=rf"state input 2 \(middle\).*{message}"):
        Executor(plan_of(graph), graph.ops, records, clean={}, states=states, names={2: "middle"})


def test_homes_share_memory_with_nothing() -> None:
    """Two states in one home, and a home inside the host's frozen bytes, are refused."""
    homes = weights_of()
    builder = build(training([homes[0], homes[1], homes[1]]))
    graph, records = measured(builder)
    with pytest.raises(ExecutionError, match="homes of input 2 and input 3 share memory"):
        Executor(plan_of(graph), graph.ops, records, clean={}, states=builder.states)
    builder.states[3] = bytes_of(homes[2])
    frozen = {99: builder.states[3][8:16]}
    with pytest.raises(ExecutionError, match="cannot be run: memory: the home of a state shares bytes"):
        Executor(plan_of(graph), graph.ops, records, clean=frozen, states=builder.states)


def test_plans_that_lose_a_version_are_refused() -> None:
    """A changed state that is neither resident nor written home, and an update to another address than it reads."""
    builder = build(training(weights_of()))
    graph, records = measured(builder)
    plan = plan_of(graph)
    last = plan.vertices[-1]
    assert swaps_out(last)
    lost = replace(plan, vertices=plan.vertices[:-1])
    lost = replace(lost, data_edges=tuple(edge for edge in lost.data_edges if last.id not in edge))
    lost = replace(lost, memory_edges=tuple(edge for edge in lost.memory_edges if last.id not in edge))
    with pytest.raises(ExecutionError, match=r"plan changes input 1, .* does not write the last version"):
        Executor(lost, graph.ops, records, clean={}, states=builder.states)
    with pytest.raises(ExecutionError, match=r"plan changes input 1, .* does not write the last version"):
        Executor(
            replace(PLANS["resident"](graph, list(builder.states)), cyclic=False),
            graph.ops, records, clean={}, states=builder.states,
        )  # fmt: skip
    update = next(v for v in plan.vertices if v.inplace)
    slot = plan.slots[update.id, 0]
    moved = replace(plan, slots={**plan.slots, (update.id, 0): replace(slot, offset=0)})
    with pytest.raises(ExecutionError, match=f"kernel {update.id} writes output 0 over .* another address"):
        Executor(moved, graph.ops, records, clean={}, states=builder.states)


def test_a_forked_process_neither_stores_nor_restores() -> None:
    """In the child every use is an error, and close() leaves the homes alone."""
    shared = [home.share_memory_() for home in weights_of()]
    trained = Trained(training, shared, PLANS["resident"])
    with trained.executor as executor:
        trained.step(0)
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (executor.store_states, executor.restore_states, executor.invalidate):
                try:
                    call()
                except ExecutionError:
                    refused += 1
            executor.close()
            os._exit(0 if refused == 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not torch.equal(shared[0], trained.eager[0])
        trained.step(1)
    trained.assert_homes()
