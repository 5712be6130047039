"""What a user is told of larger budgets: by a refusal, and by ``stats`` after a step."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from disco_accel import DiscoConfig, prepare, set_memory_budget, stats
from disco_accel.errors import BudgetTooSmall
from disco_accel.sizes import size_for_people
from tests.support.models import random_batch, tiny_lora


def prepared(budget: int | str) -> torch.nn.Module:
    """On the host device, behind a link that is slower than any kernel."""
    keys = {"device": "cpu", "plan_cache": None, "fuse": "off", "link_bandwidth": "0.05GB/s"}
    return prepare(tiny_lora(layers=1, hidden=32, checkpointing=True), DiscoConfig(memory_budget=budget, **keys))


def step(model: torch.nn.Module) -> None:
    model(**random_batch(96, length=8)).loss.backward()


def test_a_refusal_names_budgets_and_stats_the_gain_of_more() -> None:
    """In words and in bytes. With the first of the two that it names a step loads some, and with the other none."""
    with pytest.raises(BudgetTooSmall) as caught:
        step(prepared("10KiB"))
    error = caught.value
    half, stays = error.useful_budgets["half_loads"], error.useful_budgets["all_stays"]
    assert error.needed < half < stays
    assert all(size_for_people(size) in str(error) for size in (error.needed, half, stays))
    model, ample = prepared(half), prepared(stays)
    assert "next_gib" not in stats(model), "no plan"
    step(model)
    step(ample)
    figures = json.loads(json.dumps(stats(model)))
    gain, useful = figures["next_gib"], figures["useful_budgets"]
    assert gain["more_bytes"] == half // 10
    assert 0 < gain["loads_saved_bytes"] <= figures["reload_bytes"]
    assert 0 < gain["seconds"] <= gain["seconds_at_most"]
    assert half < useful["half_loads"] < useful["all_stays"]
    assert stats(ample)["reload_bytes"] == stats(ample)["next_gib"]["loads_saved_bytes"] == 0
    assert not stats(ample)["useful_budgets"]


def test_auto_is_explained_once_and_again_when_it_is_set(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "disco_accel")
    model = prepared("auto")
    why = stats(model)["budget_why"]
    assert why.startswith("memory_budget auto: ") and "50% of" in why
    said = [line for line in caplog.messages if "memory_budget" in line]
    assert said == [f"LlamaForCausalLM: {why}"]
    set_memory_budget(model, "16MiB")
    assert stats(model)["budget_why"] == "" and len(caplog.messages) == 2
    set_memory_budget(model, "25%")
    assert stats(model)["budget_why"].startswith("memory_budget 25%: ")
    assert stats(model)["budget_why"] in caplog.messages[-1]
