"""Decoding with a cache that grows on a GPU: eager mode's tokens and logits from plans, also in the least memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, batch_for
from disco_accel import prepare, restore, stats
from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import BudgetTooSmall
from disco_accel.integrate.hf import growing_cache
from disco_accel.native.backend import workspace_bytes
from tests.gpu.test_steps import CASES, expect, lora, roomy


def generated(model: Any, device: torch.device, padding: int, tokens: int = 12) -> Any:
    ids = batch_for(SMALL["vocab_size"], 2, 13, device)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    keys = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    keys |= {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(input_ids=ids, attention_mask=mask, **keys)


def expect_same(got: Any, wanted: Any) -> None:
    assert torch.equal(got.sequences, wanted.sequences)
    for token, (a, b) in enumerate(zip(wanted.logits, got.logits, strict=True)):
        expect(a, b, f"logits of token {token}")


@pytest.mark.parametrize(("dtype", "attention", "checkpointing"), CASES)
def test_tokens_and_logits_are_eagers(
    device: torch.device, dtype: torch.dtype, attention: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first generation ends in a plan for other lengths than it begins in; the second meets these plans again, and
    the third has padding."""
    monkeypatch.setattr(growing_cache, "_FEWEST", 16)
    model = lora(device, dtype, attention, checkpointing).eval()
    eager = copy.deepcopy(model).to(device)
    prepare(model, roomy(device))
    # A kernel pads rows of a mask that do not begin at multiples of eight numbers; nothing is hidden without padding.
    for padding in (0, 0, 5):
        expect_same(generated(model, device, padding), generated(eager, device, padding))
    found = stats(model)
    assert found["fallbacks"] == [] and found["forwards_unplanned"] == 0 and found["engine"]["c10_allocations"] == 0


@pytest.mark.usefixtures("random_order")
def test_the_smallest_budget_is_enough(device: torch.device) -> None:
    model = lora(device, torch.float32, "sdpa", False).eval()
    eager = copy.deepcopy(model).to(device)
    budget = 2 * workspace_bytes(device) + (1 << 18)
    for _ in range(4):
        prepare(model, DiscoConfig(memory_budget=budget, device=device.type, plan_cache=None))
        try:
            got = generated(model, device, 0, 6)
        except BudgetTooSmall as error:
            # Of the prompt; tokens behind it take less.
            budget = error.needed
            restore(model)
            continue
        break
    expect_same(got, generated(eager, device, 0, 6))
    found = stats(model)
    assert found["peak_bytes"] <= budget and found["reload_bytes"] > 0
    assert found["fallbacks"] == [] and found["engine"]["c10_allocations"] == 0
