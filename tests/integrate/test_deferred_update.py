"""``update: deferred``: updates run at the head of the next step's plan, before any look, to eager mode's bits."""

from __future__ import annotations

import copy
import mmap
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from disco_accel import prepare, settle, stats
from disco_accel.errors import ConfigError, ExecutionError, StatesTorn
from disco_accel.native.host_memory import writes_are_watched
from disco_accel.step.run.session import find_state
from disco_accel.step.update import update_pass
from tests.integrate.deferred_updates import (
    STEPS,
    adamw,
    assert_same,
    backward,
    config,
    one_layer,
    prepared,
    train,
    with_update,
)
from tests.support.engine_faults import failing, kernels
from tests.support.models import family_full, random_batch

CASES: tuple[tuple[str, torch.dtype, str, dict[str, Any]], ...] = (
    ("llama", torch.float32, "least", {}),
    ("llama", torch.bfloat16, "half", {"num_hidden_layers": 1}),
    ("gpt2", torch.float32, "half", {"n_layer": 1}),
    ("qwen3", torch.bfloat16, "least", {"num_hidden_layers": 1, "tie_word_embeddings": True}),
    ("gemma2", torch.float32, "all", {}),
)


@pytest.mark.parametrize(("family", "dtype", "budget", "keys"), CASES)
def test_weights_and_moments_are_eager_ones(
    monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype, budget: str, keys: dict[str, Any]
) -> None:
    """Accumulation, clipping, a schedule; large weights in several pieces; tied embeddings of three families."""
    monkeypatch.setattr(update_pass, "PIECE", 1 << 11)
    model, eager = (family_full(family, dtype=dtype, **keys) for _ in range(2))
    weights = sum(p.nbytes for p in eager.parameters())
    prepared(model, {"least": 1, "half": weights // 2, "all": 1 << 30}[budget])
    ours, theirs = adamw(model, weight_decay=0.1), adamw(eager, weight_decay=0.1)
    losses, expected = train(model, ours), train(eager, theirs)
    assert all(map(torch.equal, losses, expected))
    figures = stats(model)
    # The first update makes the optimizer's state, the last has no step behind it yet.
    assert figures["updates_planned"] == STEPS - 2 and figures["updates_settled"] == 0
    assert figures["engine"]["c10_allocations"] == 0 and figures["steps_eager"] == 0
    assert_same(model, ours, eager, theirs)
    assert stats(model)["updates_settled"] == 1


def test_gradients_take_one_set_of_memory() -> None:
    """An update lets go of its gradients before the next ones arrive."""
    model = prepared(one_layer())
    optimizer, state = adamw(model), find_state(model)
    assert state is not None
    taken = []
    for step in range(6):
        model(**random_batch(seed=step)).loss.backward()
        taken.append(state.gradients.memory.nbytes)
        optimizer.step()
        optimizer.zero_grad()
    assert stats(model)["updates_planned"] == 4
    assert len(set(taken)) == 1, taken


@pytest.fixture
def pair() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.nn.Module, torch.optim.Optimizer]:
    """A prepared model with an update pending, and its twin; each with its optimizer."""
    model, eager = one_layer(), one_layer()
    prepared(model)
    ours, theirs = adamw(model), adamw(eager)
    train(model, ours, steps=2)
    train(eager, theirs, steps=2)
    return model, ours, eager, theirs


def looks(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Callable[[], Any]]:
    """Ways to see weights or moments."""

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=random_batch()["input_ids"]).logits
        return logits

    def saved() -> list[torch.Tensor]:
        model.save_pretrained(folder)
        return list(load_file(folder / "model.safetensors").values())

    return {
        "evaluate": evaluate,
        "a module inside": lambda: model.lm_head(torch.ones(1, model.config.hidden_size)),
        "generate": lambda: model.generate(random_batch()["input_ids"][:1, :4], max_new_tokens=4, do_sample=False),
        "state_dict": lambda: [t.clone() for t in model.state_dict().values()],
        "of a module": lambda: [t.clone() for t in model.model.layers[0].state_dict().values()],
        "of the optimizer": lambda: [s["exp_avg"].clone() for s in optimizer.state_dict()["state"].values()],
        "save_pretrained": saved,
        "a copy": lambda: [p.detach() for p in copy.deepcopy(model).parameters()],
        "settle": lambda: (settle(model), [p.detach().clone() for p in model.parameters()])[1],
    }


