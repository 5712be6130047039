"""``optimizer: host``: all weights of a model are trained in host memory, to the bits of eager mode."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import BudgetTooSmall
from disco_accel.testing.models import family_full, random_batch

STEPS, ACCUMULATED = 5, 2


def config(budget: int = 1 << 30, **keys: Any) -> DiscoConfig:
    return DiscoConfig(**({"memory_budget": budget, "device": "cpu", "optimizer": "host", "plan_cache": None} | keys))


def full(family: str, dtype: torch.dtype = torch.float32, checkpointing: bool = False) -> torch.nn.Module:
    tied = {"tie_word_embeddings": True} if family == "qwen3" else {}
    return family_full(family, dtype=dtype, checkpointing=checkpointing, **tied)


@functools.cache
def least(family: str, dtype: torch.dtype, checkpointing: bool) -> int:
    with pytest.raises(BudgetTooSmall) as caught:
        prepare(full(family, dtype, checkpointing), config(1))(**random_batch())
    return caught.value.needed


def train(model: torch.nn.Module) -> tuple[list[torch.Tensor], dict[str, tuple[torch.Tensor, ...]]]:
    """Losses, then each weight with both of its moments."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    losses = []
    for step in range(STEPS):
        for part in range(ACCUMULATED):
            loss = model(**random_batch(seed=step * ACCUMULATED + part)).loss / ACCUMULATED
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    states = optimizer.state
    return losses, {n: (p, states[p]["exp_avg"], states[p]["exp_avg_sq"]) for n, p in model.named_parameters()}


def assert_same_training(model: torch.nn.Module, eager: torch.nn.Module) -> None:
    (losses, weights), (eager_losses, eager_weights) = train(model), train(eager)
    assert all(map(torch.equal, losses, eager_losses))
    for name, expected in eager_weights.items():
        assert all(map(torch.equal, weights[name], expected)), name


CASES = {
    ("llama", torch.float32): False,
    ("gpt2", torch.bfloat16): True,
    ("qwen3", torch.float32): True,
    ("qwen3", torch.bfloat16): False,
    ("gemma2", torch.bfloat16): False,
}
"""Family and dtype → activation checkpointing."""


@pytest.mark.parametrize("budget", ["least", "half", "all"])
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_weights_and_moments_are_eager_ones(family: str, dtype: torch.dtype, budget: str) -> None:
    """Accumulation, clipping and a schedule; tied embeddings (GPT-2, Gemma 2, Qwen3 here)."""
    checkpointing = CASES[family, dtype]
    eager = full(family, dtype, checkpointing)
    weights = sum(p.nbytes for p in eager.parameters())
    smallest = least(family, dtype, checkpointing)
    nbytes = {"least": smallest, "half": max(smallest, weights // 2), "all": 1 << 30}[budget]
    model = prepare(full(family, dtype, checkpointing), config(nbytes))
    assert_same_training(model, eager)
    figures = stats(model)
    assert figures["optimizer"] == "host" and figures["plans"] == 1 and figures["steps_eager"] == 0
    parts = figures["budget"]
    assert parts["adapters"] == parts["gradients"] == parts["optimizer"] == 0
    assert figures["peak_bytes"] <= nbytes
    assert figures["reload_bytes"] >= (weights if budget != "all" else 0)
