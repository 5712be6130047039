"""``master_weights: fp32``: bf16 and fp16 weights are rounded from fp32 masters, as in a script that keeps them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from disco_accel import prepare, settle, stats
from disco_accel.errors import BudgetTooSmall, ConfigError, ExecutionError
from disco_accel.step.run.session import find_state
from disco_accel.step.update import master_weights, pending_update, update_pass
from disco_accel.step.update.updated_step import StepWithUpdate
from tests.integrate.fp32_copies import (
    UPDATES,
    Copies,
    Net,
    Optimizer,
    adamw,
    assert_same,
    batches,
    config,
    go_on,
    pair,
    train,
)
from tests.integrate.test_memory_messages import Stack
from tests.support.engine_faults import failing, kernels
from tests.support.models import family_full


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float16)])
def test_bits_of_a_script_that_keeps_copies(
    monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype, update: str
) -> None:
    """Accumulation, clipping, warm-up; tied embeddings in GPT-2; updates in several pieces."""
    monkeypatch.setattr(pending_update, "PIECE_BY_HAND", 1 << 8)
    monkeypatch.setattr(master_weights, "PIECE_BY_HAND", 1 << 8)
    monkeypatch.setattr(update_pass, "PIECE", 1 << 8)
    model, twin = family_full(family, dtype=dtype), Copies(family_full(family, dtype=dtype))
    prepare(model, config(update))
    optimizer = adamw(model.parameters())
    losses, expected = train(model, optimizer, range(5)), train(twin.model, twin, range(5))
    assert all(map(torch.equal, losses, expected))
    assert_same(model, optimizer, twin)
    figures = stats(model)
    # The first update is put off too: there are masters before it, and with them the moments.
    assert figures["steps_eager"] == 0 and figures.get("updates_planned", 4) == 4
    moved = sum(not torch.equal(m.to(p.dtype).float(), m) for p, m in twin.masters.items())
    assert moved == len(twin.masters), "masters hold more than the weights"


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_weights_stay_as_they_are(dtype: torch.dtype, update: str) -> None:
    """They have no master; one optimizer updates both kinds."""
    model, optimizer, twin = pair(update, dtype)
    go_on(model, optimizer, twin)
    # The first makes the optimizer's state of the fp32 weights.
    assert stats(model).get("updates_planned", 3) == 3
    assert ["master" in optimizer.state[p] for p in (model.first.weight, model.norm.weight)] == [True, False]


def test_a_forward_that_fails_beside_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has run of the update stays, the rest is done, each piece to its rounded weight."""
    monkeypatch.setattr(update_pass, "PIECE", 64)
    model, optimizer, twin = pair("deferred")
    go_on(model, optimizer, twin, range(2, 3))
    for step in range(3, 6):
        for each, its in ((model, optimizer), (twin.model, twin)):
            train(each, its, [step])
        state = find_state(model)
        assert state is not None
        planned = next(each for each in state.memory.plans.values() if isinstance(each, StepWithUpdate))
        plain = [v.id for v in planned.plan.vertices if v.id in planned.plain.graph.ops]
        failed = kernels(planned.plan).index(plain[step - 3])
        with failing(planned.executor, failed), pytest.raises(ExecutionError):
            model(**batches(model, 0)[0])
    assert_same(model, optimizer, twin)


def _beside_zero(rank: int, folder: str) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=1)
    deepspeed = importlib.import_module("deepspeed")
    theirs, script, model = (Net().bfloat16() for _ in range(3))
    theirs_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=theirs, optimizer=theirs_optimizer, config=settings)
    prepare(model, config())
    optimizers = [adamw(each.parameters()) for each in (model, script)]
    for step in range(6):
        (batch, _) = batches(theirs, step)
        engine.backward(engine(**batch))
        engine.step()
        for each, optimizer in zip((model, script), optimizers, strict=True):
            each(**batch).backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def equal(each: Net) -> float:
        pairs = zip(each.parameters(), theirs.parameters(), strict=True)
        return float(torch.cat([(a == b).view(-1) for a, b in pairs]).float().mean())

    assert equal(model) > 0.99 and equal(script) < 0.6
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=2**-7, atol=1e-5)
    dist.destroy_process_group()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_weights_are_those_of_deepspeed(tmp_path: Path) -> None:
    """ZeRO's optimizer for bf16 keeps masters too: equal but for rounding, where a script without is far off."""
    torch.multiprocessing.spawn(_beside_zero, (str(tmp_path),), nprocs=1)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("update", UPDATES)
def test_parameters_come_go_and_stay_away(update: str) -> None:
    """Groups of their own settings, one added later; a weight frozen for a while; Adam's own decay of weights."""

    def made(parameters: Iterable[Any]) -> Optimizer:
        first, *_, rest, _ = parameters
        return torch.optim.Adam(
            [{"params": [first], "betas": (0.8, 0.9)}, {"params": [rest]}], weight_decay=0.1, fused=True
        )

    model, twin = Net(), Copies(Net(), made)
    prepare(model, config(update))
    optimizer = made(model.parameters())
    go_on(model, optimizer, twin, range(2))
    optimizer.add_param_group({"params": [model.last.bias, model.first.bias]})
    copies = twin.masters
    twin.optimizer.add_param_group({"params": [copies[twin.model.last.bias], copies[twin.model.first.bias]]})
    go_on(model, optimizer, twin, range(2, 4))
    for each in (model, twin.model):
        each.first.weight.requires_grad_(False)
    go_on(model, optimizer, twin, range(4, 6))
    for each in (model, twin.model):
        each.first.weight.requires_grad_(True)
    go_on(model, optimizer, twin, range(6, 8))


