"""Gradients of ``optimizer: host`` leave for their place as soon as they are final; what cannot leave stays right."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.capture.leaving_gradients import leaving_by
from disco_accel.errors import BudgetTooSmall, ExecutionError
from disco_accel.graph.copies import is_transfer
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.plan import make_plan
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.session import Session, current_step, find_state
from tests.support.engine_faults import failing, kernels
from tests.support.models import family_full, random_batch

WIDTH, ROWS = 32, 24


class Layers(torch.nn.Module):
    """Four products between an embedding and its transpose, or a ``head`` of its own."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(ROWS, WIDTH)
        self.head = self.embed if tied else torch.nn.Linear(WIDTH, ROWS, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.cross_entropy(x @ self.head.weight.t(), ids.roll(1))


class Odd(torch.nn.Module):
    """Gradients of all kinds. ``one`` and ``two`` get the same tensor, ``left`` and ``right`` parts of one, ``first``
    and ``none``, which is empty, the begin of one; that of ``summed`` is one number, expanded; ``turned`` has its
    elements in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.summed = (torch.nn.Parameter(torch.randn(5)) for _ in range(3))
        self.left, self.right, self.first, self.turned = (torch.nn.Parameter(torch.randn(4, 5)) for _ in range(4))
        self.none, self.single, self.stepped = (torch.nn.Parameter(torch.randn(size)) for size in ((0, 5), (), (3,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ((self.one + self.two) * x).sum() + 0.5 * self.summed.sum()
        y = y + (torch.cat([self.left, self.right], 1) * x[0]).square().sum()
        y = y + (torch.cat([self.first, self.none, x[None]], 0) * x).sin().sum()
        y = y + (self.turned.t() @ self.turned * x).tanh().sum() + self.single * x.sum()
        # Does not depend on the tangent's value.
        return y + torch.sign(self.stepped).sum()


class Equal(torch.nn.Module):
    """``one`` and ``two`` get gradients of the same bits, each made by a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (torch.nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + self.one) + self.two).square().mean()


LEAVING = {"turned", "single", "stepped"}


def ids(seed: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (12,), generator=torch.Generator().manual_seed(seed))


def vector(seed: int) -> torch.Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(seed))


def prepared(model: torch.nn.Module, **keys: Any) -> torch.nn.Module:
    usual = {"memory_budget": 1 << 24, "device": "cpu", "optimizer": "host", "plan_cache": None}
    return prepare(model, DiscoConfig(**(usual | keys)))


def session_of(model: torch.nn.Module) -> Session:
    state = find_state(model)
    assert state is not None
    return state


def compiled(model: torch.nn.Module) -> CompiledStep:
    step = current_step(model)
    assert step is not None
    return step


def leaving(model: torch.nn.Module) -> set[str]:
    """Names of the weights whose gradients leave."""
    step = compiled(model)
    transfers = leaving_by(step.graph)
    return {gradient.name for gradient in step.captured.gradients if gradient.ref in transfers}


