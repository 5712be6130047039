"""Scripts that try smaller batches until one fits, as Trainer's ``auto_find_batch_size`` does."""

from __future__ import annotations

import torch
from accelerate.utils import find_executable_batch_size

from disco_accel import DiscoConfig, prepare, restore
from disco_accel.errors import BudgetTooSmall
from disco_accel.shortage import met_shortage
from tests.support.models import random_batch, tiny_lora


def gradients(model: torch.nn.Module, rows: int) -> list[torch.Tensor]:
    model(**random_batch(batch=rows)).loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def least_budget(rows: int) -> int:
    model = prepare(tiny_lora(), DiscoConfig(memory_budget=4096, device="cpu", plan_cache=None))
    try:
        gradients(model, rows)
    except BudgetTooSmall as error:
        assert not met_shortage(error), "the next try would have the same budget"
        return error.needed
    raise AssertionError("a step in 4 KiB")


def test_a_batch_that_needs_more_than_the_budget_is_followed_by_a_smaller_one() -> None:
    model = prepare(tiny_lora(), DiscoConfig(memory_budget=least_budget(2), device="cpu", plan_cache=None))
    tried = []

    @find_executable_batch_size(starting_batch_size=32, reduce_batch_size_fn=lambda: (tried[-1] + 1) // 4)
    def train(rows: int) -> list[torch.Tensor]:
        tried.append(rows)
        return gradients(model, rows)

    found = train()
    assert tried == [32, 8, 2]
    assert all(map(torch.equal, found, gradients(restore(model), 2)))
