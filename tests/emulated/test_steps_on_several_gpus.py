"""Prepared models whose steps are shared by several GPUs, beside eager mode on the first of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks.gpu.models import SMALL, arena_llama, batch_for, with_adapter
from disco_accel import DiscoConfig, prefill, stats
from disco_accel.errors import ConfigError
from disco_accel.step.run.session import STATE
from tests.emulated import device
from tests.emulated.models import assert_same, least, step

COUNT = torch.cuda.device_count()
FIRST = torch.device("cuda", 0)
SHAPE = {**SMALL, "num_hidden_layers": 4}
DIRECT = os.environ.get("EMULATED_PEERS") not in ("none", "wrong")


@pytest.fixture(autouse=True)
def several() -> None:
    assert COUNT > 1, "run it with more than one device"


def llama(where: torch.device = FIRST, dropout: float = 0.0, attention: str = "eager") -> Any:
    base, _ = arena_llama(SHAPE, dtype=torch.float32, attention=attention, source=where)
    return with_adapter(base, rank=4, checkpointing=True, dropout=dropout)


def check(devices: Any, where: torch.device = FIRST, steps: int = 3, dropout: float = 0.0) -> Any:
    """Steps of a model on ``devices``, each with as little memory as that takes, and of the same in eager mode on the
    first one; the model."""
    batches = [batch_for(SHAPE["vocab_size"], 2, 16 if number < 2 else 12, where) for number in range(steps)]
    model, eager = llama(where, dropout), llama(where, dropout).to(where)
    least(model, lambda m: step(m, batches[0]), where, devices=devices, parallel="layers")
    for batch in batches:
        state = torch.cuda.get_rng_state(where)
        got = step(model, batch)
        torch.cuda.set_rng_state(state, where)
        assert_same(got, step(eager, batch))
    assert stats(model)["steps_eager"] == 0
    return model


@pytest.mark.parametrize("count", sorted({2, COUNT}))
def test_layers_on_several_gpus_train_with_eagers_bits(count: int) -> None:
    model = check(count)
    session = model.__dict__[STATE]
    assert len(session.memory.arenas) == count
    assert sorted(arena.device.index for arena in session.memory.arenas.values()) == list(range(count))
    assert not device.complaints(), device.complaints()
    device.reset()  # of the trial of copies
    step(model, batch_for(SHAPE["vocab_size"], 2, 16, FIRST))
    counts = device.counts()
    assert "copy p2p staged" not in counts
    assert ("copy p2p" in counts) == DIRECT


def test_dropout_draws_the_numbers_of_one_gpu() -> None:
    """Some of it in layers of the second GPU, and again where they are computed again."""
    check(2, dropout=0.2)


def test_parts_of_a_batch_on_several_gpus_have_the_bits_of_accumulation() -> None:
    batch = batch_for(SHAPE["vocab_size"], 2, 16, FIRST)
    model, eager = llama(), llama().to(FIRST)
    least(model, lambda m: step(m, batch), devices=2, parallel="batch")
    items = (batch["labels"][..., 1:] != -100).sum()
    for _ in range(2):
        got = step(model, batch)
        eager.zero_grad(set_to_none=True)
        losses = []
        for row in range(2):
            part = {name: value[row : row + 1] for name, value in batch.items()}
            losses.append(eager(**part, num_items_in_batch=items).loss)
            losses[-1].backward()
        gradients = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
        assert_same(got, {"loss": (losses[0] + losses[1]).detach(), **gradients, "generator": got["generator"]})
    assert stats(model)["steps_eager"] == 0


def test_gpus_by_index() -> None:
    """The script's tensors are on the first that is named."""
    last = torch.device("cuda", COUNT - 1)
    with torch.cuda.device(last):
        model = check([COUNT - 1, 0], last, steps=2)
    session = model.__dict__[STATE]
    assert [arena.device.index for arena in session.memory.arenas.values()] == [COUNT - 1, 0]


def test_gpus_that_are_not_there_are_refused() -> None:
    for devices in (COUNT + 1, [0, COUNT]):
        with pytest.raises(ConfigError, match=f"are not there, torch sees {COUNT} GPUs"):
            DiscoConfig(device="cuda", devices=devices).resolve()


def close(model: Any, eager: Any, batch: dict[str, torch.Tensor]) -> float:
    """The largest distance of a loss or gradient, as a part of its norm."""
    got, expected = step(model, batch), step(eager, batch)
    del expected["generator"]
    return max(float((got[n] - t).norm() / t.norm().clamp_min(1e-30)) for n, t in expected.items())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "keys",
    [{"parallel": "tensor"}, {"parallel": "layers", "micro_batches": 2}, {"parallel": "layers", "chunks": 4}],
    ids=str,
)
def test_sums_in_another_order_are_near_eagers(keys: dict[str, Any], attention: str) -> None:
    batch = batch_for(SHAPE["vocab_size"], 4, 16, FIRST)
    model, eager = llama(attention=attention), llama(attention=attention).to(FIRST)
    least(model, lambda m: step(m, batch), devices=2, **keys)
    assert close(model, eager, batch) < 3e-6 and stats(model)["steps_eager"] == 0


def trained(devices: int, update: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a few steps with the optimizer in host memory."""
    model = llama()
    keys = {"optimizer": "host", "update": update, "parallel": "layers"}
    least(model, lambda m: step(m, batch_for(SHAPE["vocab_size"], 2, 16, FIRST)), devices=devices, **keys)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2.0**-7, fused=True)
    losses = []
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        loss = model(**batch_for(SHAPE["vocab_size"], 2, 16, FIRST)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert stats(model)["steps_eager"] == 0
    assert update == "step" or stats(model)["updates_planned"] > 0
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("update", ["step", "deferred"])
def test_an_optimizer_in_host_memory_has_the_bits_of_one_gpu(update: str) -> None:
    (losses, weights), (expected, others) = trained(2, update), trained(1, update)
    assert losses == expected and weights.keys() == others.keys()
    assert all(torch.equal(weights[name], value) for name, value in others.items())


def test_a_prompt_has_the_bits_of_one_gpu() -> None:
    ids = torch.randint(0, SHAPE["vocab_size"], (1, 16), generator=torch.Generator().manual_seed(1)).to(FIRST)
    made = []
    for devices in (1, 2):
        model = least(llama().eval(), lambda m: prefill(m, ids), devices=devices, parallel="layers")
        found = prefill(model, ids)
        cache = [tensor for layer in found.past_key_values.layers for tensor in (layer.keys, layer.values)]
        made.append([found.logits, *cache])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
