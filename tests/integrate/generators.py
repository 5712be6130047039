"""One training step of two models from the same state of the random generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def run(model: torch.nn.Module, batch: Mapping[str, Any], tangent: float = 1.0) -> dict[str, torch.Tensor]:
    """Loss, gradients by name, and where the generator ends."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward(torch.full_like(loss, tangent))
    return {"loss": loss.detach(), **gradients(model), "generator": torch.get_rng_state()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(eager: torch.nn.Module, planned: torch.nn.Module, batch: Mapping[str, Any]) -> None:
    """Both from the generator as it is now; it ends where both left it."""
    start = torch.get_rng_state()
    expected = run(eager, batch)
    torch.set_rng_state(start)
    assert_same(run(planned, batch), expected)


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [k for k, v in expected.items() if got[k].dtype != v.dtype or not torch.equal(got[k], v)]
    assert not different
    assert any("lora_B" in name and value.abs().max() > 0 for name, value in expected.items())
