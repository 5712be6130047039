"""What runs was judged against the budget, not against what the planner says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import VerifyError
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.plan import make_plan
from disco_accel.plan.select import Planned
from disco_accel.step.compile import pipeline
from tests.support.models import random_batch, tiny_lora

CONFIG = DiscoConfig(memory_budget=500_000, device="cpu", plan_cache=None)


def test_a_planner_that_ignores_the_budget_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def generous(graph: TaskGraph, *_: Any, **asked: Any) -> Planned:
        return make_plan(with_memory(graph, lambda device: 1 << 30), cyclic=True, planner="build"), ()

    monkeypatch.setattr(pipeline, "decide", generous)
    with pytest.raises(VerifyError, match="device 0: the plan counts on 1073741824 bytes"):
        prepare(tiny_lora(), CONFIG)(**random_batch())


def test_a_planner_that_hides_the_size_of_the_device_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that says it is for the budget, with an address behind its end."""

    def sly(graph: TaskGraph, *_: Any, **asked: Any) -> Planned:
        plan = make_plan(with_memory(graph, lambda device: 1 << 30), cyclic=True, planner="build")
        return replace(plan, spaces=(*graph.devices, plan.host)), ()

    monkeypatch.setattr(pipeline, "decide", sly)
    with pytest.raises(VerifyError, match="outside the"):
        prepare(tiny_lora(), CONFIG)(**random_batch())


def test_what_runs_keeps_to_the_budget() -> None:
    model = prepare(tiny_lora(), CONFIG)
    model(**random_batch()).loss.backward()
    assert stats(model)["arena_bytes"] <= 500_000