@pytest.mark.parametrize("update", UPDATES)
def test_two_optimizers_share_a_model(update: str) -> None:
    model, twins = prepare(Net(), config(update)), Net()
    halves = [[model.first.weight, model.norm.weight], [model.last.weight, model.last.bias]]
    optimizers = [adamw(half) for half in halves]
    twin = Copies(twins)
    parts = [[twins.first.weight, twins.norm.weight], [twins.last.weight, twins.last.bias]]
    theirs = [adamw([twin.masters[p] for p in part], lr=1e-2) for part in parts]
    for step in range(3):
        for each in (model, twins):
            each(**batches(each, step)[0]).backward()
        for optimizer, twin.optimizer in zip(optimizers, theirs, strict=True):
            optimizer.step()
            twin.step()
        model.zero_grad()
        twins.zero_grad()
    settle(model)
    assert all(map(torch.equal, model.parameters(), twins.parameters()))


@pytest.mark.parametrize("update", UPDATES)
def test_closures_and_hooks_of_the_optimizer(update: str) -> None:
    """A closure makes the gradients inside ``step()``; a hook before it clips them, one behind it looks at weights."""
    model, optimizer, twin = pair(update)

    def clip(each: torch.nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05)

    optimizer.register_step_pre_hook(lambda *_: clip(model))
    seen: list[torch.Tensor] = []
    for step in range(3, 6):
        if step == 4:
            optimizer.register_step_post_hook(lambda *_: seen.append(model.first.weight.detach().clone()))
        for each, step_of in ((model, optimizer.step), (twin.model, twin.step)):
            each(**batches(each, step)[0]).backward()
            if each is not model:
                clip(each)
            step_of()
            each.zero_grad()
        assert not seen or torch.equal(seen[-1], twin.model.first.weight)
    assert len(seen) == 2

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(**batches(model, 9)[0])
        loss.backward()
        return loss

    loss = optimizer.step(closure)  # type: ignore[arg-type]
    expected = twin.model(**batches(twin.model, 9)[0])
    expected.backward()
    twin.step()
    assert torch.equal(loss, expected)
    assert_same(model, optimizer, twin)


@pytest.mark.parametrize(
    ("reason", "make"),
    {
        "SGD is not torch.optim.AdamW": lambda p: torch.optim.SGD(p, lr=0.1),
        "it is not fused": lambda p: torch.optim.AdamW(p),
        "amsgrad=True": lambda p: adamw(p, amsgrad=True),
    }.items(),
)
@pytest.mark.parametrize("update", UPDATES)
def test_other_optimizers_are_refused(reason: str, make: Callable[[Any], Optimizer], update: str) -> None:
    """At their first step, which changes nothing."""
    model = prepare(Net(), config(update))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make(model.parameters())
    model(**batches(model, 0)[0]).backward()
    with pytest.raises(ConfigError, match=f"master_weights: fp32: {reason}.* or master_weights: script"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is not None for p in model.parameters())


def test_what_else_is_refused() -> None:
    """A scaler of gradients, weights that are not contiguous, an optimizer on the device."""
    model, optimizer, _ = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(**batches(model, 0)[0])).backward()
    with pytest.raises(ConfigError, match="GradScaler"):
        scaler.step(optimizer)
    optimizer, weight = adamw(model.parameters()), model.last.weight
    weight.data = weight.data.t().contiguous().t()
    with pytest.raises(ConfigError, match=r"a parameter of shape \[24, 24\] is no contiguous"):
        optimizer.step()
    with pytest.raises(ConfigError, match=r"master_weights: fp32 .* optimizer: host"):
        prepare(Net(), config(optimizer="device"))
    with pytest.raises(ConfigError, match=r"master_weights: 'fp16' does not work; use auto or script or fp32"):
        config(master_weights="fp16")


def test_host_memory_counts_masters_and_moments() -> None:
    """At ``prepare``, at the first step, and where autograd adds to gradients; each names its parts."""
    low = sum(p.numel() for p in Net().parameters() if p.dtype is torch.bfloat16)
    full = sum(p.numel() for p in Net().parameters()) - low
    # Weight, gradient, master and moments: 2 + 2 + 4 + 8 bytes; 16 for fp32.
    training = 16 * (low + full)
    with pytest.raises(ConfigError, match=r"of their fp32 masters.* of two moments"):
        prepare(Net(), config(host_memory=training - 1))
    model = prepare(Net(), config(host_memory=training))
    for _ in range(2):
        model(**batches(model, 0)[0]).backward()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError, match="too small for gradients of two backwards"):
        model(**batches(model, 0)[0]).backward()


def test_a_step_counts_masters_beside_what_it_offloads() -> None:
    """All that training keeps fits, what a plan in little memory saves does not; both refusals name the masters."""

    def first(**keys: Any) -> None:
        model = prepare(Stack().bfloat16(), config(**keys))
        model(torch.ones(8, 64, dtype=torch.bfloat16)).backward()

    weights = sum(p.nbytes for p in Stack().bfloat16().parameters())
    with pytest.raises(BudgetTooSmall, match="fp32 masters and moments take 128KiB more there") as caught:
        first(memory_budget=1 << 12)
    with pytest.raises(ConfigError, match=r"64KiB for their fp32 masters, .* 128KiB .* moments, .* offloaded values"):
        first(memory_budget=caught.value.needed, host_memory=8 * weights)
    first(host_memory=8 * weights)
