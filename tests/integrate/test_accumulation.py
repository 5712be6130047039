"""Gradients of ``optimizer: host`` are added to those in ``.grad`` within the plan; autograd adds what cannot be."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from disco_accel import DiscoConfig, prepare, settle, stats
from disco_accel.errors import ConfigError, ExecutionError
from disco_accel.graph.copies import is_transfer
from disco_accel.step.gradients import accumulating_step
from disco_accel.step.gradients.accumulating_step import AccumulatingStep
from disco_accel.step.run.session import Session, find_state
from disco_accel.verify.static import verify
from tests.support.engine_faults import failing, kernels
from tests.support.models import family_full, random_batch

ROWS, WIDTH = 24, 32


class Layers(torch.nn.Module):
    """Products between an embedding and its transpose, or a head; ``last``, if asked for, gets a gradient that is one
    number, expanded."""

    def __init__(self, *, expanded: bool = True, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(ROWS, WIDTH)
        self.head = self.embed if tied else torch.nn.Linear(WIDTH, ROWS, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = torch.nn.Parameter(torch.randn(5)) if expanded else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss = torch.nn.functional.cross_entropy(x @ self.head.weight.t(), ids.roll(1))
        return loss if self.last is None else loss + 0.1 * self.last.sum()


def ids(seed: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (12,), generator=torch.Generator().manual_seed(seed))


def prepared(model: torch.nn.Module, **keys: Any) -> torch.nn.Module:
    usual = {"memory_budget": 1 << 24, "device": "cpu", "optimizer": "host", "plan_cache": None}
    return prepare(model, DiscoConfig(**(usual | keys)))


def session_of(model: torch.nn.Module) -> Session:
    state = find_state(model)
    assert state is not None
    return state


def sums(model: torch.nn.Module) -> list[AccumulatingStep]:
    return [step for step in session_of(model).memory.plans.values() if isinstance(step, AccumulatingStep)]


def accumulated(model: torch.nn.Module) -> int:
    """Backwards that added in their plans."""
    return int(stats(model)["steps_accumulated"])


def twins(*, tied: bool = True) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A prepared model that has added in a plan, and an eager one."""
    model, eager = prepared(Layers(tied=tied)), Layers(tied=tied)
    for of in (model, eager):
        for seed in range(2):
            of(ids(seed)).backward()
    assert accumulated(model) == 1
    assert_same(model, eager)
    return model, eager


def assert_same(model: torch.nn.Module, eager: torch.nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert torch.equal(ours.grad, theirs.grad) and ours.grad.stride() == theirs.grad.stride(), name
    assert stats(model)["steps_eager"] == 0


@pytest.mark.parametrize("update", ["step", "deferred"])
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)])
def test_weights_and_moments_are_eager_ones(family: str, dtype: torch.dtype, update: str) -> None:
    """Three micro-batches a step, clipped; sums in the plan for two of them, and no second memory for gradients."""
    model = family_full(family, dtype=dtype)
    eager = copy.deepcopy(model)
    prepared(model, memory_budget=1 << 26, update=update)
    optimizers = [torch.optim.AdamW(of.parameters(), lr=1e-3, fused=True) for of in (model, eager)]
    for step in range(4):
        norms = []
        for of, optimizer in zip((model, eager), optimizers, strict=True):
            for part in range(3):
                (of(**random_batch(seed=10 * step + part)).loss / 3).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(of.parameters(), 0.05))
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*norms)
    settle(model)
    assert accumulated(model) == 8
    assert session_of(model).gradients.memory.nbytes <= sum(p.nbytes + 64 for p in model.parameters())
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        mine, other = (optimizer.state[p] for optimizer, p in zip(optimizers, (ours, theirs), strict=True))
        assert torch.equal(mine["exp_avg"], other["exp_avg"]) and torch.equal(mine["exp_avg_sq"], other["exp_avg_sq"])


def test_gradients_come_back_while_others_are_made() -> None:
    """The plan is one that the verifier takes, and every gradient that leaves comes back once."""
    model, _ = twins()
    (step,) = sums(model)
    verify(step.graph, step.plan)
    leaving = sum(p.nbytes for name, p in model.named_parameters() if name != "last")
    assert step.executor.counters()["offload_bytes"] == leaving
    position = {vertex.id: place for place, vertex in enumerate(step.plan.vertices)}
    loads = [v.id for v in step.plan.vertices if is_transfer(v) and v.op == "to_device"]
    adds = [v for v in step.plan.vertices if v.op == "aten::add_" and v.inputs[0][0] in loads]
    assert len(adds) == len(loads) == len(step.summed) == 7
    early = [position[add.id] - position[add.inputs[0][0]] > 2 for add in adds]
    assert sum(early) >= 5, "before the kernels that make the new part"