LOOKS = (
    "evaluate",
    "a module inside",
    "generate",
    "state_dict",
    "of a module",
    "of the optimizer",
    "save_pretrained",
    "a copy",
)


@pytest.mark.parametrize("look", [*LOOKS, "settle"])
def test_whoever_looks_sees_the_update(pair: Any, tmp_path: Path, look: str) -> None:
    """And the next steps are eager ones."""
    model, ours, eager, theirs = pair
    assert stats(model)["updates_settled"] == 0
    seen = [looks(*each, tmp_path / str(n))[look]() for n, each in enumerate([(model, ours), (eager, theirs)])]
    tensors = [[each] if isinstance(each, torch.Tensor) else each for each in seen]
    assert tensors[0] and all(map(torch.equal, *tensors))
    assert stats(model)["updates_settled"] == 1
    assert all(map(torch.equal, train(model, ours, steps=1), train(eager, theirs, steps=1)))
    assert_same(model, ours, eager, theirs)


def test_a_loaded_state_takes_the_place_of_an_update(pair: Any) -> None:
    """As where an epoch goes back to its best weights."""
    model, ours, eager, theirs = pair
    best = copy.deepcopy((eager.state_dict(), theirs.state_dict()))
    for each, optimizer in ((model, ours), (eager, theirs)):
        train(each, optimizer, steps=2)
        each.load_state_dict(best[0])
        optimizer.load_state_dict(copy.deepcopy(best[1]))
        train(each, optimizer, steps=2)
    assert_same(model, ours, eager, theirs)


def test_losses_that_are_dropped_or_come_late(pair: Any) -> None:
    """A forward without a backward does the update once; so does a step that is run again for a late backward."""
    model, ours, eager, theirs = pair
    for each, optimizer in ((model, ours), (eager, theirs)):
        each(**random_batch(seed=50))
        optimizer.zero_grad()
        train(each, optimizer, steps=1)
        first = each(**random_batch(seed=51)).loss
        second = each(**random_batch(seed=52)).loss
        second.backward()
        first.backward()
        optimizer.step()
    assert_same(model, ours, eager, theirs)
    assert stats(model)["steps_eager"] == 0


def test_an_update_that_is_pending_outlives_a_forward_before_it(pair: Any) -> None:
    """A forward whose loss is dropped, gradients of before, an update: that is done, not taken for the forward's."""
    model, ours, eager, theirs = pair
    for each, optimizer in ((model, ours), (eager, theirs)):
        backward(each, 20)
        optimizer.step()
        loss = each(**random_batch(seed=60)).loss
        optimizer.step()
        del loss
        each(**random_batch(seed=61)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, ours, eager, theirs)


def test_what_would_lose_an_update_is_refused(pair: Any) -> None:
    """A gradient that is written to before the update has run."""
    model, ours, _, _ = pair
    backward(model, 9)
    ours.step()
    ours.zero_grad(set_to_none=False)
    with pytest.raises(ExecutionError, match=r"the gradient of a parameter of shape .*set_to_none"):
        model(**random_batch())
    backward(model, 10)
    ours.step()
    ours.zero_grad()
    if writes_are_watched():
        backward(model, 11)
        ours.step()
        for parameter in model.parameters():
            parameter.grad.data.zero_()
        with pytest.raises(ExecutionError, match=r"a weight or a gradient was written to after optimizer.step\(\)"):
            model(**random_batch())
    train(model, ours, steps=1)


