"""``host_memory: shared``: what training holds on the host counts in a store like objects, and ends with the job."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch

from disco_accel import restore, stats
from disco_accel.errors import ConfigError, ExecutionError, StoreFull, StoreGone
from disco_accel.store import shared_budgets
from disco_accel.store.client import Store
from tests.step.moving_budgets import LARGE, Layers, assert_same, batch, session_of, twins, until
from tests.store.serving import MIB, filled, in_child, serving

ROWS = 256
"""So many that values are offloaded in 1 MiB."""


@pytest.fixture(autouse=True)
def store_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of this process find the store of the test."""
    monkeypatch.setenv("DISCO_STORE", str(tmp_path / "own" / "store"))
    monkeypatch.setattr(shared_budgets, "RECONNECT_SECONDS", 0.0)
    monkeypatch.setattr(shared_budgets, "POLL_SECONDS", 0.01)


def step(model: torch.nn.Module, eager: torch.nn.Module, seed: int) -> None:
    losses = [each(batch(seed, ROWS)) for each in (model, eager)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert_same(model, eager)


def weights() -> int:
    return sum(weight.nbytes for weight in Layers().layers.parameters())


def test_weights_and_offloaded_values_count_while_they_are_held(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as watch:
        model, eager = twins(LARGE, host_memory="shared")
        assert watch.stats()["host_used"] == weights() == stats(model)["host_held_bytes"]
        step(model, eager, 0)
        offloaded = session_of(model).memory.current.plan.host.memory
        assert offloaded > 0 and watch.stats()["host_used"] == weights() + offloaded
        session_of(model).memory.unload()
        assert watch.stats()["host_used"] == weights()
        step(model, eager, 1)
        assert stats(model)["host_held_bytes"] == watch.stats()["host_used"] == weights() + offloaded
        restore(model)
        until(lambda: watch.stats()["host_used"] == 0)
        # A model that is dropped lets go too.
        model, _ = twins(LARGE, host_memory="shared")
        assert watch.stats()["host_used"] == weights()
        del model
        gc.collect()
        until(lambda: watch.stats()["host_used"] == 0)


def test_copies_of_others_make_room_and_the_quota_holds(tmp_path: Path) -> None:
    with serving(tmp_path, host=weights() + LARGE, device=MIB) as server, Store.connect(server.path) as other:
        kept = [filled(other, MIB // 2, value) for value in range(2)]
        # The store copies what is idle ahead, as far as the host has room.
        until(lambda: other.stats()["host_used"] > LARGE // 4)
        model, eager = twins(LARGE, host_memory="shared")
        step(model, eager, 0)
        assert stats(model)["host_held_bytes"] > weights()
        assert [int(other.get(id)[0]) for id in kept] == [0, 1]
        restore(model)
    with serving(tmp_path, quota=weights() + 1000) as server, Store.connect(server.path) as watch:
        model, eager = twins(LARGE, host_memory="shared")
        with pytest.raises(StoreFull, match=r"host_memory: shared: no room for .* of offloaded values: store: quota"):
            step(model, eager, 0)
        assert stats(model)["host_held_bytes"] == weights() == watch.stats()["host_used"]
        restore(model)
        until(lambda: watch.stats()["host_used"] == 0)
    with serving(tmp_path, quota=1000):
        model = Layers()
        with pytest.raises(StoreFull, match="of weights: store: quota"):
            twins(LARGE, host_memory="shared")
    with serving(tmp_path, host=weights() + 5000):
        model, eager = twins(LARGE, host_memory="shared")
        with pytest.raises(ConfigError, match=r"host_memory: .* is too small"):
            step(model, eager, 0)
        restore(model)


def test_a_store_that_ends_leaves_the_memory_until_it_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "disco_accel")
    with serving(tmp_path):
        model, eager = twins(LARGE, host_memory="shared")
        step(model, eager, 0)
    until(lambda: "This job keeps the" in caplog.text)
    step(model, eager, 1)
    session_of(model).memory.unload()
    step(model, eager, 2)
    with serving(tmp_path, quota=weights()):
        until(lambda: "others are not told of it yet" in caplog.text)
        step(model, eager, 3)
    with serving(tmp_path) as server, Store.connect(server.path) as watch:
        until(lambda: "the store is back" in caplog.text)
        assert watch.stats()["host_used"] == stats(model)["host_held_bytes"] > weights()
        step(model, eager, 4)
        restore(model)
        until(lambda: watch.stats()["host_used"] == 0)
    assert caplog.text.count("This job keeps the") == 1


def test_without_a_store_prepare_says_how_to_start_one() -> None:
    with pytest.raises(StoreGone, match="start one with: disco-accel store serve"):
        twins(LARGE, host_memory="shared")


@pytest.mark.parametrize("keys", [{"host_memory": "shared"}, {"budget": "shared"}])
def test_a_forked_process_restores_the_model_and_takes_nothing_from_its_parent(tmp_path: Path, keys: dict) -> None:
    with serving(tmp_path) as server, Store.connect(server.path) as watch:
        model, eager = twins(**keys)
        step(model, eager, 0)
        before = watch.stats()

        def child() -> None:
            with pytest.raises(ExecutionError, match=r"call restore\(model\)"):
                model(batch(1, ROWS))
            restore(model)
            losses = [each(batch(1, ROWS)) for each in (model, eager)]
            assert torch.equal(*losses)

        assert in_child(child) == 0
        after, same = watch.stats(), ("host_used", "budgets", "jobs")
        assert [after[key] for key in same] == [before[key] for key in same]
        step(model, eager, 1)
        restore(model)
