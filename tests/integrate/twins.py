"""A prepared model beside its eager twin: the same weights, the same batches, the same bits expected."""

from __future__ import annotations

from typing import Any

import torch

from disco_accel import DiscoConfig, prepare
from tests.support.models import random_batch, tiny_lora

SMALL = {"layers": 1, "hidden": 32, "vocabulary": 32}
Grads = dict[str, torch.Tensor]


def config(**keys: Any) -> DiscoConfig:
    return DiscoConfig(**({"memory_budget": str(1 << 30), "device": "cpu", "planner": "build"} | keys))


def batch(seed: int = 0, length: int = 8) -> dict[str, torch.Tensor]:
    return random_batch(32, length=length, seed=seed)


def pair(**keys: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(prepared, eager), equal to the bit."""
    return prepare(tiny_lora(**SMALL, **keys), config()), tiny_lora(**SMALL, **keys)


def step(model: torch.nn.Module, seed: int = 0, length: int = 8) -> tuple[torch.Tensor, Grads]:
    """Loss and gradients of one step; leaves no gradient behind."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch(seed, length)).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def assert_same_step(model: torch.nn.Module, eager: torch.nn.Module, seed: int = 0, length: int = 8) -> None:
    """One step on both gives the same loss and the same gradients, to the bit."""
    assert_same(step(model, seed, length), step(eager, seed, length))


def assert_same(got: tuple[torch.Tensor, Grads], expected: tuple[torch.Tensor, Grads]) -> None:
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(got[1][name], gradient), name
