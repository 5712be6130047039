"""A memory budget that moves between steps: bits stay, the arena follows, and nothing moves within a step."""

from __future__ import annotations

import copy
import gc
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prefill, prepare, restore, set_memory_budget, stats
from disco_accel.errors import BudgetTooSmall, ConfigError, ExecutionError
from disco_accel.plan import planning_process
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.step import grant_source
from disco_accel.step.session import Session, find_state
from disco_accel.step.update.updated_step import StepWithUpdate
from disco_accel.testing.file_ledger import FileLedger
from disco_accel.testing.models import random_batch, tiny_lora

WIDTH, LAYERS = 128, 6
LARGE, SMALL = 1 << 20, 300 << 10


@pytest.fixture(autouse=True)
def planned_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Plans are made in this process, at its priority: how long another one waits for a core is not tested here. What
    is returned undoes it."""
    elsewhere = PlanningProcess._answer

    def here(_: PlanningProcess, request: bytes) -> bytes:
        return json.dumps(planning_process.answer(json.loads(request))).encode()

    monkeypatch.setattr(PlanningProcess, "_answer", here)
    return lambda: monkeypatch.setattr(PlanningProcess, "_answer", elsewhere)


class Layers(torch.nn.Module):
    """Frozen products of 64 KiB each, between trained scales; or products that are all trained."""

    def __init__(self, *, trained: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.layers.requires_grad_(trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * self.scale))
        return x.square().mean()


def batch(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def twins(budget: int | str = LARGE, *, trained: bool = False, **keys: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A prepared model and the same one in eager mode."""
    model, eager = Layers(trained=trained), Layers(trained=trained)
    usual = {"device": "cpu", "plan_cache": None, "quiet": True, "optimizer": "device", "link_bandwidth": "0.5GB/s"}
    return prepare(model, DiscoConfig(memory_budget=budget, **(usual | keys))), eager


def session_of(model: torch.nn.Module) -> Session:
    state = find_state(model)
    assert state is not None
    return state


def arena(model: torch.nn.Module) -> int:
    return sum(memory.numel() for memory in session_of(model).arenas.values())


