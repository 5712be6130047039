"""``DiscoPlugin``: a raw Accelerate loop without a launcher, to the bits that it reaches alone."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from disco_accel import DiscoConfig, DiscoPlugin, stats
from disco_accel.errors import ConfigError
from tests.integrate.twins import SMALL, batch
from tests.support.models import tiny_lora

KEYS = {"memory_budget": "64MiB", "device": "cpu", "planner": "build", "plan_cache": None}


def train(plugin: DiscoPlugin | None) -> tuple[list[str], dict[str, torch.Tensor], torch.nn.Module]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny_lora(**SMALL)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    prepare = accelerator.prepare if plugin is None else lambda *args: plugin.prepare(accelerator, *args)
    model, optimizer = prepare(model, optimizer)
    losses = []
    for step in range(4):
        with accelerator.accumulate(model):
            loss = model(**batch(step)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}, model


def test_a_loop_with_the_plugin_is_bitwise_the_loop_without_it() -> None:
    expected, found = train(None), train(DiscoPlugin(DiscoConfig(**KEYS)))
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    assert (stats(found[2])["steps_compiled"], stats(found[2])["steps_eager"]) == (4, 0)


def test_a_switched_off_plugin_changes_nothing() -> None:
    assert stats(train(DiscoPlugin(**KEYS, enabled=False))[2]) == {}


def test_what_is_not_a_model_goes_through() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert DiscoPlugin(**KEYS).prepare(Accelerator(cpu=True), optimizer).optimizer is optimizer


def test_wrong_keys_are_named() -> None:
    with pytest.raises(ConfigError, match="DiscoPlugin: unknown key 'memory_bugdet'; did you mean 'memory_budget'"):
        DiscoPlugin(memory_bugdet="1GiB")
    with pytest.raises(ConfigError, match="'lookahead' is given beside a config"):
        DiscoPlugin(DiscoConfig(), lookahead=3)
