"""Forwards between updates that the host does to weights on a GPU: their residents follow each update."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.native.backend import workspace_bytes
from disco_accel.native.host_memory import writes_are_watched
from tests.gpu.test_steps import expect


def evaluated(model: Any, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**batch_for(SMALL["vocab_size"], 2, 16, device, seed=5)).logits
    return logits


def trained_once(model: Any, device: torch.device, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**batch_for(SMALL["vocab_size"], 2, 16, device, seed=seed)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.usefixtures("random_order")
def test_logits_are_those_of_the_weights_as_they_are(device: torch.device) -> None:
    """Between steps, twice in a row, and behind a write by hand; beside the same weights in eager mode on the GPU."""
    model: Any = (
        arena_llama(SMALL, dtype=torch.float32, attention="eager", source=device)[0].eval().requires_grad_(True)
    )
    twin = copy.deepcopy(model).to(device)
    weights = sum(p.nbytes for p in model.parameters())
    # A part of it is for launch graphs.
    budget = (2 * workspace_bytes(device) + weights + (1 << 18)) * 64 // 63
    prepare(model, DiscoConfig(memory_budget=budget, device=device.type, optimizer="host", plan_cache=None))
    for seed in range(3):
        for _ in range(2):
            twin.load_state_dict(model.state_dict())
            expect(evaluated(twin, device), evaluated(model, device), f"logits after {seed} updates")
            model.lm_head.weight.data[1, 2] += 1.0
        trained_once(model, device, seed)
    figures = stats(model)
    assert figures["forwards_unplanned"] == 0 and figures["steps_eager"] == 0
    evaluated(model, device)
    if writes_are_watched():
        assert stats(model)["reload_bytes"] < weights, "what fits stays"