def assert_same(model: torch.nn.Module, eager: torch.nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        if theirs.grad is not None:
            assert ours.grad is not None and torch.equal(ours.grad, theirs.grad), name


def both(model: torch.nn.Module, eager: torch.nn.Module, seed: int) -> None:
    """A step of each, gradients added to those that are there; all bits are compared."""
    losses = []
    for each in (model, eager):
        loss = each(batch(seed))
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    assert_same(model, eager)


def until(true: Callable[[], bool]) -> None:
    """Return once it is; a test that waits for what never comes fails."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def needed(model: torch.nn.Module) -> int:
    """The smallest budget of a step of 8 rows, as the refusal names it."""
    with pytest.raises(BudgetTooSmall) as refused:
        set_memory_budget(model, 1)
        model(batch(0))
    return refused.value.needed


def test_a_smaller_budget_holds_from_the_next_step_on_and_a_larger_one_too() -> None:
    model, eager = twins()
    both(model, eager, 0)
    assert arena(model) > SMALL and "granted_bytes" not in stats(model)
    set_memory_budget(model, "300KiB")
    assert arena(model) > SMALL, "nothing moves before the next step"
    both(model, eager, 1)
    shown = stats(model)
    assert arena(model) + shown["budget"]["adapters"] <= SMALL == shown["granted_bytes"] == shown["budget_bytes"]
    assert shown["held_bytes"] <= SMALL and shown["budget_moves"] == 1 and shown["reload_bytes"] > 0
    set_memory_budget(model, LARGE)
    # The plan for it is known, and switched to at once.
    both(model, eager, 2)
    assert arena(model) > SMALL and stats(model)["reload_bytes"] == 0


def test_a_plan_for_a_larger_budget_is_made_while_steps_go_on_by_the_old_one(planned_here: Callable[[], None]) -> None:
    planned_here()
    model, eager = twins(SMALL)
    both(model, eager, 0)
    set_memory_budget(model, LARGE)
    both(model, eager, 1)
    assert arena(model) <= SMALL, "the first step does not wait for it"
    until(lambda: session_of(model).budgets.maker.idle)
    both(model, eager, 2)
    assert arena(model) > SMALL and stats(model)["reload_bytes"] == 0
    assert stats(model)["plans"] == 1, "nothing was captured again"


def test_random_moves_before_each_of_thirty_steps_leave_bits_and_hold_the_budget() -> None:
    model, eager = twins()
    both(model, eager, 0)
    least, chance = needed(model), random.Random(0)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, eager)]
    moves = set()
    for seed in range(30):
        budget = chance.randint(least, 2 * least)
        set_memory_budget(model, budget)
        both(model, eager, seed)
        assert arena(model) + session_of(model).current.budget.outside <= budget
        assert stats(model)["held_bytes"] <= budget
        moves.add(arena(model))
        if chance.random() < 0.7:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(moves) > 2 and stats(model)["budget_moves"] > 5
    assert len(stats(model)["budget_plans"]) <= 8
    assert len(session_of(model).plans) <= 9


def test_nothing_moves_between_a_forward_and_its_backward() -> None:
    model, eager = twins()
    both(model, eager, 0)
    losses = [each(batch(1)) for each in (model, eager)]
    before = session_of(model).current, arena(model)
    set_memory_budget(model, SMALL)
    losses[0].backward()
    # The memory is given back as soon as its backward has ended: another job may wait for it.
    assert session_of(model).arenas == {} and before[1] > SMALL
    losses[1].backward()
    assert torch.equal(losses[0], losses[1])
    assert_same(model, eager)
    both(model, eager, 2)
    assert arena(model) <= SMALL


def test_a_step_that_another_has_suspended_runs_again_within_the_smaller_budget() -> None:
    model, eager = twins()
    both(model, eager, 0)
    firsts = [each(batch(1)) for each in (model, eager)]
    set_memory_budget(model, SMALL)
    seconds = [each(batch(2)) for each in (model, eager)]
    assert 0 < arena(model) <= SMALL
    for first, second in zip(firsts, seconds, strict=True):
        second.backward()
        first.backward()
    assert 0 < arena(model) <= SMALL
    assert_same(model, eager)


def test_a_forward_without_gradients_between_two_steps_needs_no_plan() -> None:
    model, eager = twins()
    both(model, eager, 0)
    set_memory_budget(model, SMALL)
    with torch.no_grad():
        assert torch.equal(model(batch(1)), eager(batch(1)))
    both(model, eager, 2)
    assert arena(model) <= SMALL


@pytest.mark.parametrize("update", ["step", "deferred"])
def test_sums_of_gradients_and_updates_in_the_plan_follow(update: str) -> None:
    model, eager = twins(trained=True, optimizer="host", update=update)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (model, eager)]
    for number, budget in enumerate([LARGE, LARGE, SMALL, 2 * SMALL, SMALL, LARGE]):
        set_memory_budget(model, budget)
        for part in range(3):
            both_grads(model, eager, 10 * number + part)
            assert arena(model) <= budget
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    session_of(model).updates.settle()
    assert_same(model, eager)
    assert stats(model)["steps_accumulated"] >= 10
    if update == "deferred":
        assert stats(model)["updates_planned"] >= 4
        assert sum(isinstance(step, StepWithUpdate) for step in session_of(model).plans.values()) >= 2


def both_grads(model: torch.nn.Module, eager: torch.nn.Module, seed: int) -> None:
    """As ``both``; weights whose update is pending are not looked at."""
    for each in (model, eager):
        each(batch(seed)).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)


def test_several_devices_follow_and_keep_their_layers() -> None:
    model, eager = twins(devices=2, parallel="layers")
    both(model, eager, 0)
    set_memory_budget(model, SMALL // 2)
    both(model, eager, 1)
    assert all(0 < memory.numel() <= SMALL // 2 for memory in session_of(model).arenas.values())
    set_memory_budget(model, LARGE)
    both(model, eager, 2)


def test_a_lora_model_and_its_prompts_follow() -> None:
    model = tiny_lora(layers=1)
    eager = copy.deepcopy(model)
    prepare(model, DiscoConfig(memory_budget="2MiB", device="cpu", plan_cache=None, quiet=True))
    for seed, budget in enumerate(["2MiB", "500KiB", "800KiB"]):
        set_memory_budget(model, budget)
        losses = [each(**random_batch(seed=seed)).loss for each in (model, eager)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert_same(model, eager)
        ids = random_batch(seed=seed)["input_ids"]
        with torch.no_grad():
            ours, theirs = prefill(model.eval(), ids), eager.eval()(ids, use_cache=True, logits_to_keep=1)
        assert torch.equal(ours.logits[:, -1], theirs.logits[:, -1])
        assert stats(model)["held_bytes"] <= stats(model)["granted_bytes"]
        model.train()
        eager.train()


def test_a_budget_that_is_too_small_names_the_one_that_does() -> None:
    model, eager = twins()
    both(model, eager, 0)
    least = needed(model)
    set_memory_budget(model, least - 1)
    with pytest.raises(BudgetTooSmall, match=f"at least {least} bytes"):
        model(batch(0))
    assert arena(model) == 0
    set_memory_budget(model, least)
    both(model, eager, 1)
    assert arena(model) <= least


def test_the_budget_of_a_model_that_is_not_prepared_cannot_be_set() -> None:
    with pytest.raises(ConfigError, match="not prepared"):
        set_memory_budget(Layers(), SMALL)
    model, _ = twins()
    for wrong in ("shared", "some", 0, -1, True, 1 << 60):
        with pytest.raises(ConfigError, match="memory_budget"):
            set_memory_budget(model, wrong)
    assert session_of(model).budgets.source.granted() == LARGE


def test_a_planning_process_that_dies_is_told_and_steps_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, planned_here: Callable[[], None]
) -> None:
    planned_here()
    monkeypatch.setattr(planning_process, "_PROGRAM", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    model, eager = twins(SMALL)
    both(model, eager, 0)
    set_memory_budget(model, LARGE)
    both(model, eager, 1)
    with caplog.at_level(logging.ERROR, "disco_accel"):
        until(lambda: session_of(model).budgets.maker.idle)
    assert "a planning process ended with -9" in caplog.text
    both(model, eager, 2)
    assert arena(model) <= SMALL


def test_restore_ends_the_making_of_plans(planned_here: Callable[[], None]) -> None:
    planned_here()
    model, eager = twins(SMALL)
    both(model, eager, 0)
    set_memory_budget(model, LARGE)
    both(model, eager, 1)
    maker = session_of(model).budgets.maker
    restore(model)
    until(lambda: maker._thread is not None and not maker._thread.is_alive())
    both(model, eager, 2)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Path]:
    """``memory_budget: shared`` takes what this file grants, 1 MiB in all."""
    path = tmp_path / "ledger"
    FileLedger.create(path, LARGE)
    grant_source.use_grants(lambda: FileLedger(path))
    yield path
    grant_source.use_grants(None)


@pytest.mark.usefixtures("ledger")
def test_shared_is_for_one_device_and_not_set_by_hand() -> None:
    with pytest.raises(ConfigError, match="devices: 1"):
        twins("shared", devices=2, parallel="layers")
    model, _ = twins("shared")
    with pytest.raises(ConfigError, match="what a store grants"):
        set_memory_budget(model, SMALL)
    restore(model)


def test_two_models_share_and_hold_no_byte_twice(ledger: Path) -> None:
    (first, eager), (second, _) = twins("shared"), twins("shared")
    watch = FileLedger(ledger)
    for seed in range(6):
        for model in (first, second):
            other = copy.deepcopy(eager)
            model.zero_grad()
            both(model, other, seed)
            assert sum(watch.held()) <= LARGE
    for model in (first, second):
        assert 0 < stats(model)["held_bytes"] <= stats(model)["granted_bytes"]
        assert arena(model) > 0
    budgets = session_of(first).budgets
    until(lambda: budgets.maker.idle)
    assert len(stats(first)["budget_plans"]) >= 3, "plans between the least and the largest useful budget are kept"
    restore(second)
    source = budgets.source
    assert isinstance(source, FileLedger) and sum(watch.held()) == budgets.held
    restore(first)
    assert sum(watch.held()) == 0


def test_an_idle_model_gives_memory_back(ledger: Path) -> None:
    model, eager = twins("shared")
    both(model, eager, 0)
    held = stats(model)["held_bytes"]
    FileLedger(ledger).set_total(held // 2)
    # No step begins or ends.
    until(lambda: not session_of(model).arenas)
    assert stats(model)["held_bytes"] < held // 2
    FileLedger(ledger).set_total(LARGE)
    both(model, eager, 1)
    restore(model)


def test_an_idle_model_does_not_move_before_its_backward(ledger: Path) -> None:
    model, eager = twins("shared")
    both(model, eager, 0)
    losses = [each(batch(1)) for each in (model, eager)]
    before = arena(model)
    FileLedger(ledger).set_total(stats(model)["held_bytes"] // 2)
    time.sleep(0.1)
    assert arena(model) == before > 0
    for loss in losses:
        loss.backward()
    assert arena(model) == 0
    assert_same(model, eager)
    restore(model)


def test_a_step_waits_for_its_grant_and_says_so_once(ledger: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, eager = twins("shared")
    both(model, eager, 0)
    watch = FileLedger(ledger)
    watch.set_total(1000)
    until(lambda: not session_of(model).arenas)
    done = threading.Event()

    def step() -> None:
        model(batch(1)).backward()
        done.set()

    with caplog.at_level(logging.WARNING, "disco_accel"):
        thread = threading.Thread(target=step)
        thread.start()
        until(lambda: "waiting for other jobs" in caplog.text)
        assert not done.is_set() and arena(model) == 0
        watch.set_total(LARGE)
        until(done.is_set)
        thread.join()
    assert caplog.text.count("waiting for other jobs") == 1
    eager(batch(1)).backward()
    assert_same(model, eager)
    session_of(model).budgets.patience = 0.0
    watch.set_total(1000)
    with pytest.raises(BudgetTooSmall):
        model(batch(2))
    restore(model)


def test_the_first_step_waits_for_its_first_grant(ledger: Path) -> None:
    watch = FileLedger(ledger)
    watch.set_total(0)
    model, eager = twins("shared")
    timer = threading.Timer(0.3, watch.set_total, (LARGE,))
    timer.start()
    both(model, eager, 0)
    assert 0 < stats(model)["held_bytes"] <= LARGE
    timer.join()
    restore(model)


def test_a_model_that_is_dropped_leaves_its_grant_to_others(ledger: Path) -> None:
    model, eager = twins("shared")
    both(model, eager, 0)
    watch = FileLedger(ledger)
    assert sum(watch.held()) > 0
    del model
    gc.collect()
    until(lambda: sum(watch.held()) == 0)


def test_a_job_whose_need_ends_leaves_memory_to_the_other(ledger: Path) -> None:
    """What it wishes for is what its recent steps could use, not what an earlier one could."""
    model, eager = twins("shared")
    for _ in range(2):
        for rows in (8, 48):
            losses = [each(batch(rows, rows)) for each in (model, eager)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
    budgets = session_of(model).budgets
    until(lambda: budgets.maker.idle)
    wishes = []
    for rows in (48, 8, 8, 8, 8, 8, 48):
        model(batch(rows, rows)).backward()
        wishes.append(budgets._wish)
    assert wishes[0] == wishes[3] > wishes[5] < wishes[6]
    restore(model)


def test_a_grant_that_shrinks_while_it_is_claimed_is_not_used() -> None:
    class Withdrawing(grant_source.GivenBudget):
        """Grants less as soon as it hears that all of it is about to be used, once."""

        withdrawn = 0

        def hold(self, nbytes: int) -> None:
            if nbytes > SMALL:
                self.nbytes, self.withdrawn = SMALL, self.withdrawn + 1

    model, eager = twins()
    budgets = session_of(model).budgets
    budgets.source, budgets.moving = Withdrawing(LARGE), True
    both(model, eager, 0)
    assert 0 < arena(model) <= SMALL and budgets.source.withdrawn == 1
    both(model, eager, 1)


def test_a_weight_that_changes_between_a_forward_and_its_backward_is_still_an_error() -> None:
    model, eager = twins()
    both(model, eager, 0)
    first = model(batch(1))
    set_memory_budget(model, SMALL)
    model(batch(2)).backward()
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
    with pytest.raises(ExecutionError, match="changed in place"):
        first.backward()
