"""Norms that plans make for ``clip_grad_norm_``: the bits of those that are computed, and never an old one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from disco_accel import DiscoConfig, prepare, settle, stats
from disco_accel.native.host_memory import writes_are_watched
from tests.integrate.test_accumulation import Layers, ids
from tests.support.unwatched import without_watching_writes

pytestmark = pytest.mark.skipif(not writes_are_watched(), reason="norms are made where writes to gradients are seen")


class Pair:
    """A prepared model that puts updates off, and an eager one, with an optimizer each."""

    def __init__(self, dtype: torch.dtype = torch.float32, **keys: Any) -> None:
        self.model: torch.nn.Module = Layers(expanded=False).to(dtype)
        self.eager = copy.deepcopy(self.model)
        usual = {"memory_budget": 1 << 24, "device": "cpu", "optimizer": "host", "update": "deferred"}
        prepare(self.model, DiscoConfig(**(usual | {"plan_cache": None} | keys)))
        self.both = (self.model, self.eager)
        self.optimizers = [torch.optim.AdamW(of.parameters(), lr=1e-3, fused=True) for of in self.both]
        self.steps = 0

    def backward(self) -> None:
        for of in self.both:
            of(ids(self.steps)).backward()
        self.steps += 1

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def step(self, clip: Callable[[torch.nn.Module], torch.Tensor | None]) -> None:
        """With equal norms and gradients."""
        self.backward()
        norms = [clip(of) for of in self.both]
        assert norms[0] is norms[1] is None or torch.equal(*[n for n in norms if n is not None])
        for ours, theirs in zip(self.model.parameters(), self.eager.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
        self.update()

    def planned(self) -> int:
        return int(stats(self.model)["norms_planned"])

    def warm(self) -> None:
        """Until norms are made."""
        for _ in range(3):
            self.step(_clip)
        assert self.planned() == 1


def _first(of: torch.nn.Module) -> torch.nn.Parameter:
    return of.get_parameter("embed.weight")


def _clip(of: torch.nn.Module) -> torch.Tensor:
    return clip_grad_norm_(of.parameters(), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_have_the_bits_of_computed_ones(dtype: torch.dtype) -> None:
    pair = Pair(dtype)
    for _ in range(5):
        pair.step(_clip)
    assert pair.planned() == 3, "the first asks, the second has no update to plan with"
    settle(pair.model)
    assert all(map(torch.equal, pair.model.parameters(), pair.eager.parameters()))


def _written(of: torch.nn.Module) -> torch.Tensor:
    gradient = _first(of).grad
    assert gradient is not None
    gradient.data[0, 0] += 3
    return _clip(of)


def _in_place(of: torch.nn.Module) -> torch.Tensor:
    for parameter in of.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    return _clip(of)


def _through_numpy(of: torch.nn.Module) -> torch.Tensor:
    gradient = _first(of).grad
    assert gradient is not None
    if gradient.dtype is torch.float32:
        gradient.numpy()[0] = 7
    return _clip(of)


def _replaced(of: torch.nn.Module) -> torch.Tensor:
    parameter = _first(of)
    parameter.grad = torch.ones_like(parameter)
    gc.collect()
    return _clip(of)


def _some(of: torch.nn.Module) -> torch.Tensor:
    return clip_grad_norm_(list(of.parameters())[::2], 0.5)


def _turned(of: torch.nn.Module) -> torch.Tensor:
    return clip_grad_norm_(list(of.parameters())[::-1], 0.5)


def _with_others(of: torch.nn.Module) -> torch.Tensor:
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.full((3,), 2.0)
    return clip_grad_norm_([other, *of.parameters()], 0.5)


def _largest(of: torch.nn.Module) -> torch.Tensor:
    return clip_grad_norm_(of.parameters(), 0.5, norm_type=float("inf"))


def _first_power(of: torch.nn.Module) -> torch.Tensor:
    return clip_grad_norm_(of.parameters(), 0.5, 1.0)


def _plainly(of: torch.nn.Module) -> torch.Tensor:
    return clip_grad_norm_(of.parameters(), 0.5, foreach=False)


def _twice(of: torch.nn.Module) -> torch.Tensor:
    """The second norm is of clipped gradients."""
    _clip(of)
    return clip_grad_norm_(of.parameters(), 0.1)


def _norm_alone(of: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in of.parameters() if p.grad is not None])


def _of_one(of: torch.nn.Module) -> torch.Tensor:
    return clip_grad_norm_(_first(of), 0.5)


def _infinite(of: torch.nn.Module) -> torch.Tensor:
    gradient = _first(of).grad
    assert gradient is not None
    gradient[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(of.parameters(), 0.5, error_if_nonfinite=True)
    gradient[0, 0] = 0
    return _clip(of)


@pytest.mark.parametrize(
    ("clip", "planned"),
    [
        (_written, 0),
        (_in_place, 0),
        (_through_numpy, 0),
        (_replaced, 1),
        (_some, 1),
        (_turned, 1),
        (_with_others, 1),
        (_largest, 0),
        (_first_power, 0),
        (_plainly, 1),
        (_twice, 1),
        (_norm_alone, 1),
        (_of_one, 1),
        (_infinite, 0),
    ],
)
def test_a_norm_is_of_the_gradients_as_they_are(clip: Callable[[torch.nn.Module], torch.Tensor], planned: int) -> None:
    """``planned``: whether some of what was asked for is what the plan made. Behind it all is as before."""
    pair = Pair()
    pair.warm()
    pair.step(clip)
    assert pair.planned() == 1 + planned
    pair.step(_clip)
    assert pair.planned() == 2 + planned


def test_gradients_that_always_change_have_no_norms_made() -> None:
    """Nobody pays for looking at them."""
    pair = Pair()
    for _ in range(6):
        pair.step(_in_place)
    before = stats(pair.model)["norms_planned"]
    for _ in range(2):
        pair.step(_clip)
    assert pair.planned() == before == 0


def test_the_norm_of_another_backward_is_not_taken() -> None:
    """One that has added to gradients in the meantime, through a plan or without one."""
    pair = Pair()
    pair.warm()
    pair.backward()
    pair.step(_clip)
    pair.backward()
    for of in pair.both:
        (_first(of).sum() * 3).backward()
    pair.step(_clip)


def test_no_norms_where_writes_are_not_seen() -> None:
    with without_watching_writes():
        pair = Pair()
        for _ in range(4):
            pair.step(_written)
        assert "norms_planned" not in stats(pair.model)


def test_models_do_not_take_each_others_norms() -> None:
    """One clips while the other's gradients wait, and both at once."""
    one, two = Pair(), Pair()
    one.warm()
    two.warm()
    one.backward()
    two.step(_clip)
    one.step(_clip)
    one.backward()
    two.backward()
    pairs = zip(one.both, two.both, strict=True)
    norms = [clip_grad_norm_([*a.parameters(), *b.parameters()], 0.5) for a, b in pairs]
    assert torch.equal(*norms)
    for pair in (one, two):
        pair.update()
        pair.step(_clip)
