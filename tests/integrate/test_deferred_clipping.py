"""``update: deferred`` with clipping: the update multiplies, to eager mode's bits, or what runs in its place does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from disco_accel import restore, settle, stats
from disco_accel.step.gradients.gradient_norms import wrap
from disco_accel.step.run.session import find_state
from disco_accel.step.update import master_weights, pending_update, update_choice, update_pass
from disco_accel.step.update.update_pass import Stage
from disco_accel.step.update.updated_step import StepWithUpdate
from tests.integrate.clipped_pair import LOW, Clip, Pair, backward, clip_left, gradients, same, to_low
from tests.integrate.fp32_copies import adamw


@pytest.fixture
def pair() -> Pair:
    """Whose next clipping is left to the update."""
    return Pair()


WAYS: tuple[Clip, ...] = (
    to_low,
    lambda model: clip_left(model, model.parameters(), 1e9),
    lambda model: clip_left(model, list(model.parameters()), norm_type=float("inf")),
    lambda model: clip_left(model, (p for p in model.parameters()), norm_type=1),
)


@pytest.mark.parametrize("update_on", ["host", "device"])
@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(torch.float32, "script"), (torch.bfloat16, "script"), (torch.bfloat16, "fp32"), (torch.float16, "fp32")],
)
def test_bits_are_eager_ones(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, masters: str, update_on: str) -> None:
    """Norms above and below, of all kinds; several pieces; one plan for all coefficients. Some weights are in float32
    beside others in a low precision, so that the norm is in float32."""
    monkeypatch.setattr(update_pass, "PIECE", 128)
    monkeypatch.setattr(update_choice, "_PART_OF_ARENA", 1)
    pair = Pair(dtype, steps=2, update_on=update_on, master_weights=masters)
    for way in (*WAYS, to_low):
        pair.go_on(1, way)
    assert pair.deferred == len(WAYS) + 2
    state = find_state(pair.model)
    assert state is not None
    (step,) = (each for each in state.memory.plans.values() if isinstance(each, StepWithUpdate))
    scaled = [kernel for kernel in step.updated.kernels if kernel.stage is Stage.SCALE]
    assert {kernel.on_host for kernel in scaled} == {update_on == "host"}
    assert len(scaled) == sum(kernel.stage is Stage.UPDATE for kernel in step.updated.kernels)
    assert stats(pair.model)["engine"]["c10_allocations"] == 0
    pair.assert_same()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, 1e-30, 7.0])
def test_any_norm(pair: Pair, value: float) -> None:
    """Also the norm alone, where there is no bound."""
    before = pair.deferred
    for max_norm in (1.0, float("inf")):

        def clip(model: Any, max_norm: float = max_norm) -> torch.Tensor:
            for parameter in model.parameters():
                parameter.grad.fill_(value)
            return clip_left(model, model.parameters(), max_norm)

        pair.go_on(1, clip)
    assert pair.deferred == before + 1 + (value != value or value == float("inf"))
    pair.assert_same()


def test_clipping_by_others_multiplies_at_once(pair: Pair) -> None:
    """PyTorch's own function, whose caller may read gradients behind it."""
    before = pair.deferred
    for model, _ in pair.both:
        backward(model, 60)
        clip_grad_norm_(model.parameters(), LOW)
    assert same(*gradients(pair)) and pair.deferred == before
    for model, optimizer in pair.both:
        optimizer.step()
        model.zero_grad()
    pair.go_on()
    pair.assert_same()


def another_clipping(model: Any) -> None:
    clip_left(model, model.parameters(), LOW / 2)


def another_backward(model: Any) -> None:
    backward(model, 101)


def preparation_ends(model: Any) -> None:
    if find_state(model) is not None:
        restore(model)


