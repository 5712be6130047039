"""``memory_budget: shared``: jobs that take what a ledger grants, and hold no byte twice."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from disco_accel import restore, set_memory_budget, stats
from disco_accel.errors import BudgetTooSmall, ConfigError
from disco_accel.step.budget import grant_source
from tests.step.moving_budgets import LARGE, SMALL, arena, assert_same, batch, both, plan_here, session_of, twins, until
from tests.support.file_ledger import FileLedger


@pytest.fixture(autouse=True)
def planned_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Plans are made in this process; what is returned undoes it."""
    return plan_here(monkeypatch)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Path]:
    """``memory_budget: shared`` takes what this file grants, 1 MiB in all."""
    path = tmp_path / "ledger"
    FileLedger.create(path, LARGE)
    grant_source.use_grants(lambda: FileLedger(path))
    yield path
    grant_source.use_grants(None)


@pytest.mark.usefixtures("ledger")
def test_shared_is_not_set_by_hand() -> None:
    model, _ = twins("shared")
    with pytest.raises(ConfigError, match="what a store grants"):
        set_memory_budget(model, SMALL)
    restore(model)


def test_several_devices_take_what_is_granted_on_each(ledger: Path) -> None:
    model, eager = twins("shared", devices=2, parallel="layers")
    both(model, eager, 0)
    assert len(session_of(model).memory.arenas) == 2
    watch, minimum = FileLedger(ledger), SMALL // 2
    for seed, total in enumerate((minimum, LARGE, minimum, LARGE), 1):
        watch.set_total(total)
        until(lambda total=total: session_of(model).budgets.grant.source.granted() <= total)
        both(model, eager, seed)
        assert all(0 < memory.numel() <= total for memory in session_of(model).memory.arenas.values())
        assert stats(model)["held_bytes"] <= total
    assert stats(model)["budget_moves"] >= 2
    restore(model)
    assert sum(watch.held()) == 0


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
    until(lambda: budgets.plan_sets.maker.idle)
    assert len(stats(first)["budget_plans"]) >= 3, "plans between the minimum and the largest useful budget are kept"
    restore(second)
    source = budgets.grant.source
    assert isinstance(source, FileLedger) and sum(watch.held()) == budgets.grant.held
    restore(first)
    assert sum(watch.held()) == 0


def test_an_idle_model_gives_memory_back(ledger: Path) -> None:
    model, eager = twins("shared")
    both(model, eager, 0)
    held = stats(model)["held_bytes"]
    FileLedger(ledger).set_total(held // 2)
    # No step begins or ends.
    until(lambda: not session_of(model).memory.arenas)
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
    until(lambda: not session_of(model).memory.arenas)
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
    session_of(model).budgets.grant.patience = 0.0
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


@pytest.mark.long
def test_a_job_whose_need_ends_leaves_memory_to_the_other(ledger: Path) -> None:
    """It asks for the most that its recent steps could use, not for the most of an earlier one."""
    model, eager = twins("shared")
    for _ in range(2):
        for rows in (8, 48):
            losses = [each(batch(rows, rows)) for each in (model, eager)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
    budgets = session_of(model).budgets
    until(lambda: budgets.plan_sets.maker.idle)
    asked = []
    for rows in (48, 8, 8, 8, 8, 8, 48):
        model(batch(rows, rows)).backward()
        asked.append(budgets.grant.max_useful)
    assert asked[0] == asked[3] > asked[5] < asked[6]
    restore(model)
