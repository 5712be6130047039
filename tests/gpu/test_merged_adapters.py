"""Adapters of a prepared model on a GPU are merged into weights in host memory as eager mode merges them there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, batch_for
from disco_accel import prepare, stats
from tests.gpu.test_steps import expect, lora, roomy


def evaluated(model: Any, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**batch_for(SMALL["vocab_size"], 2, 16, device, seed=5)).logits
    return logits


def base_weights(model: Any) -> list[torch.Tensor]:
    return [weight for name, weight in sorted(model.state_dict().items()) if "base_layer.weight" in name]


def expect_same(model: Any, eager: Any, device: torch.device, where: str) -> None:
    for place, (ours, eagers) in enumerate(zip(base_weights(model), base_weights(eager), strict=True)):
        expect(eagers.to("cpu"), ours.to("cpu"), f"weight {place} {where}")
    expect(evaluated(eager, device), evaluated(model, device), f"logits {where}")


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_logits_are_eagers(device: torch.device, dtype: torch.dtype, safe: bool) -> None:
    model = lora(device, dtype, "eager", False).eval()
    eager = copy.deepcopy(model).to(device)
    prepare(model, roomy(device))
    expect_same(model, eager, device, "at first")
    for turn in range(2):
        for each in (model, eager):
            each.merge_adapter(safe_merge=safe)
        expect_same(model, eager, device, f"merged, {turn}")
        for each in (model, eager):
            each.unmerge_adapter()
        expect_same(model, eager, device, f"as they were, {turn}")
    assert stats(model)["forwards_unplanned"] == 0


def test_an_adapter_is_merged_for_good(device: torch.device) -> None:
    model = lora(device, torch.float32, "eager", False).eval()
    eager = copy.deepcopy(model).to(device)
    prepare(model, roomy(device))
    expect(evaluated(eager, device), evaluated(model, device), "logits at first")
    merged, eagers = model.merge_and_unload(), eager.merge_and_unload()
    for name, weight in eagers.state_dict().items():
        expect(weight.to("cpu"), merged.state_dict()[name].to("cpu"), name)
