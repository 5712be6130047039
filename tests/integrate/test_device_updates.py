"""``update_on``: the device that trains updates weights too, to the processors' bits on the host device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from disco_accel import prepare, stats
from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.execute import executor
from disco_accel.graph.copies import swaps_out
from disco_accel.graph.spaces import TO_DEVICE, TO_HOST
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.values import outlives_step
from disco_accel.native.engine_class import make_engine
from disco_accel.native.engine_numbers import VertexFlag
from disco_accel.plan import Machine
from disco_accel.simulate.simulator import Link
from disco_accel.step.run.session import find_state
from disco_accel.step.update import update_choice
from disco_accel.step.update.update_choice import UpdateChoice
from tests.integrate.deferred_updates import STEPS, adamw, assert_same, config, train, with_update
from tests.support.engine_faults import failing, kernels
from tests.support.interrupts import interrupted
from tests.support.models import family_full, random_batch

SLOW = {"link_bandwidth": 2e7}
"""A link on which the state of the tiny models takes tens of milliseconds."""


@pytest.fixture(autouse=True)
def _small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_choice, "_PART_OF_ARENA", 1)


def pair(
    family: str = "llama", dtype: torch.dtype = torch.float32, layers: int = 1, **keys: Any
) -> tuple[Any, Any, Any, Any]:
    """A model whose weights its device updates, an eager one, and their optimizers."""
    shape: dict[str, Any] = {"n_layer" if family == "gpt2" else "num_hidden_layers": layers}
    if family == "qwen3":
        shape["tie_word_embeddings"] = True
    model, eager = (family_full(family, dtype=dtype, **shape) for _ in range(2))
    prepare(model, config(**({"update_on": "device"} | keys)))
    return model, adamw(model, weight_decay=0.1), eager, adamw(eager, weight_decay=0.1)


@pytest.mark.parametrize(
    ("family", "dtype", "budget"),
    [
        ("llama", torch.float32, 160 << 10),
        ("gpt2", torch.bfloat16, 1 << 30),
        ("qwen3", torch.bfloat16, 96 << 10),
    ],
)
def test_weights_and_moments_are_eager_ones(family: str, dtype: torch.dtype, budget: int) -> None:
    model, ours, eager, theirs = pair(family, dtype, layers=2, budget=budget)
    assert all(map(torch.equal, train(model, ours), train(eager, theirs)))
    step, figures = with_update(model), stats(model)
    assert len(step.updated.on_device) == len(step.updated.inputs) and figures["updates_planned"] == STEPS - 2
    assert figures["engine"]["c10_allocations"] == 0 and figures["steps_eager"] == 0
    host_updated = {v.id for v in step.plan.vertices if v.kind is VertexKind.INPUT and not outlives_step(v)}
    assert len(host_updated) >= 3 * len(step.updated.inputs) and all(
        (state, 0) not in step.plan.slots for state in host_updated
    )
    assert_same(model, ours, eager, theirs)


def test_masters_are_those_of_the_processors() -> None:
    keys = {"master_weights": "fp32"}
    model, ours, other, theirs = pair(dtype=torch.bfloat16, **keys)
    prepare(other, config(**keys))
    assert all(map(torch.equal, train(model, ours), train(other, theirs)))
    assert with_update(model).updated.on_device and not with_update(other).updated.on_device
    assert_same(model, ours, other, theirs)


def train_both(trained: tuple[Any, Any, Any, Any], steps: int) -> None:
    model, ours, eager, theirs = trained
    train(model, ours, steps)
    train(eager, theirs, steps)


def positions(model: Any) -> Iterator[int]:
    """Of kernels of the forward and of updates, some of each."""
    step = with_update(model)
    late = {v.id for v in step.plan.vertices if v.out}
    order = kernels(step.plan)
    until = max(order.index(vertex) for vertex in late if vertex in order)
    updates = [order.index(kernel.id) for kernel in step.updated.kernels]
    rng = random.Random(3)
    yield from (0, updates[0], updates[-1], *rng.sample(updates, 3), *rng.sample(range(until), 6))


def test_a_forward_that_fails_anywhere_has_its_update_done_once() -> None:
    """What is not home yet is brought there, the rest is done by hand: nothing is torn."""
    trained = model, ours, eager, theirs = pair(**SLOW)
    train_both(trained, 3)
    for position in positions(model):
        with failing(with_update(model).executor, position), pytest.raises(ExecutionError):
            model(**random_batch())
        train_both(trained, 1)
        assert_same(model, ours, eager, theirs)
        train_both(trained, 1)


def test_an_interrupted_forward_has_its_update_done_once() -> None:
    """On a slow link, so that the state is on its way to the device and back at any moment."""
    trained = model, ours, eager, theirs = pair(**SLOW)
    train_both(trained, 2)
    for _ in range(4):
        done = 0

        def attempt() -> Any:
            nonlocal done
            if done:
                train_both(trained, 1)
            done += 1
            return lambda: model(**random_batch())

        interrupted(attempt)
        assert_same(model, ours, eager, theirs)
        train_both(trained, 1)


def test_homes_are_whole_when_a_forward_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a loss that is dropped, and a write between forward and backward is noticed as before."""
    tables: list[torch.Tensor] = []

    def noted(ops: Any, vertices: torch.Tensor, *rest: Any) -> Any:
        tables.append(vertices)
        return make_engine(ops, vertices, *rest)

    monkeypatch.setattr(executor, "make_engine", noted)
    trained = model, ours, eager, theirs = pair(**SLOW)
    train_both(trained, 2)
    loss = model(**random_batch()).loss
    # The engine tells of a forward's end when all that comes home has come.
    offloads = [i for i, v in enumerate(with_update(model).plan.vertices) if swaps_out(v)]
    assert len(offloads) == 3 * len(theirs.state) and all(int(tables[-1][i, -1]) & VertexFlag.OUT for i in offloads)
    # No library call in between: what lies there is the plan's own work.
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.data, other.data)
        assert all(torch.equal(ours.state[mine][key], value) for key, value in theirs.state[other].items())
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.0)
    with pytest.raises(ExecutionError, match="changed in place between"):
        loss.backward()
    loss = model(**random_batch()).loss
    del loss
    train_both(trained, 2)
    assert_same(model, ours, eager, theirs)


