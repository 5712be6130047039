"""A forward that does more than compute from what its key knows is refused by name, or holds for the one step."""

from __future__ import annotations

import functools
import gc
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import disco_accel
from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import CaptureError

ERROR = DiscoConfig(memory_budget="64MiB", device="cpu", plan_cache=None, planner="build")
EAGER = DiscoConfig(memory_budget="64MiB", device="cpu", plan_cache=None, planner="build", on_unsupported="eager")
RECORDED: list[torch.Tensor] = []
CALLS = 0
OWN_RANDOM, OWN_NUMPY = random.Random(3), np.random.default_rng(3)


class Net(nn.Module):
    """Frozen layer, trainable head; ``extra`` runs in between."""

    def __init__(self, extra: Callable[[Any, torch.Tensor], torch.Tensor] = lambda _, x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 4)
        self.extra = extra
        self.calls = 0
        self.first = True
        self.log: list[Any] = []
        self.random, self.numpy = random.Random(1), np.random.default_rng(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.extra(self, self.body(x))).square().mean()
        return loss


def _count(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x * model.calls


def _count_globally(_model: Any, x: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return x * CALLS


def _log(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.log.append(len(model.log))
    return x


def _keep(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.last = x
    return x


def _once(model: Any, x: torch.Tensor) -> torch.Tensor:
    """As layers that set themselves up at their first forward."""
    if model.first:
        model.first = False
        return x * 3
    return x


def _own_generator(_model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.default_rng().random())


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "Python's random": (lambda _, x: x * random.random(), r"Python's generator"),
    "numpy's random": (lambda _, x: x * float(np.random.rand()), r"numpy's generator"),
    "a random.Random of the model": (lambda m, x: x * m.random.random(), r"Python's generator"),
    "a numpy generator of the model": (lambda m, x: x * float(m.numpy.random()), r"numpy's generator"),
    "a global random.Random": (lambda _, x: x * OWN_RANDOM.uniform(1, 2), r"Python's generator"),
    "a global numpy generator": (lambda _, x: x * float(OWN_NUMPY.uniform(1, 2)), r"numpy's generator"),
    "a counter": (_count, r"calls.*changes each time"),
    "a global counter": (_count_globally, r"CALLS.*changes each time"),
    "a log": (_log, r"log.*changes each time"),
    "a tensor kept": (_keep, r"last.*keeps a tensor"),
}


def _train(model: Any, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, model.head.weight.detach()]


def _seed() -> None:
    global CALLS
    CALLS = 0
    RECORDED.clear()
    random.seed(0)
    np.random.seed(0)
    OWN_RANDOM.seed(3)
    OWN_NUMPY.bit_generator.state = np.random.default_rng(3).bit_generator.state


def _left(model: Any) -> list[Any]:
    """All that the forwards of this file leave behind."""
    kept = getattr(model, "last", None)
    return [
        CALLS,
        model.calls,
        model.log,
        random.random(),
        float(np.random.rand()),
        OWN_RANDOM.random(),
        float(OWN_NUMPY.random()),
        model.random.random(),
        float(model.numpy.random()),
        None if kept is None else kept.tolist(),
    ]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_plan_can_repeat_is_refused_by_name(kind: str) -> None:
    """With the function and its line, at the second step at the latest; nothing is left of the attempt."""
    extra, message = REFUSED[kind]
    _seed()
    model: Any = prepare(Net(extra), ERROR)
    with pytest.raises(CaptureError, match=message) as refusal:
        _train(model, 2)
    if "random" in kind or "generator" in kind:
        assert f"test_side_effects.py:{extra.__code__.co_firstlineno}" in str(refusal.value)
    assert not isinstance(getattr(model, "last", None), torch.Tensor)


@pytest.mark.parametrize("kind", REFUSED)
def test_in_eager_mode_it_trains_as_without_us(kind: str) -> None:
    """Losses, weights, and all that the forwards leave behind."""
    extra, _ = REFUSED[kind]
    results = []
    for planned in (False, True):
        _seed()
        model: Any = Net(extra)
        if planned:
            prepare(model, EAGER)
        trained = _train(model, 5)
        results.append((trained, _left(model)))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert results[0][1] == results[1][1]


def test_a_generator_made_by_the_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"_own_generator .*makes a generator of its own"):
        _train(prepare(Net(_own_generator), ERROR), 1)


def test_a_buffer_that_the_forward_replaces_is_refused_by_name() -> None:
    def replace(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.mean = model.mean * 0.9 + x.detach().mean() * 0.1
        return x - model.mean

    model: Any = Net(replace)
    model.register_buffer("mean", torch.zeros(()))
    with pytest.raises(CaptureError, match=r"mean: the forward puts another tensor in the place"):
        _train(prepare(model, ERROR), 1)
    assert torch.equal(model.mean, torch.zeros(()))


def test_a_first_forward_that_differs_is_run_once() -> None:
    """Its plan is for that step; the ones after it have the state that it left."""
    expected = _train(Net(_once), 4)
    model: Any = prepare(Net(_once), ERROR)
    assert all(map(torch.equal, _train(model, 4), expected))
    assert model.first is False and stats(model)["steps_compiled"] == 4
    assert stats(model)["plans"] == 2


def _record(_module: Any, _args: Any, output: torch.Tensor) -> None:
    RECORDED.append(output.detach())


@pytest.mark.parametrize("where", ["global list", "closure", "bound method", "object of a partial"])
def test_a_hook_that_records_is_refused_by_name(where: str) -> None:
    store: list[torch.Tensor] = []

    class Recorder:
        def __init__(self) -> None:
            self.seen: dict[str, torch.Tensor] = {}

        def __call__(self, *args: Any) -> None:
            self.seen["last"] = args[-1].detach()

        def hook(self, *args: Any) -> None:
            self(*args)

    recorder = Recorder()
    hooks: dict[str, Callable[..., None]] = {
        "global list": _record,
        "closure": lambda _m, _a, output: store.append(output.detach()),
        "bound method": recorder.hook,
        "object of a partial": functools.partial(recorder, 1),
    }
    RECORDED.clear()
    model: Any = Net()
    model.body.register_forward_hook(hooks[where])
    prepare(model, ERROR)
    with pytest.raises(CaptureError, match="keeps a tensor there"):
        _train(model, 1)
    assert not RECORDED and not store and not recorder.seen


def test_a_hook_that_is_said_to_be_pure_is_part_of_the_plan() -> None:
    """It runs at the capture alone, and what it does to the values is done at each step."""

    @disco_accel.pure
    def logging_hook(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return output * 2

    results = []
    for planned in (False, True):
        _seed()
        model: Any = Net()
        model.body.register_forward_hook(logging_hook)
        if planned:
            prepare(model, ERROR)
        results.append(_train(model, 4))
    assert all(map(torch.equal, *results))
    assert stats(model)["plans"] == 1 and CALLS < 4


def test_an_attribute_that_is_new_at_each_step_is_refused_by_name() -> None:
    """Each value would need a plan; one that comes back has one, and a pause in the changes ends the refusals."""
    model: Any = prepare(Net(lambda m, x: x * m.calls), ERROR)
    for step in range(4):
        model.calls = step % 2
        _train(model, 1)
    assert stats(model)["plans"] == 2
    with pytest.raises(CaptureError, match=r"calls: another one at each of the last"):
        for step in range(40):
            model.calls = step
            _train(model, 1)
    _train(model, 2)


def test_what_a_forward_prints_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def talking(_model: Any, x: torch.Tensor) -> torch.Tensor:
        print(x.shape)
        return x

    with caplog.at_level(logging.WARNING, "disco_accel"):
        _train(prepare(Net(talking), ERROR), 3)
    (line,) = (r.getMessage() for r in caplog.records if "calls print" in r.getMessage())
    assert "talking" in line and "test_side_effects.py:" in line


def test_what_garbage_collections_run_is_no_part_of_a_forward() -> None:
    """They happen anywhere: what callbacks count and finalizers of unrelated objects read does not matter."""

    def collected(_phase: str, _info: Any) -> None:
        global CALLS
        CALLS += 1

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            finalized.append(getattr(self, "calls", 0))

    def collecting(_model: Any, x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return x

    finalized: list[int] = []
    gc.callbacks.append(collected)
    try:
        model: Any = prepare(Net(collecting), ERROR)
        for step in range(3):
            model.calls = step
            gc.disable()
            Garbage()
            _train(model, 1)
    finally:
        gc.enable()
        gc.callbacks.remove(collected)
    assert finalized
    assert stats(model)["plans"] == 1
