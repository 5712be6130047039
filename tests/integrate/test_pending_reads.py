"""A weight or a moment whose update is pending: each way to read or write it finds what eager mode would have there."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from disco_accel import prepare, restore, stats
from tests.integrate.deferred_updates import adamw, assert_same, config, one_layer, prepared, train
from tests.support.models import family_full, random_batch

Script = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any, Any]:
    """A prepared model with its optimizer, and an eager one with its own, trained alike for as many steps."""
    eager = one_layer()
    model = prepared(copy.deepcopy(eager))
    ours, theirs = adamw(model), adamw(eager)
    assert all(map(torch.equal, train(model, ours, steps=2), train(eager, theirs, steps=2)))
    return model, ours, eager, theirs


def _in_a_thread(model: torch.nn.Module, _: Any) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: seen.extend(p.detach().clone() for p in model.parameters()))
    thread.start()
    thread.join()
    return seen


def _average(model: torch.nn.Module, _: Any) -> list[torch.Tensor]:
    averages = [torch.zeros_like(p) for p in model.parameters()]
    torch._foreach_lerp_(averages, [*model.parameters()], 0.25)
    return averages


def _stored(model: torch.nn.Module, _: Any) -> list[torch.Tensor]:
    buffer = io.BytesIO()
    torch.save([*model.parameters()], buffer)
    return [torch.tensor(list(buffer.getvalue()[-4096:]))]


def _halved(model: torch.nn.Module, _: Any) -> None:
    model.lm_head.weight.data.mul_(0.5)


def _moment_reset(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.lm_head.weight]["exp_avg"].zero_()


def _inferred(model: torch.nn.Module, _: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model.lm_head.weight * 2]


SCRIPTS: dict[str, Script] = {
    "norms": lambda model, _: [p.norm() for p in model.parameters()],
    "data": lambda model, _: [p.data.clone() for p in model.parameters()],
    "numpy": lambda model, _: [torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters()],
    "moments": lambda _, optimizer: [s[n].clone() for s in optimizer.state.values() for n in ("exp_avg", "exp_avg_sq")],
    "vector": lambda model, _: [torch.nn.utils.parameters_to_vector(model.parameters())],
    "copy": lambda model, _: [copy.deepcopy(model.lm_head.weight), *copy.deepcopy(model).parameters()],
    "thread": _in_a_thread,
    "average": _average,
    "stored": _stored,
    "halved": _halved,
    "moment reset": _moment_reset,
    "inference": _inferred,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_reader_between_step_and_forward_finds_the_update(pair: Any, name: str) -> None:
    """And training goes on as in eager mode, with ordinary tensors."""
    model, ours, eager, theirs = pair
    shown = []
    for each, optimizer in ((model, ours), (eager, theirs)):
        each(**random_batch(seed=7)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = SCRIPTS[name](each, optimizer) or []
        assert all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in (*seen, *each.parameters()))
        shown.append(seen)
    assert len(shown[0]) == len(shown[1]) and all(map(torch.equal, *shown))
    planned = stats(model)["updates_planned"]
    assert all(map(torch.equal, train(model, ours, steps=2), train(eager, theirs, steps=2)))
    assert stats(model)["updates_planned"] > planned
    assert_same(model, ours, eager, theirs)


def test_what_reads_no_values_leaves_the_update_to_the_plan(pair: Any) -> None:
    """Shapes, dtypes, gradients: what loops over parameters ask for all the time."""
    model, ours, eager, theirs = pair
    settled = stats(model)["updates_settled"]
    for each, optimizer in ((model, ours), (eager, theirs)):
        each(**random_batch(seed=8)).loss.backward()
        optimizer.step()
        for p in each.parameters():
            assert isinstance(p, torch.nn.Parameter) and p.requires_grad and p.is_leaf and p.grad is not None
            assert (p.numel(), p.dtype, p.device.type, p.dim()) == (p.grad.numel(), p.grad.dtype, "cpu", p.ndim)
        optimizer.zero_grad()
    assert all(map(torch.equal, train(model, ours, steps=1), train(eager, theirs, steps=1)))
    assert stats(model)["updates_settled"] == settled


KEPT: dict[str, Callable[[torch.nn.Module], Any]] = {
    "data": lambda model: model.lm_head.weight.data,
    "array": lambda model: model.lm_head.weight.detach().numpy(),
    "state": lambda model: model.state_dict()["lm_head.weight"],
    "storage": lambda model: model.lm_head.weight.untyped_storage(),
    "view": lambda model: memoryview(model.lm_head.weight.detach().numpy()),
}


@pytest.mark.parametrize("way", KEPT)
def test_weights_that_something_else_holds_too_are_updated_at_once(
    pair: Any, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What was made before ``step()`` reads memory past all fences; later updates are the plan's again."""
    model, ours, eager, theirs = pair
    kept, planned = KEPT[way](model), stats(model)["updates_planned"]
    for step in range(2):
        for each, optimizer in ((model, ours), (eager, theirs)):
            each(**random_batch(seed=9 + step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        bytes_now = bytes(kept) if not isinstance(kept, torch.Tensor) else bytes(kept.numpy())
        assert bytes_now == eager.lm_head.weight.detach().numpy().tobytes()
    assert stats(model)["updates_planned"] == planned
    del kept
    assert all(map(torch.equal, train(model, ours, steps=2), train(eager, theirs, steps=2)))
    assert stats(model)["updates_planned"] > planned
    assert_same(model, ours, eager, theirs)


def test_a_thread_that_reads_all_the_time_keeps_nobody_and_changes_nothing(pair: Any) -> None:
    """Also while the next forward begins, which does the update that it waits for. A read that had begun as ``step()``
    ran may be refused."""
    model, ours, eager, theirs = pair
    norms: list[torch.Tensor] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                norms.append(model.lm_head.weight.norm())
            except RuntimeError as error:
                assert "settle(model)" in str(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        losses = train(model, ours, steps=3)
    finally:
        over.set()
        thread.join()
    assert norms and all(map(torch.equal, losses, train(eager, theirs, steps=3)))
    assert_same(model, ours, eager, theirs)


@pytest.mark.parametrize("way", ["unmerge", "unload", "delta"])
def test_an_adapter_whose_update_is_pending_is_merged_with_it(way: str) -> None:
    """The frozen base is, bit for bit, what eager mode has after each merge and its undoing."""
    eager = get_peft_model(
        family_full("llama", num_hidden_layers=1), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    model = prepare(copy.deepcopy(eager), config(optimizer="planned", update="auto"))
    results = []
    for each in (model, eager):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2, fused=True)
        for step in range(4):
            each(**random_batch(seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if way == "unmerge":
                each.merge_adapter()
                each.state_dict()
                each.unmerge_adapter()
            elif way == "delta":
                layer = each.base_model.model.model.layers[0].mlp.up_proj
                results.append(layer.get_delta_weight("default").clone())
        results.append(each.merge_and_unload().state_dict() if way == "unload" else each.state_dict())
    *some, last = results[: len(results) // 2]
    *others, expected = results[len(results) // 2 :]
    assert all(map(torch.equal, some, others)) and last.keys() == expected.keys()
    assert all(torch.equal(last[name], expected[name]) for name in expected)


def test_weights_of_a_model_that_is_gone_are_updated_and_freed() -> None:
    """A list of parameters outlives its model with an update pending; nothing holds the rest."""
    model = prepared(one_layer())
    eager = copy.deepcopy(restore(model))
    model = prepared(model)
    for each in (model, eager):
        optimizer = adamw(each)
        for step in range(2):
            each(**random_batch(seed=step)).loss.backward()
            optimizer.step()
    weight, gone = model.lm_head.weight, weakref.ref(model)
    del model, each, optimizer
    assert torch.equal(weight, eager.lm_head.weight)
    moment = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None and moment() is None
