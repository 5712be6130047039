"""Steps without a plan: whatever a forward reads of its model visits the device, and what it writes goes home."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from disco_accel import DiscoConfig, prepare, restore, stats
from tests.gpu.test_steps import roomy

WIDTH = 8


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.trained = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.trained) + self.steps


class Product(torch.autograd.Function):
    """Saves a weight for its backward, as kernels of quantisation libraries do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Parent(nn.Module):
    """Reads tensors of modules inside as ``how`` says; ``.item()`` keeps it from having a plan."""

    def __init__(self, how: Callable[[Parent, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.child, self.other, self.norm = Child(), Child(), nn.BatchNorm1d(WIDTH)
        self.other.trained = self.child.trained
        self.gates = nn.ParameterList([nn.Parameter(torch.randn(WIDTH))])
        self.kept = [self.child.frozen, {"weight": self.child.trained}]
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.sum().item() != 0
        return self.how(self, self.child(x)).square().mean()


def functional_calls(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    x = functional.linear(x, parent.child.frozen) + parent.child.shift
    return functional.linear(x, parent.other.trained) * parent.gates[0]


def custom_function(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    return Product.apply(Product.apply(x, parent.child.frozen), parent.other.trained)


def all_parameters(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    assert next(parent.child.parameters()).device == x.device
    return x * sum(p.square().sum() for p in parent.parameters())


def recomputed(parent: Parent, x: torch.Tensor, reentrant: bool = False) -> torch.Tensor:
    """The segment is no module: nothing but the segment's function runs again in the backward."""

    def segment(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, parent.child.trained).tanh() * parent.child.shift + parent.other.frozen.sum()

    return checkpoint(segment, x, use_reentrant=reentrant)


def recomputed_reentrant(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    return recomputed(parent, x, reentrant=True)


def without_gradients_first(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = parent.child.trained.abs().max()
    return functional.linear(x, parent.child.trained / scale)


def written_in_place(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    """Counters, statistics, weights that are clamped, an average of weights: with and without a count of versions."""
    parent.child.steps += 1
    parent.other.steps.add_(parent.child.steps)
    with torch.no_grad():
        parent.gates[0].clamp_(-0.5, 0.5)
        for mine, theirs in zip(parent.child.buffers(), parent.other.buffers(), strict=True):
            theirs.data.mul_(2).add_(mine.data)
    parent.other.frozen.data = parent.other.frozen.data * 0.75
    return parent.norm(parent.child(x)) * parent.gates[0] + parent.other.frozen.sum() + parent.other.shift


def replaced(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    """A buffer by another one; a parameter that is taken out and put back, as parametrisation does."""
    parent.child.shift = parent.child.shift * 0.5
    weight = parent.child.frozen
    del parent.child.frozen
    parent.child.frozen = weight * 2
    x = functional.linear(x, parent.child.frozen) + parent.child.shift
    del parent.child.frozen
    parent.child.register_buffer("frozen", weight) if not isinstance(weight, nn.Parameter) else setattr(
        parent.child, "frozen", weight
    )
    return x


def in_a_list(parent: Parent, x: torch.Tensor) -> torch.Tensor:
    """As PyTorch's recurrent layers keep their weights."""
    frozen, others = parent.kept
    return functional.linear(functional.linear(x, frozen), others["weight"])


WAYS = (
    functional_calls,
    custom_function,
    all_parameters,
    recomputed,
    recomputed_reentrant,
    without_gradients_first,
    written_in_place,
    replaced,
    in_a_list,
)


@pytest.mark.parametrize("optimizer", ["device", "host"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_steps_without_a_plan_are_eagers(cuda: torch.device, way: Any, optimizer: str) -> None:
    """Losses, gradients, weights and buffers of two steps and an evaluation, bit for bit; all weights stay home."""
    eager, model = Parent(way).to(cuda), Parent(way)
    names = [name for name, _ in model.named_parameters()]
    keys = {"optimizer": optimizer, "update": "step", "on_unsupported": "eager", "plan_cache": None}
    prepare(model, DiscoConfig(memory_budget=roomy(cuda).memory_budget, device="cuda", **keys))
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(cuda)
        for one in (eager, model):
            one.zero_grad()
        with torch.set_grad_enabled(step < 2):
            losses = [one(x) for one in (eager, model)]
        assert torch.equal(*losses), way.__name__
        if step < 2:
            for loss in losses:
                loss.backward()
        for name, parameter in model.named_parameters():
            theirs = eager.get_parameter(name)
            assert (parameter.grad is None) is (theirs.grad is None), name
            assert parameter.grad is None or torch.equal(parameter.grad.cpu(), theirs.grad.cpu()), name
    assert stats(model)["steps_eager"] == 2
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names)
    # By name: in eager mode a parameter that was taken out and put back is the last of its module.
    ours, theirs = model.state_dict(), eager.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value.cpu(), theirs[name].cpu()), name
    assert all(p.is_cpu for p in model.parameters() if optimizer == "host" or not p.requires_grad)
    copy.deepcopy(model)
    restore(model)
    assert all(type(table) is dict for m in model.modules() for table in (m._parameters, m._buffers))
