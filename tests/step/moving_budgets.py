"""Small models under budgets that move, and eager ones beside them, for tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare
from disco_accel.plan import planning_process
from disco_accel.plan.planning_process import PlanningProcess
from disco_accel.step.run.session import Session, find_state

WIDTH, LAYERS = 128, 6
LARGE, SMALL = 1 << 20, 300 << 10


def answer_here(_: PlanningProcess, request: bytes) -> bytes:
    """In the place of ``PlanningProcess._answer``."""
    return json.dumps(planning_process.answer(json.loads(request))).encode()


def plan_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Plans are made in this process, at its priority: how long another one waits for a core is not tested here. What
    is returned undoes it."""
    elsewhere = PlanningProcess._answer
    monkeypatch.setattr(PlanningProcess, "_answer", answer_here)
    return lambda: monkeypatch.setattr(PlanningProcess, "_answer", elsewhere)


class Layers(torch.nn.Module):
    """Frozen products of 64 KiB each, between trained scales; or products that are all trained."""

    def __init__(self, *, trained: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.layers.requires_grad_(trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * self.scale))
        return x.square().mean()


def batch(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def twins(budget: int | str = LARGE, *, trained: bool = False, **keys: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A prepared model and the same one in eager mode."""
    model, eager = Layers(trained=trained), Layers(trained=trained)
    usual = {"device": "cpu", "plan_cache": None, "quiet": True, "optimizer": "device", "link_bandwidth": "0.5GB/s"}
    return prepare(model, DiscoConfig(memory_budget=budget, **(usual | keys))), eager


def session_of(model: torch.nn.Module) -> Session:
    state = find_state(model)
    assert state is not None
    return state


def arena(model: torch.nn.Module) -> int:
    return sum(memory.numel() for memory in session_of(model).memory.arenas.values())


def assert_same(model: torch.nn.Module, eager: torch.nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        if theirs.grad is not None:
            assert ours.grad is not None and torch.equal(ours.grad, theirs.grad), name


def both(model: torch.nn.Module, eager: torch.nn.Module, seed: int) -> None:
    """A step of each, gradients added to those that are there; all bits are compared."""
    losses = []
    for each in (model, eager):
        loss = each(batch(seed))
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    assert_same(model, eager)


def until(true: Callable[[], bool]) -> None:
    """Return once it is; a test that waits for what never comes fails."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)