def test_a_forward_that_fails_in_the_update_needs_a_checkpoint(pair: Any) -> None:
    """Some weights are updated and others are not: nothing runs before whole ones are loaded."""
    model, ours, eager, theirs = pair
    checkpoint = copy.deepcopy((eager.state_dict(), theirs.state_dict()))
    for each, optimizer in ((model, ours), (eager, theirs)):
        train(each, optimizer, steps=1)
    step = with_update(model)
    third = kernels(step.plan).index(step.updated.kernels[3].id)
    with failing(step.executor, third), pytest.raises(ExecutionError):
        model(**random_batch())
    refused = (lambda: model(**random_batch()), model.state_dict, lambda: settle(model))
    for attempt in refused:
        with pytest.raises(StatesTorn, match="Load a checkpoint"):
            attempt()
    # A part of the model is not enough, and whole weights are not without the moments.
    model.lm_head.load_state_dict(eager.lm_head.state_dict())
    with pytest.raises(StatesTorn, match="Load a checkpoint"):
        model(**random_batch())
    model.load_state_dict(checkpoint[0])
    model(**random_batch()).loss.backward()
    with pytest.raises(StatesTorn, match="Load a checkpoint"):
        ours.step()
    ours.zero_grad()
    for each, optimizer in ((model, ours), (eager, theirs)):
        each.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))
    assert all(map(torch.equal, train(model, ours), train(eager, theirs)))
    assert_same(model, ours, eager, theirs)


def test_a_forward_that_fails_beside_the_update_loses_nothing(pair: Any) -> None:
    """What has run of the update stays, the rest of it is done, once."""
    model, ours, eager, theirs = pair
    for each, optimizer in ((model, ours), (eager, theirs)):
        train(each, optimizer, steps=1)
    step = with_update(model)
    first = next(v.id for v in step.plan.vertices if v.id in step.plain.graph.ops)
    with failing(step.executor, kernels(step.plan).index(first)), pytest.raises(ExecutionError):
        model(**random_batch())
    for each, optimizer in ((model, ours), (eager, theirs)):
        train(each, optimizer, steps=2)
    assert_same(model, ours, eager, theirs)


def test_a_hook_of_all_optimizers_sees_gradients(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It clips, before ``step()``; when it is gone, updates are put off again."""
    model, ours, eager, theirs = pair

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.01)

    settle(model)
    before = stats(model)["updates_planned"]
    handle = register_optimizer_step_pre_hook(clip)
    try:
        for each, optimizer in ((model, ours), (eager, theirs)):
            train(each, optimizer, steps=3)
        assert stats(model)["updates_planned"] == before
    finally:
        handle.remove()
    assert sum("a hook of all optimizers" in message for message in caplog.messages) == 1
    for each, optimizer in ((model, ours), (eager, theirs)):
        train(each, optimizer, steps=3)
    assert_same(model, ours, eager, theirs)
    assert stats(model)["updates_planned"] == before + 2


def test_settings_may_change_between_steps(pair: Any) -> None:
    """Weight decay, a parameter frozen and thawed, momentum that cycles: one plan for each, a few, then none."""
    model, ours, eager, theirs = pair
    for each, optimizer in ((model, ours), (eager, theirs)):
        train(each, optimizer, steps=1)
        optimizer.param_groups[0]["weight_decay"] = 0.3
        train(each, optimizer, steps=2)
        for step in range(10):
            optimizer.param_groups[0]["betas"] = (0.8 + step / 100, 0.99)
            train(each, optimizer, steps=1)
    assert_same(model, ours, eager, theirs)
    assert stats(model)["updates_settled"] > 2


def test_it_needs_the_host() -> None:
    """Said when the model is prepared."""
    with pytest.raises(ConfigError, match=r"update: deferred .* optimizer: host"):
        prepare(one_layer(), config(optimizer="device"))


@pytest.mark.skipif(not writes_are_watched(), reason="needs a kernel that tells which pages are written to")
def test_updates_in_plans_fault_no_pages_of_the_weights() -> None:
    """Nobody watches the weights while the plan rewrites them: each page that is watched costs a fault."""
    model = prepared(one_layer(hidden_size=256, intermediate_size=512))
    optimizer = adamw(model)
    faults = []
    for step in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(**random_batch(seed=step)).loss.backward()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        optimizer.step()
        optimizer.zero_grad()
    assert stats(model)["updates_planned"] == 6
    assert min(faults[3:]) < sum(p.nbytes for p in model.parameters()) // mmap.PAGESIZE // 2, faults
