"""Training steps under budgets of all sizes: losses, gradients and weights, to be compared with eager ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import BudgetTooSmall
from tests.support.models import random_batch

Make = Callable[[], torch.nn.Module]
Values = dict[str, torch.Tensor]
_STEPS, _PARTS = 2, 2
_LEARNING_RATE = 0.02


def trained(model: torch.nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> Values:
    """All that some steps make, two micro-batches each: losses, sums of gradients, weights, and random numbers drawn.

    Sums are copied behind each micro-batch, and weights behind each step of the ``optimizer``.
    """
    torch.manual_seed(7)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    update = optimizer(weights.values(), lr=_LEARNING_RATE)  # type: ignore[call-arg]
    got: Values = {}
    for step in range(_STEPS):
        for part in range(_PARTS):
            loss = model(**random_batch(batch=2, length=24, seed=_PARTS * step + part)).loss / _PARTS
            loss.backward()
            got[f"{step}.{part} loss"] = loss.detach()
            got |= {f"{step}.{part} grad {n}": p.grad.clone() for n, p in weights.items() if p.grad is not None}
        update.step()
        update.zero_grad()
        got |= {f"{step} {n}": p.detach().clone() for n, p in weights.items()}
    got["generator"] = torch.get_rng_state()
    return got


def differing(got: Values, want: Values) -> list[str]:
    """The names of values that are not there, or differ in a bit."""
    return sorted(
        n for n in got.keys() | want.keys() if n not in got or n not in want or not torch.equal(got[n], want[n])
    )


def planned(
    make: Make, budget: int, by: type[torch.optim.Optimizer] = torch.optim.SGD, **keys: Any
) -> tuple[Values, dict[str, Any]]:
    """As ``trained`` of what ``make`` makes, under ``budget``, with the figures of its plan. ``keys``: of a config."""
    config = DiscoConfig(memory_budget=budget, **({"device": "cpu", "plan_cache": None, "buckets": "off"} | keys))
    model = prepare(make(), config)
    return trained(model, by), stats(model)


def least(make: Make, **keys: Any) -> int:
    """The smallest budget that has a plan, as the refusal of a smaller one names it."""
    with pytest.raises(BudgetTooSmall) as error:
        planned(make, 4096, **keys)
    return error.value.needed
