"""A deadline for planning, and a key that the planner does not look at: both are said, and training is right."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import ConfigError
from tests.support.models import random_batch, tiny_lora


def test_a_step_planned_after_the_deadline_has_the_bits_of_eager(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each plan that was cut short, one for the policy, however many steps there are."""
    eager = tiny_lora(layers=1, hidden=32)
    config = DiscoConfig(memory_budget=80_000, device="cpu", plan_cache=None, plan_seconds=0, policy="lru")
    planned = prepare(copy.deepcopy(eager), config)
    with caplog.at_level(logging.WARNING, logger="disco_accel"):
        for seed, length in enumerate((16, 16, 16)):
            batch = random_batch(length=length, seed=seed)
            ours, theirs = planned(**batch).loss, eager(**batch).loss
            assert torch.equal(ours, theirs)
            ours.backward()
            theirs.backward()
    grads = [(p.grad, q.grad) for p, q in zip(planned.parameters(), eager.parameters(), strict=True)]
    assert all(torch.equal(a, b) for a, b in grads if a is not None and b is not None)
    assert stats(planned)["steps_compiled"] == 3 and stats(planned)["plans"] == 1
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("plan_seconds: 0: the search for a plan ended") for line in lines) == 1
    assert sum("policy: lru has no effect with planner: timed" in line for line in lines) == 1


def test_the_environment_and_the_config_set_the_deadline() -> None:
    assert DiscoConfig().deadline is None and DiscoConfig(plan_seconds="auto").deadline is None
    assert DiscoConfig(plan_seconds=12).deadline == 12.0
    assert DiscoConfig.from_env(environ={"DISCO_PLAN_SECONDS": "2.5"}).deadline == 2.5
    with pytest.raises(ConfigError, match=r"DISCO_PLAN_SECONDS.*use auto, or seconds"):
        DiscoConfig.from_env(environ={"DISCO_PLAN_SECONDS": "soon"})