def test_the_faster_place_is_chosen_weight_by_weight() -> None:
    """By the seconds of both kernels and the link: a slow link leaves all to the processors."""
    model, ours, *_ = pair(update_on="host")
    train(model, ours, steps=3)
    step = with_update(model)
    weights = [inputs.weight for inputs in step.updated.inputs]
    state = find_state(model)
    assert state is not None
    assert state.updates.deferral is not None and state.updates.deferral.pending is not None
    updates = UpdateChoice.of(step.plain.engine, step.plain.graph, weights, state.updates.deferral.pending.parts)
    chosen = {}
    for name, bandwidth in (("slow", 1e3), ("fast", 1e12)):
        link = Link(bandwidth, 0.0)
        (first, _), *_ = updates.choices("auto", Machine(links={TO_DEVICE: link, TO_HOST: link}))
        chosen[name] = len(first)
    assert chosen["slow"] == 0 and len(updates.choices("device", Machine())[0][0]) == len(weights)
    for key, record in list(updates._known.items()):
        on_host, _ = key
        updates._known[key] = replace(record, seconds=record.seconds * (100 if on_host else 1))
    (first, _), *_ = updates.choices("auto", Machine(links={TO_DEVICE: Link(1e12, 0.0), TO_HOST: Link(1e12, 0.0)}))
    assert len(first) > len(weights) // 2


def test_that_nothing_has_room_on_the_device_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(update_choice, "_PART_OF_ARENA", 1 << 30)
    trained = model, ours, eager, theirs = pair()
    train_both(trained, 4)
    assert not with_update(model).updated.on_device
    assert sum("update_on: device: no plan" in record.message for record in caplog.records) == 1
    assert_same(model, ours, eager, theirs)


def test_what_it_needs_is_said() -> None:
    with pytest.raises(ConfigError, match="update_on: device is for updates in the plan"):
        prepare(family_full("llama"), config(update="step", update_on="device"))
    with pytest.raises(ConfigError, match="update_on"):
        config(update_on="gpu")