def assert_same(model: torch.nn.Module, eager: torch.nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert torch.equal(ours.grad, theirs.grad) and ours.grad.stride() == theirs.grad.stride(), name
    assert stats(model)["steps_eager"] == 0


def test_every_gradient_goes_straight_to_its_place() -> None:
    """Also of a tied weight, which is a sum; nothing is copied out of the arena, and no kernel keeps a gradient."""
    model, eager = prepared(Layers()), Layers()
    for seed in range(3):
        for of in (model, eager):
            of.zero_grad()
            of(ids(seed)).backward()
        assert_same(model, eager)
        step, nbytes = compiled(model), sum(p.nbytes for p in model.parameters())
        assert leaving(model) == {name for name, _ in model.named_parameters()}
        assert step.executor.counters()["offload_bytes"] == nbytes
        memory = session_of(model).gradients.memory
        assert all(memory.holds(p.grad) for p in model.parameters() if p.grad is not None)
        assert memory.nbytes <= nbytes + 64 * len(list(model.parameters()))
        produced = {gradient.ref[0] for gradient in step.captured.gradients}
        assert not any(v.keep for v in step.plan.vertices if v.id in produced)


def test_equal_gradients_are_made_once_and_leave_for_two_places() -> None:
    model, eager = prepared(Equal()), Equal()
    for seed in range(3):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        for of in (model, eager):
            of(x).backward()
        assert_same(model, eager)
    figures = stats(model)
    assert figures["recomputation"]["kernels"] == 1 and figures["steps_accumulated"] == 2


def test_gradients_of_later_layers_have_left_when_the_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trace of a step that runs its vertices one after the other, as the plan has them: each gradient leaves
    right behind its kernel, and all but the last layer's before the last kernel starts."""
    monkeypatch.setattr(Session, "engine", {"dispatch": "synchronous"})
    model = prepared(Layers())
    model(ids(0)).backward()
    model.zero_grad()
    step = compiled(model)
    step.executor.set_tracing(True)
    model(ids(1)).backward()
    events = {event.vertex: event for event in step.executor.events()}
    step.executor.set_tracing(False)
    last = max(events[v].start for v in kernels(step.plan))
    transfers = leaving_by(step.graph)
    early = {g.name for g in step.captured.gradients if events[transfers[g.ref]].end <= last}
    assert early >= {f"layers.{i}.{part}" for i in range(4) for part in ("weight", "bias")}
    waits = Counter(v for u, v in (*step.plan.data_edges, *step.plan.memory_edges) if v in transfers.values())
    assert set(waits.values()) == {1}, "for its kernel alone"


@pytest.mark.parametrize("update", ["now", "deferred"])
def test_gradients_that_cannot_leave_are_copied_as_before(update: str) -> None:
    """Accumulated and held, with updates between; the bits and strides of eager mode."""
    keys = {} if update == "now" else {"update": update}
    model, eager = prepared(Odd(), **keys), Odd()
    optimizers = [torch.optim.AdamW(of.parameters(), lr=1e-2, fused=True) for of in (model, eager)]
    held = []
    for seed in range(4):
        for of, optimizer in zip((model, eager), optimizers, strict=True):
            for part in range(1 + seed % 3):
                of(vector(10 * seed + part)).backward()
            held.append([p.grad for p in of.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, *held[-2:]))
    assert leaving(model) == LEAVING
    for of in (model, eager):
        of(vector(90)).backward()
    assert_same(model, eager)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    assert all(torch.equal(mine, theirs) for i in range(0, 8, 2) for mine, theirs in zip(*held[i : i + 2], strict=True))


def test_kernels_that_make_several_gradients() -> None:
    """GPT-2's norms: weight and bias from one kernel, each with a transfer of its own."""
    model: Any = family_full("gpt2")
    eager = copy.deepcopy(model)
    prepared(model)
    for seed in range(3):
        for of in (model, eager):
            of.zero_grad()
            for part in range(1 + seed % 2):
                of(**random_batch(seed=10 * seed + part)).loss.backward()
        assert_same(model, eager)
    several = Counter(producer for producer, _ in leaving_by(compiled(model).graph))
    assert max(several.values()) > 1


def test_a_held_gradient_gets_company_in_a_second_range() -> None:
    """What is added to it lies there; afterwards both are used again."""
    model, eager = prepared(Layers()), Layers()
    for of in (model, eager):
        of(ids(0)).backward()
    first = [p.grad for p in model.parameters() if p.grad is not None]
    places = {gradient.data_ptr() for gradient in first}
    seen: dict[str, int] = {}
    hooks = [
        p.register_hook(lambda g, name=name: seen.update({name: g.data_ptr()})) for name, p in model.named_parameters()
    ]
    for of in (model, eager):
        of(ids(1)).backward()
    assert_same(model, eager)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), first, strict=True))
    assert len(seen) == len(first) == len({*seen.values(), *places}) // 2
    places |= {*seen.values()}
    del first
    for hook in hooks:
        hook.remove()
    for of in (model, eager):
        of.zero_grad()
        of(ids(2)).backward()
    assert_same(model, eager)
    assert {p.grad.data_ptr() for p in model.parameters() if p.grad is not None} <= places


def _retained(model: torch.nn.Module) -> None:
    loss = model(ids(0))
    loss.backward(retain_graph=True)
    held = [p.grad for p in model.parameters()]
    model.zero_grad()
    (2 * loss).backward(retain_graph=True)
    loss.backward()
    for parameter, before in zip(model.parameters(), held, strict=True):
        assert parameter.grad is not None and before is not None
        parameter.grad.mul_(before)


def _earlier_last(model: torch.nn.Module) -> None:
    """The first forward is put aside by the second, and run again for its backward."""
    first = model(ids(0))
    second = model(ids(1))
    second.backward()
    first.backward()


def _earlier_first(model: torch.nn.Module) -> None:
    first, second = model(ids(0)), model(ids(1))
    first.backward()
    model(ids(2)).backward()
    second.backward()


def _both_at_once(model: torch.nn.Module) -> None:
    (model(ids(0)) + 3 * model(ids(1))).backward()