def test_a_gradient_stays_the_same_tensor_and_counts_its_changes() -> None:
    model, eager = twins()
    for of in (model, eager):
        before = {name: (p.grad, p.grad._version) for name, p in of.named_parameters() if p.grad is not None}
        of(ids(3)).backward()
        for name, p in of.named_parameters():
            gradient, version = before[name]
            assert p.grad is gradient and gradient is not None and gradient._version > version, name
    assert accumulated(model) == 2
    assert_same(model, eager)


def _cleared_between(of: torch.nn.Module) -> None:
    loss = of(ids(3))
    of.zero_grad()
    loss.backward()


def _some_cleared(of: torch.nn.Module) -> None:
    of.get_parameter("embed.weight").grad = None
    of(ids(3)).backward()


def _replaced_between(of: torch.nn.Module) -> None:
    loss = of(ids(3))
    parameter = of.get_parameter("embed.weight")
    parameter.grad = torch.ones_like(parameter)
    loss.backward()


def _written_between(of: torch.nn.Module) -> None:
    loss = of(ids(3))
    for parameter in of.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(3)
    loss.backward()


def _zeroed(of: torch.nn.Module) -> None:
    of.zero_grad(set_to_none=False)
    of(ids(3)).backward()


def _asked_for(of: torch.nn.Module) -> None:
    """Nothing of ``.grad`` changes; what was asked for is put there."""
    found = torch.autograd.grad(of(ids(3)), list(of.parameters()))
    for parameter, gradient in zip(of.parameters(), found, strict=True):
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2 + gradient


def _for_some(of: torch.nn.Module) -> None:
    of(ids(3)).backward(inputs=[of.get_parameter("layers.0.weight")])


def _twice(of: torch.nn.Module) -> None:
    loss = of(ids(3))
    loss.backward(retain_graph=True)
    loss.backward()


def _hooked(of: torch.nn.Module) -> None:
    """The hook sees what is added, not the sum."""
    hook = of.get_parameter("layers.0.weight").register_hook(lambda gradient: gradient * 2)
    of(ids(3)).backward()
    hook.remove()


def _told(of: torch.nn.Module) -> None:
    heard: list[str] = []
    hook = of.get_parameter("layers.0.weight").register_post_accumulate_grad_hook(lambda p: heard.append("sum"))
    of(ids(3)).backward()
    hook.remove()
    assert heard == ["sum"]


def _frozen(of: torch.nn.Module) -> None:
    parameter = of.get_parameter("layers.1.weight").requires_grad_(False)
    of(ids(3)).backward()
    parameter.requires_grad_(True)


def _two_forwards(of: torch.nn.Module) -> None:
    first, second = of(ids(3)), of(ids(4))
    second.backward()
    first.backward()


def _both_at_once(of: torch.nn.Module) -> None:
    """Autograd adds the two before it adds to ``.grad``."""
    (of(ids(3)) + 3 * of(ids(4))).backward()


def _again_with_another(of: torch.nn.Module) -> None:
    """The first waits no more, and is part of a backward again."""
    first = of(ids(3))
    first.backward(retain_graph=True)
    of.zero_grad()
    (first + 3 * of(ids(4))).backward()


def _other_thread(of: torch.nn.Module) -> None:
    loss = of(ids(3))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def _another_dtype(of: torch.nn.Module) -> None:
    parameter = of.get_parameter("layers.0.weight")
    assert parameter.grad is not None
    parameter.grad = parameter.grad.t().contiguous().t()
    of(ids(3)).backward()


WAYS: dict[Callable[[torch.nn.Module], None], int] = {
    _cleared_between: 0,
    _some_cleared: 0,
    _replaced_between: 0,
    _written_between: 1,
    _zeroed: 1,
    _asked_for: 0,
    _for_some: 0,
    _twice: 2,
    _hooked: 0,
    _told: 0,
    _frozen: 0,
    _two_forwards: 1,
    _both_at_once: 0,
    _again_with_another: 1,
    _other_thread: 1,
    _another_dtype: 0,
}
"""With the number of backwards in it that add in their plans."""


@pytest.mark.parametrize("way", WAYS)
def test_what_a_script_may_do_with_gradients(way: Callable[[torch.nn.Module], None]) -> None:
    """Also behind it: accumulation goes on with the bits of eager mode."""
    # Autograd adds the parts of a tied weight's gradient in another order where several steps have one backward.
    model, eager = twins(tied=way not in (_both_at_once, _again_with_another))
    for of in (model, eager):
        way(of)
    assert accumulated(model) == 1 + WAYS[way]
    assert_same(model, eager)
    for of in (model, eager):
        of(ids(8)).backward()
        of.zero_grad()
        for seed in (9, 10):
            of(ids(seed)).backward()
    assert_same(model, eager)


