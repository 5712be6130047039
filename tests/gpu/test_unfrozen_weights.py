"""Base weights that are unfrozen and frozen again between steps on a GPU are trained as in eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, batch_for
from disco_accel import prepare, stats
from tests.gpu.test_steps import expect, lora, roomy

NORM, PROJECTION = "model.norm.weight", "layers.0.mlp.up_proj.base_layer.weight"


def trained(model: Any, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Loss and gradients of a step, after which all trained weights are others."""
    loss = model(**batch_for(SMALL["vocab_size"], 2, 16, device, seed=seed)).loss
    loss.backward()
    found = {"loss": loss.detach().cpu()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.device == parameter.grad.device == device
            found[name] = parameter.grad.cpu()
            with torch.no_grad():
                parameter.sub_(0.01 * parameter.grad)
            parameter.grad = None
    return found


def evaluated(model: Any, device: torch.device, seed: int) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**batch_for(SMALL["vocab_size"], 2, 16, device, seed=seed)).logits
    return logits


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_eagers(device: torch.device, checkpointing: bool, evaluates: bool) -> None:
    """Also where an evaluation is the first to meet the weight."""
    model = lora(device, torch.float32, "eager", checkpointing)
    eager = copy.deepcopy(model).to(device)
    prepare(model, roomy(device))
    seen = set()
    for seed, unfrozen in enumerate([(), (NORM,), (), (NORM,), (NORM, PROJECTION), (PROJECTION,), ()]):
        for each in (model, eager):
            for name, parameter in each.named_parameters():
                if name.endswith((NORM, PROJECTION)):
                    parameter.requires_grad_(name.endswith(unfrozen))
        if evaluates:
            expect(evaluated(eager, device, seed), evaluated(model, device, seed), f"logits before step {seed}")
        ours, eagers = trained(model, device, seed), trained(eager, device, seed)
        assert ours.keys() == eagers.keys()
        for name, value in eagers.items():
            expect(value, ours[name], f"{name} of step {seed}")
        seen |= ours.keys()
    assert sum(name.endswith((NORM, PROJECTION)) for name in seen) == 2
    assert stats(model)["steps_eager"] == 0
