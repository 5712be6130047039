"""``memory_budget: shared`` through a store: other clients take and give memory, the store ends and comes back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from disco_accel.errors import BudgetTooSmall, StoreGone
from disco_accel.store import shared_budgets
from disco_accel.store.client import Store
from tests.step.moving_budgets import LARGE, SMALL, arena, batch, both, plan_here, session_of, twins, until
from tests.store.serving import serving


@pytest.fixture(autouse=True)
def store_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of this process find the store of the test, and plans are made in this process."""
    monkeypatch.setenv("DISCO_STORE", str(tmp_path / "own" / "store"))
    monkeypatch.setattr(shared_budgets, "RECONNECT_SECONDS", 0.0)
    plan_here(monkeypatch)


def test_a_model_makes_room_for_programs_that_the_store_hears_of(tmp_path: Path) -> None:
    with serving(tmp_path, device=LARGE) as server, Store.connect(server.path) as other:
        model, eager = twins("shared")
        both(model, eager, 0)
        before = arena(model)
        assert SMALL < before <= LARGE
        other.report(0, LARGE - SMALL)
        until(lambda: session_of(model).budgets.grant.source.granted() <= SMALL)
        both(model, eager, 1)
        assert arena(model) <= SMALL
        other.report(0, SMALL - LARGE)
        until(lambda: session_of(model).budgets.grant.source.granted() > before)
        both(model, eager, 2)
        assert server.path.exists()
        session_of(model).close()


def test_a_store_that_ends_leaves_the_last_grant_until_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "disco_accel")
    with serving(tmp_path, device=LARGE):
        model, eager = twins("shared")
        both(model, eager, 0)
    source = session_of(model).budgets.grant.source
    until(lambda: source.granted() > 0 and "keeps the" in caplog.text)
    granted = source.granted()
    both(model, eager, 1)
    assert source.granted() == granted
    with serving(tmp_path, device=LARGE) as server, Store.connect(server.path) as other:
        until(lambda: source.granted() > 0 and "the store is back" in caplog.text)
        assert any(client["held"] > 0 for client in other.stats()["clients"])
        other.report(0, LARGE - SMALL)
        until(lambda: source.granted() <= SMALL)
        both(model, eager, 2)
        assert arena(model) <= SMALL
        session_of(model).close()


def test_without_a_store_prepare_says_how_to_start_one() -> None:
    with pytest.raises(StoreGone, match="start one with: disco-accel store serve"):
        twins("shared")


@pytest.mark.parametrize("limit", [{"device": SMALL // 8}, {"quotas": {"tight": SMALL // 8}}])
def test_a_step_that_no_grant_would_do_for_is_refused_at_once(
    tmp_path: Path, limit: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is too small for it, or the quota of the job's label."""
    monkeypatch.setenv("DISCO_STORE_LABEL", "tight")
    with serving(tmp_path, **limit):
        model, _ = twins("shared")
        with pytest.raises(BudgetTooSmall):
            model(batch(0))
        session_of(model).close()
