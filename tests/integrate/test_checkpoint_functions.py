"""Planned steps of models whose activation checkpointing is reentrant, or a function of a training framework."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from disco_accel import DiscoConfig, prepare, stats
from tests.capture.test_reentrant import from_layers
from tests.support.models import family_lora, random_batch

FUNCTIONS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "wrapped": from_layers(functools.partial(checkpoint, use_reentrant=True)),
}


def trained(model: Any, steps: int = 3) -> list[torch.Tensor]:
    """Losses, two of which are accumulated for each step, then the weights and the generator."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    seen = []
    for index in range(2 * steps):
        batch = random_batch(seed=index)
        batch["attention_mask"][0, 9:] = 0
        loss = model(**batch).loss / 2
        loss.backward()
        seen.append(loss.detach())
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters() if p.requires_grad), torch.get_rng_state()]


def made(family: str, kind: str) -> Any:
    model: Any = family_lora(family, lora_dropout=0.1, dropout=0.1)
    if kind == "reentrant":
        model.enable_input_require_grads()
    model.base_model.model._set_gradient_checkpointing(True, FUNCTIONS[kind])
    return model


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training_is_eagers_to_the_bit_with_dropout_padding_and_accumulation(family: str, kind: str) -> None:
    """The first steps are also compared with unplanned ones, which are eager's reentrant ones."""
    expected = trained(made(family, kind))
    config = DiscoConfig("400KB", device="cpu", plan_cache=None, verify_steps=2, on_unsupported="error")
    model = prepare(made(family, kind), config)
    for got, wanted in zip(trained(model), expected, strict=True):
        assert torch.equal(got, wanted)
    counts = stats(model)
    assert (counts["steps_compiled"], counts["steps_eager"], counts["plans"]) == (6, 0, 1)
