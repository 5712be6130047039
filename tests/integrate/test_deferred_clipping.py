"""``update: deferred`` with clipping: the update multiplies, to eager mode's bits, or what runs in its place does."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from disco_accel import stats
from disco_accel.step.gradients.wrapped_function import wrap
from disco_accel.step.run.session import find_state
from disco_accel.step.update import clipping, master_state, pending_update, update_choice, update_pass
from disco_accel.step.update.update_pass import Stage
from disco_accel.step.update.updated_step import StepWithUpdate
from tests.integrate.clipped_pair import LOW, Clip, Pair, as_they_lie, backward, gradients, same, to_low
from tests.integrate.fp32_copies import adamw


@pytest.fixture
def pair() -> Pair:
    """Whose next clipping is left to the update."""
    return Pair()


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    gc.collect()
    assert "grad" not in vars(torch.nn.Parameter), "the property is there as long as it is needed"


WAYS: tuple[Clip, ...] = (
    to_low,
    lambda model: clip_grad_norm_(model.parameters(), 1e9),
    lambda model: clip_grad_norm_(list(model.parameters()), LOW, norm_type=float("inf")),
    lambda model: clip_grad_norm_(model.parameters(), LOW, norm_type=1, foreach=False),
    lambda model: clip_grad_norm_((p for p in model.parameters()), LOW, error_if_nonfinite=True),
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
    (step,) = (each for each in state.plans.values() if isinstance(each, StepWithUpdate))
    scaled = [kernel for kernel in step.updated.kernels if kernel.stage is Stage.SCALE]
    assert {kernel.on_host for kernel in scaled} == {update_on == "host"}
    assert len(scaled) == sum(kernel.stage is Stage.UPDATE for kernel in step.updated.kernels)
    assert stats(pair.model)["engine"]["c10_allocations"] == 0
    pair.assert_same()


@pytest.mark.parametrize("norm", [float("inf"), float("nan"), 0.0, 1e-30, 7.0])
def test_any_norm(pair: Pair, norm: float) -> None:
    """By the function that takes it."""

    def clip(model: Any) -> None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(norm))

    before = pair.deferred
    pair.go_on(2, clip)
    assert pair.deferred == before + 2
    pair.assert_same()


@pytest.mark.parametrize("masters", ["script", "fp32"])
def test_by_hand(monkeypatch: pytest.MonkeyPatch, masters: str) -> None:
    """Where no plan does the update, pieces are multiplied too, and the gradients stay as they lie."""
    for module in (pending_update, master_state):
        monkeypatch.setattr(module, "PIECE_BY_HAND", 128)
    pair = Pair(torch.bfloat16, master_weights=masters)
    for model, optimizer in pair.both:
        backward(model, 10)
        to_low(model)
        optimizer.step()
    lie = as_they_lie(pair.model)
    settle_update(pair.model)
    assert same(lie, as_they_lie(pair.model)) and not same(lie, as_they_lie(pair.eager))
    assert same(*gradients(pair))
    pair.go_on(2)
    pair.assert_same()


def settle_update(model: torch.nn.Module) -> None:
    """What looks at weights, not at gradients."""
    model.state_dict()


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


def some(model: Any) -> None:
    """Twice of some, of one, of the rest; none of a bias."""
    clip_grad_norm_(model.first.parameters(), LOW)
    clip_grad_norm_([model.first.weight, model.norm.weight], LOW)
    clip_grad_norm_(model.last.weight, LOW)


def test_some_of_the_parameters_may_be_clipped(pair: Pair) -> None:
    """Each group by a norm of its own, also of parameters of two models at once and of one that is there twice."""
    pair.go_on(2, some)
    pair.assert_same()

    def repeated(model: Any) -> None:
        clip_grad_norm_([model.first.weight, *model.parameters()], LOW)

    before = pair.deferred
    pair.go_on(1, repeated)
    assert pair.deferred == before
    other = Pair()
    for step in range(70, 72):
        norms = []
        for each in range(2):
            models = (pair.model, other.model) if not each else (pair.eager, other.eager)
            for model in models:
                backward(model, step)
            norms.append(clip_grad_norm_([p for model in models for p in model.parameters()], LOW))
        for both in (pair, other):
            for model, optimizer in both.both:
                optimizer.step()
                model.zero_grad()
        assert same(norms[:1], norms[1:])
    for both in (pair, other):
        both.assert_same()


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

    def divides(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
        for parameter in parameters:
            parameter.grad.div_(torch.clamp(total_norm / max_norm, min=1.0))

    assert clipping._noting(divides) is divides


def test_compiled_clipping_is_as_ever(pair: Pair) -> None:
    """Whoever compiles the call compiles PyTorch's own function."""
    compiled = torch.compile(lambda parameters: clip_grad_norm_(parameters, LOW), backend="eager")
    pair.go_on(2, lambda model: compiled(list(model.parameters())))
    read = torch.compile(lambda parameters: [p.grad * 2 for p in parameters], backend="eager")
    for _ in range(2):
        seen = []
        for model, optimizer in pair.both:
            backward(model, 140)
            to_low(model)
            seen.append(read(list(model.parameters())))
            optimizer.step()
            model.zero_grad()
        assert same(*seen)
    pair.go_on(1)
    pair.assert_same()


def test_another_optimizer_has_rates_of_its_own(pair: Pair) -> None:
    """One rate for all, then one for each layer: no plan takes one for the other."""
    for each in (pair.ours, pair.theirs):
        rates = iter((0.03, 0.001, 0.02, 0.0, 0.01, 0.005))
        (group,) = each.param_groups
        each.param_groups = [{**group, "params": [p], "lr": next(rates)} for p in group["params"]]
    pair.go_on(3)
    pair.assert_same()