def test_gradients_cleared_between_forward_and_backward_cost_one_step_and_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The order of many scripts: it runs one forward again, and from then on autograd adds."""
    model, eager = twins()
    with caplog.at_level(logging.WARNING, logger="disco_accel"):
        for seed in range(4):
            for of in (model, eager):
                loss = of(ids(seed))
                of.zero_grad()
                loss.backward()
            assert_same(model, eager)
    assert sum("cleared or replaced between a forward and its backward" in r.message for r in caplog.records) == 1
    assert accumulated(model) == 1


@pytest.mark.parametrize("begin", [0, 1])
def test_weights_with_other_gradients_are_left_to_autograd(begin: int, caplog: pytest.LogCaptureFixture) -> None:
    """A penalty on weights is added before ``.grad`` is: bits of eager mode where the first backward shows it. Where a
    later one does, sums of that one may round otherwise, which is told."""
    model, eager = prepared(Layers()), Layers()
    with caplog.at_level(logging.WARNING, logger="disco_accel"):
        for seed in range(4):
            for of in (model, eager):
                loss = of(ids(seed))
                penalty = sum((p.square().sum() for p in of.parameters()), torch.zeros(()))
                (loss + penalty if seed >= 2 * begin else loss).backward()
    told = [r.message for r in caplog.records if "from elsewhere" in r.message]
    assert len(told) == 1 and ("round otherwise" in told[0]) == bool(begin)
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)
        # The tied weight's is a sum of three parts, two of which the plan adds.
        assert begin or name == "embed.weight" or (ours.grad is not None and torch.equal(ours.grad, theirs.grad))
    assert accumulated(model) == 2 * begin


def test_a_step_that_had_its_backward_and_shares_another_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Its plan has not waited, so that the other's had added: the sum of that backward may round otherwise."""
    model, eager = twins()
    for of in (model, eager):
        first = of(ids(3))
        first.backward(retain_graph=True)
        (first + 3 * of(ids(4))).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    with caplog.at_level(logging.WARNING, logger="disco_accel"):
        for seed in (5, 6):
            model(ids(seed)).backward()
    assert sum("round otherwise" in r.message for r in caplog.records) == 1
    assert accumulated(model) == 3


def test_a_backward_that_fails_may_have_added_some() -> None:
    """As in eager mode. Cleared gradients are right again."""
    model, eager = twins()
    (step,) = sums(model)
    behind = max(gradient.ref[0] for gradient in step.captured.gradients if gradient.name != "last")
    with failing(step.executor, kernels(step.plan).index(behind)), pytest.raises(ExecutionError):
        model(ids(3)).backward()
    for of in (model, eager):
        of.zero_grad()
        for seed in (4, 5, 6):
            of(ids(seed)).backward()
    assert_same(model, eager)
    assert accumulated(model) == 3


def test_steps_that_are_compared_with_eager_ones_leave_it_to_autograd() -> None:
    """Their gradients are compared alone."""
    model, eager = prepared(Layers(), verify_steps=4), Layers()
    for of in (model, eager):
        for seed in range(3):
            of(ids(seed)).backward()
    assert accumulated(model) == 0
    assert_same(model, eager)


def test_sums_that_offload_more_than_the_host_has_room_for_are_left_to_autograd(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once; the bits of eager mode."""
    weights = sum(p.nbytes for p in Layers().parameters())
    model, eager = prepared(Layers(), host_memory=6 * weights), Layers()
    made = accumulating_step.plan_if_it_fits

    def offloading(*args: Any) -> Any:
        planned = made(*args)
        if planned is None:
            return None
        plan = planned.plan
        return replace(planned, plan=replace(plan, spaces=(*plan.devices, replace(plan.host, memory=3 * weights))))

    monkeypatch.setattr(accumulating_step, "plan_if_it_fits", offloading)
    for of in (model, eager):
        for seed in range(4):
            of(ids(seed)).backward()
    assert_same(model, eager)
    assert accumulated(model) == 0
    assert sum("has room for sums" in record.message for record in caplog.records) == 1


def test_a_second_memory_is_asked_for_where_autograd_adds() -> None:
    """``host_memory`` for one gradient of each weight is enough for sums in plans; a hook makes autograd add."""
    weights = sum(p.nbytes for p in Layers().parameters())
    model = prepared(Layers(), host_memory=4 * weights + 4096)
    for seed in range(3):
        model(ids(seed)).backward()
    assert accumulated(model) == 2
    model.get_parameter("layers.0.weight").register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError, match="gradients of two backwards at once"):
        model(ids(4)).backward()
