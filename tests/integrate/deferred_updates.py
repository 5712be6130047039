"""Models whose updates are put off, and eager ones beside them, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disco_accel import DiscoConfig, prepare
from disco_accel.errors import BudgetTooSmall
from disco_accel.step.run.session import find_state
from disco_accel.step.update.updated_step import StepWithUpdate
from tests.support.models import family_full, random_batch

STEPS, ACCUMULATED = 5, 2


def one_layer(**keys: Any) -> torch.nn.Module:
    """All that is asked of an update but its place among those of other layers."""
    return family_full("llama", num_hidden_layers=1, **keys)


def config(budget: int = 1 << 30, **keys: Any) -> DiscoConfig:
    ours = {"memory_budget": budget, "device": "cpu", "optimizer": "host", "update": "deferred", "plan_cache": None}
    return DiscoConfig(**(ours | keys))


def prepared(model: torch.nn.Module, budget: int = 1 << 30) -> torch.nn.Module:
    """``model`` prepared with ``budget`` bytes, or the least that a plan needs, which depends on measured times."""
    for _ in range(6):
        prepare(model, config(budget))
        try:
            model(**random_batch())
        except BudgetTooSmall as error:
            budget = error.needed
        else:
            return model
    raise AssertionError(f"no plan in {budget} bytes, which was said to be enough")


def adamw(model: torch.nn.Module, **keys: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **({"lr": 1e-2, "fused": True} | keys))


def backward(model: torch.nn.Module, step: int) -> list[torch.Tensor]:
    """Losses of the parts of one step."""
    losses = []
    for part in range(ACCUMULATED):
        loss = model(**random_batch(seed=step * ACCUMULATED + part)).loss / ACCUMULATED
        loss.backward()
        losses.append(loss.detach())
    return losses


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, between: Callable[[], Any] = int
) -> list[torch.Tensor]:
    """Losses. ``between`` runs behind each update."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    losses = []
    for step in range(steps):
        losses += backward(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        between()
    return losses


def assert_same(model: torch.nn.Module, ours: Any, eager: torch.nn.Module, theirs: Any) -> None:
    """Weights and the state of the optimizers, as their libraries show them."""
    shown, expected = model.state_dict(), eager.state_dict()
    assert shown.keys() == expected.keys() and all(torch.equal(shown[name], expected[name]) for name in expected)
    states = [optimizer.state_dict()["state"] for optimizer in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[1].items():
        assert all(torch.equal(states[0][number][key], value) for key, value in state.items()), number


def with_update(model: torch.nn.Module) -> StepWithUpdate:
    """The plan that begins with an update."""
    state = find_state(model)
    assert state is not None
    return next(step for step in state.memory.plans.values() if isinstance(step, StepWithUpdate))