@pytest.mark.parametrize("event", [settle, another_clipping, another_backward, preparation_ends])
def test_gradients_are_multiplied_before_others_read_or_write_them(pair: Pair, event: Callable[[Any], Any]) -> None:
    for model, _ in pair.both:
        backward(model, 100)
        to_low(model)
        event(model)
    for model, _ in pair.both:
        settle(model)
    assert same(*gradients(pair))
    for model, optimizer in pair.both:
        optimizer.step()
        model.zero_grad()
    pair.assert_same()


@pytest.mark.parametrize("masters", ["script", "fp32"])
def test_by_hand(monkeypatch: pytest.MonkeyPatch, masters: str) -> None:
    """Where no plan does the update, pieces are multiplied too, and behind it the gradients that are still there."""
    for module in (pending_update, master_weights):
        monkeypatch.setattr(module, "PIECE_BY_HAND", 128)
    pair = Pair(torch.bfloat16, master_weights=masters)
    for model, optimizer in pair.both:
        backward(model, 10)
        to_low(model)
        optimizer.step()
    before, _ = gradients(pair)
    pair.model.state_dict()
    after, expected = gradients(pair)
    assert same(after, expected) and not same(before, expected)
    pair.go_on(2)
    pair.assert_same()


def test_an_update_may_be_done_twice(pair: Pair) -> None:
    """With the same gradients, by hand and in the plan."""
    for model, optimizer in pair.both:
        backward(model, 40)
        to_low(model)
        optimizer.step()
        optimizer.step()
        model.zero_grad()
    pair.go_on()
    pair.assert_same()


def test_some_of_the_parameters_may_be_clipped(pair: Pair) -> None:
    """Others are not."""
    pair.go_on(2, lambda model: clip_left(model, model.first.parameters()))
    pair.assert_same()


def with_closure(_: Any, optimizer: Any) -> None:
    optimizer.step(lambda: torch.zeros(()))


def hooked(_: Any, optimizer: Any) -> None:
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.step()
    handle.remove()


def not_fused(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["fused"] = False
    optimizer.step()
    optimizer.param_groups[0]["fused"] = True


def scaled(_: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


def by_another(model: Any, _: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def from_the_start(model: Any, _: Any) -> None:
    adamw(model.parameters()).step()


@pytest.mark.parametrize("update", [with_closure, hooked, not_fused, scaled, by_another, from_the_start])
def test_updates_that_are_not_deferred_find_clipped_gradients(pair: Pair, update: Callable[[Any, Any], None]) -> None:
    """Though the clipping was left to them."""
    before = pair.deferred
    for model, optimizer in pair.both:
        backward(model, 90)
        to_low(model)
        update(model, optimizer)
        model.zero_grad()
    assert pair.deferred == before + 1
    pair.go_on(2)
    pair.assert_same()


def test_only_functions_that_are_known_are_wrapped() -> None:
    """Another version of PyTorch may have none, or one that takes or does something else."""

    def module(function: Any) -> Any:
        made = type(os)("torch_of_tomorrow")
        if function is not None:
            made.clip = made.alias = function
        return made

    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
        raise NotImplementedError

    def other(grads: Any, max_norm: float) -> None:
        raise NotImplementedError

    names = ("parameters", "max_norm", "total_norm", "foreach")

    def passing(function: Any) -> Any:
        return lambda *args: function(*args)

    for function in (None, other, 3):
        assert not wrap(module(function), "clip", names, passing)
    kept = module(clip)
    assert not wrap(kept, "clip", names, lambda function: function) and kept.clip is clip
    assert wrap(kept, "clip", names, passing, aliases=[(kept, "alias"), (kept, "missing")])
    assert kept.clip is kept.alias is not clip and kept.clip.__wrapped__ is clip


def test_another_optimizer_has_rates_of_its_own(pair: Pair) -> None:
    """One rate for all, then one for each layer: no plan takes one for the other."""
    for each in (pair.ours, pair.theirs):
        rates = iter((0.03, 0.001, 0.02, 0.0, 0.01, 0.005))
        (group,) = each.param_groups
        each.param_groups = [{**group, "params": [p], "lr": next(rates)} for p in group["params"]]
    pair.go_on(3)
    pair.assert_same()
