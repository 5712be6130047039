"""A memory budget that moves between steps: bits stay, the arena follows, and nothing moves within a step."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable

import pytest
import torch

from disco_accel import DiscoConfig, prefill, prepare, restore, set_memory_budget, stats
from disco_accel.errors import BudgetTooSmall, ConfigError, ExecutionError
from disco_accel.plan import planning_process
from disco_accel.step.budget import grant_source
from disco_accel.step.update.updated_step import StepWithUpdate
from tests.step.moving_budgets import (
    LARGE,
    SMALL,
    Layers,
    arena,
    assert_same,
    batch,
    both,
    plan_here,
    session_of,
    twins,
    until,
)
from tests.store.serving import in_child
from tests.support.models import random_batch, tiny_lora


@pytest.fixture(autouse=True)
def planned_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Plans are made in this process; what is returned undoes it."""
    return plan_here(monkeypatch)


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
    assert arena(model) == 0 and stats(model)["held_bytes"] <= SMALL, "given back at once between two steps"
    both(model, eager, 1)
    shown = stats(model)
    assert arena(model) + shown["budget"]["adapters"] <= SMALL == shown["granted_bytes"] == shown["budget_bytes"]
    assert shown["held_bytes"] <= SMALL and shown["budget_moves"] == 1 and shown["reload_bytes"] > 0
    set_memory_budget(model, LARGE)
    # The plan for it is known, and switched to at once.
    both(model, eager, 2)
    assert arena(model) > SMALL and stats(model)["reload_bytes"] == 0


def test_a_better_plan_for_the_same_budget_takes_the_place_of_the_first() -> None:
    """The table of plans has the one that runs, or nobody would free its engine and the threads of it."""
    model, eager = twins()
    both(model, eager, 0)
    session = session_of(model)
    (family,) = session.budgets.plan_sets.all()
    (first,) = family.members()
    set_memory_budget(model, SMALL)
    both(model, eager, 1)
    first.seconds = float("inf")
    better = family.make(LARGE).plain
    set_memory_budget(model, LARGE)
    both(model, eager, 2)
    assert better is not first.plain and better.loaded is not None and first.plain.loaded is None
    assert any(step is better for step in session.memory.plans.values())


def test_a_plan_for_a_larger_budget_is_made_while_steps_go_on_by_the_old_one(planned_here: Callable[[], None]) -> None:
    planned_here()
    model, eager = twins(SMALL)
    both(model, eager, 0)
    set_memory_budget(model, LARGE)
    both(model, eager, 1)
    assert arena(model) <= SMALL, "the first step does not wait for it"
    until(lambda: session_of(model).budgets.plan_sets.maker.idle)
    both(model, eager, 2)
    assert arena(model) > SMALL and stats(model)["reload_bytes"] == 0
    assert stats(model)["plans"] == 1, "nothing was captured again"


def test_random_moves_before_each_of_thirty_steps_leave_bits_and_hold_the_budget() -> None:
    model, eager = twins()
    both(model, eager, 0)
    minimum, chance = needed(model), random.Random(0)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, eager)]
    moves = set()
    for seed in range(30):
        budget = chance.randint(minimum, 2 * minimum)
        set_memory_budget(model, budget)
        both(model, eager, seed)
        assert arena(model) + session_of(model).memory.current.budget.outside <= budget
        assert stats(model)["held_bytes"] <= budget
        moves.add(arena(model))
        if chance.random() < 0.7:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(moves) > 2 and stats(model)["budget_moves"] > 2
    assert len(stats(model)["budget_plans"]) <= 8
    assert len(session_of(model).memory.plans) <= 9


def test_nothing_moves_between_a_forward_and_its_backward() -> None:
    model, eager = twins()
    both(model, eager, 0)
    losses = [each(batch(1)) for each in (model, eager)]
    before = session_of(model).memory.current, arena(model)
    set_memory_budget(model, SMALL)
    losses[0].backward()
    # The memory is given back as soon as its backward has ended: another job may wait for it.
    assert session_of(model).memory.arenas == {} and before[1] > SMALL
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
        assert sum(isinstance(step, StepWithUpdate) for step in session_of(model).memory.plans.values()) >= 2


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
    assert all(0 < memory.numel() <= SMALL // 2 for memory in session_of(model).memory.arenas.values())
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
    minimum = needed(model)
    set_memory_budget(model, minimum - 1)
    with pytest.raises(BudgetTooSmall, match=f"at least {minimum} bytes"):
        model(batch(0))
    assert arena(model) == 0
    set_memory_budget(model, minimum)
    both(model, eager, 1)
    assert arena(model) <= minimum


def test_the_budget_of_a_model_that_is_not_prepared_cannot_be_set() -> None:
    with pytest.raises(ConfigError, match="not prepared"):
        set_memory_budget(Layers(), SMALL)
    model, _ = twins()
    for wrong in ("shared", "some", 0, -1, True, 1 << 60):
        with pytest.raises(ConfigError, match="memory_budget"):
            set_memory_budget(model, wrong)
    assert session_of(model).budgets.grant.granted() == LARGE


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
        until(lambda: session_of(model).budgets.plan_sets.maker.idle)
    assert "a planning process ended with -9" in caplog.text
    both(model, eager, 2)
    assert arena(model) <= SMALL


def test_restore_ends_the_making_of_plans(planned_here: Callable[[], None]) -> None:
    planned_here()
    model, eager = twins(SMALL)
    both(model, eager, 0)
    set_memory_budget(model, LARGE)
    both(model, eager, 1)
    maker = session_of(model).budgets.plan_sets.maker
    restore(model)
    until(lambda: maker._thread is not None and not maker._thread.is_alive())
    both(model, eager, 2)


def test_a_grant_that_shrinks_while_it_is_claimed_is_not_used() -> None:
    class Withdrawing(grant_source.GrantSource):
        """Grants less as soon as it hears that all of it is about to be used, once."""

        nbytes, withdrawn = LARGE, 0

        def granted(self) -> int:
            return self.nbytes

        def hold(self, nbytes: int) -> None:
            if nbytes > SMALL:
                self.nbytes, self.withdrawn = SMALL, self.withdrawn + 1

    model, eager = twins()
    budgets = session_of(model).budgets
    budgets.grant.source, budgets.grant.moving = Withdrawing(), True
    both(model, eager, 0)
    assert 0 < arena(model) <= SMALL and budgets.grant.source.withdrawn == 1
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


def test_a_process_that_is_forked_while_a_plan_is_made_leaves_it_to_its_parent(
    planned_here: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    planned_here()
    model, eager = twins(SMALL)
    both(model, eager, 0)
    set_memory_budget(model, LARGE)
    both(model, eager, 1)
    maker = session_of(model).budgets.plan_sets.maker
    assert not maker.idle

    def child() -> None:
        with pytest.raises(ExecutionError, match=r"call restore\(model\)"):
            model(batch(2))
        restore(model)
        for each in (model, eager):
            each.zero_grad()
        both(model, eager, 2)

    assert in_child(child) == 0
    until(lambda: maker.idle)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors, "the child has ended what its parent was making"
    both(model, eager, 2)
    assert arena(model) > SMALL