def _dropped(model: torch.nn.Module) -> None:
    """A forward that is not followed by its backward."""
    model(ids(0))
    model(ids(1)).backward()


@pytest.mark.parametrize("way", [_retained, _earlier_last, _earlier_first, _both_at_once, _dropped])
def test_orders_of_forwards_and_backwards(way: Callable[[torch.nn.Module], None]) -> None:
    # Autograd adds the parts of a tied weight's gradient in another order where both steps have one backward.
    tied = way is not _both_at_once
    model, eager = prepared(Layers(tied=tied)), Layers(tied=tied)
    for _ in range(2):
        for of in (model, eager):
            of.zero_grad()
            way(of)
        assert_same(model, eager)


class Refused(Exception):
    """A user's own."""


@pytest.mark.parametrize("where", ["before the step's backward", "behind it"])
def test_an_exception_in_a_hook_leaves_the_next_backward_right(where: str) -> None:
    """On the loss, so that nothing was delivered, or on a gradient, when all have left."""
    model, eager = prepared(Layers()), Layers()
    for seed in range(3):
        for of in (model, eager):
            of.zero_grad()
            loss = of(ids(seed))

            def refuse(gradient: torch.Tensor) -> None:
                raise Refused

            scaled = loss * 2
            hook = (scaled if where.startswith("before") else of.get_parameter("embed.weight")).register_hook(refuse)
            with pytest.raises(Refused):
                scaled.backward(retain_graph=True)
            hook.remove()
            of.zero_grad()
            scaled.backward()
        assert_same(model, eager)
    assert session_of(model).gradients.memory.nbytes <= 2 * sum(p.nbytes for p in model.parameters()) + 4096


def test_a_backward_that_fails_gives_its_places_back() -> None:
    """Half-way, with some gradients in their places: the next backward has the same memory, and right bits."""
    model, eager = prepared(Layers()), Layers()
    for of in (model, eager):
        of(ids(0)).backward()
    before = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
    model.zero_grad()
    step = compiled(model)
    behind = max(gradient.ref[0] for gradient in step.captured.gradients)
    loss = model(ids(1))
    step.executor.abandon()
    with failing(step.executor, kernels(step.plan).index(behind)), pytest.raises(ExecutionError):
        model(ids(1)).backward()
    del loss
    assert all(p.grad is None for p in model.parameters())
    eager.zero_grad()
    for of in (model, eager):
        of(ids(2)).backward()
    assert_same(model, eager)
    assert {p.grad.data_ptr() for p in model.parameters() if p.grad is not None} == before


def test_an_update_at_the_head_of_a_step_gives_its_gradients_memory_to_the_next_ones() -> None:
    """They are let go when the forward has ended, so that one range for each weight is enough."""
    model, eager = prepared(Layers(), update="deferred"), Layers()
    optimizers = [torch.optim.AdamW(of.parameters(), lr=1e-2, fused=True) for of in (model, eager)]
    seen = []
    for seed in range(6):
        for of, optimizer in zip((model, eager), optimizers, strict=True):
            of(ids(seed)).backward()
            if of is model:
                seen.append({name: p.grad.data_ptr() for name, p in of.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    assert stats(model)["updates_planned"] >= 3 and seen[3] == seen[4] == seen[5]
    for of in (model, eager):
        of(ids(9)).backward()
    assert_same(model, eager)
    count = len(list(model.parameters()))
    assert session_of(model).gradients.memory.nbytes <= sum(p.nbytes for p in model.parameters()) + 64 * count


def _least(graph: TaskGraph) -> MemGraph:
    """The plan in the least memory, the same on any machine at any time."""
    timeless = replace(graph, vertices=tuple(replace(v, duration=v.duration and 1e-5) for v in graph.vertices))
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(timeless, memory=256, planner="timed", cyclic=True)
    return make_plan(timeless, memory=caught.value.needed, planner="timed", cyclic=True)


def test_a_step_needs_no_more_memory_than_one_that_keeps_its_gradients() -> None:
    """On the device; and less on the host, where kept ones have a place beside that in which they end."""
    model = prepared(Layers())
    model(ids(0)).backward()
    graph = compiled(model).graph
    producers = {ref[0] for ref in leaving_by(graph)}
    kept = replace(
        graph,
        spaces=tuple(device for device in graph.devices if not device.is_host_device),
        vertices=tuple(replace(v, keep=v.keep or v.id in producers) for v in graph.vertices if not is_transfer(v)),
    )
    ours, others = _least(graph), _least(kept)
    assert ours.devices[0].memory <= others.devices[0].memory
    assert ours.host.memory < others.host.memory
