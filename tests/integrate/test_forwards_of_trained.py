"""Forwards keep weights on the device that the host's optimizer trains, until somebody writes to one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.native.host_memory import writes_are_watched
from disco_accel.step.run import forwards
from tests.integrate.forward_pairs import assert_equal
from tests.support.models import random_batch

WATCHED = writes_are_watched()
UPDATES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "one by one": lambda weights: torch.optim.SGD(weights, lr=1e-1, foreach=False),
    "many at once": lambda weights: torch.optim.AdamW(weights, lr=1e-2, foreach=True),
}


def pair(**keys: Any) -> tuple[Any, Any]:
    """(prepared, eager), all of whose weights are trained, in half of their bytes and some activations."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    eager = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96, pad_token_id=0)).eval()
    budget = sum(p.nbytes for p in eager.parameters()) // 2 + (1 << 18)
    settings: dict[str, Any] = {
        "memory_budget": budget,
        "device": "cpu",
        "plan_cache": None,
        "quiet": True,
        "plan_seconds": 0.05,
    }
    return prepare(copy.deepcopy(eager), DiscoConfig(optimizer="host", **(settings | keys))), eager


def evaluated(model: Any, seed: int = 9) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=random_batch(length=8, seed=seed)["input_ids"]).logits
    return logits


def generated(model: Any) -> torch.Tensor:
    made: torch.Tensor = model.generate(random_batch(length=8)["input_ids"], max_new_tokens=5, do_sample=False)
    return made


def trained(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    model.train()
    loss = model(**random_batch(length=8, seed=seed)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    detached: torch.Tensor = loss.detach()
    return detached


def assert_planned(model: Any) -> None:
    found = stats(model)
    assert found["forwards_unplanned"] == 0 and found["steps_eager"] == 0 and found["fallbacks"] == []


@pytest.mark.usefixtures("random_order")
@pytest.mark.parametrize("watched", [True, False] if WATCHED else [False])
def test_a_forward_loads_the_weights_that_do_not_fit(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel tells of writes each weight is loaded each time."""
    monkeypatch.setattr(forwards, "writes_are_watched", lambda: watched)
    planned, eager = pair(plan_seconds="auto")
    weights = sum(p.nbytes for p in eager.parameters())
    for seed in range(3):
        assert torch.equal(evaluated(planned, seed), evaluated(eager, seed))
        assert torch.equal(generated(planned), generated(eager))
    # How many stay hangs by the seconds of kernels and copies.
    assert (stats(planned)["reload_bytes"] < weights) == watched
    assert_planned(planned)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("when", ["step", "deferred"])
def test_evaluations_and_generations_follow_every_update(update: str, when: str) -> None:
    """Also two in a row without a step of training between them, and gradients that accumulate."""
    planned, eager = pair(update=when)
    seen: list[list[Any]] = []
    for model in (planned, eager):
        optimizer, values = UPDATES[update](list(model.parameters())), []
        for seed in range(2):
            values += [evaluated(model), trained(model, optimizer, seed), evaluated(model), generated(model)]
        model.train()
        for seed in range(2):
            model(**random_batch(length=8, seed=seed)).loss.backward()
            values.append(evaluated(model))
        for _ in range(2):
            optimizer.step()
            values.append(evaluated(model))
        seen.append([*values, *(p.detach() for p in model.parameters())])
    assert_equal(*seen)
    assert_planned(planned)


def _write(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.weight.data[3, 5] += 1.0


def _scale(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)


def _swap(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.flip(0).clone()


def _load(model: Any) -> None:
    model.load_state_dict({name: value + 0.25 for name, value in model.state_dict().items()})


def _freeze(model: Any) -> None:
    model.model.layers[1].requires_grad_(False)
    _write(model)


@pytest.mark.parametrize("change", [_write, _scale, _swap, _load, _freeze])
def test_other_writes_are_followed(change: Callable[[Any], None]) -> None:
    planned, eager = pair(memory_budget=1 << 26)
    for _ in range(2):
        for model in (planned, eager):
            change(model)
        assert torch.equal(evaluated(planned), evaluated(eager))
        assert torch.equal(generated(planned), generated(eager))
    assert_planned(planned)
