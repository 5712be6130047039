"""A prepared model whose gradients are clipped, beside one in eager mode that is trained alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from disco_accel import DiscoConfig, prepare, settle, stats
from disco_accel.step.run.session import find_state
from disco_accel.step.update.planned_updates import clip_grad_norm
from tests.integrate.fp32_copies import Copies, Net, adamw, batches
from tests.integrate.fp32_copies import assert_same as assert_same_masters

Clip = Callable[[Any], Any]
LOW = 0.05
"""A norm that gradients of ``Net`` exceed."""


def config(**keys: Any) -> DiscoConfig:
    ours = {"memory_budget": 1 << 30, "device": "cpu", "optimizer": "host", "update": "deferred", "plan_cache": None}
    return DiscoConfig(**(ours | keys))


def clip_left(model: Any, parameters: Any, max_norm: float = LOW, norm_type: float = 2.0) -> torch.Tensor:
    """As in a Trainer's run: the product is left to the update of a prepared model."""
    state = find_state(model)
    if state is None:
        return clip_grad_norm_(parameters, max_norm, norm_type)
    return clip_grad_norm(parameters, max_norm, norm_type, state.updates)


def to_low(model: Any) -> torch.Tensor:
    return clip_left(model, model.parameters())


def same(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    """Bit for bit, also where they are no numbers."""
    pairs = list(zip(ours, theirs, strict=True))
    return bool(pairs) and all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in pairs)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def backward(model: Any, step: int, parts: int = 2) -> list[torch.Tensor]:
    losses = []
    for batch in batches(model, step, parts):
        loss = model(**batch) / parts
        loss.backward()
        losses.append(loss.detach())
    return losses


def train(model: Any, optimizer: Any, steps: Iterable[int], clip: Clip = to_low) -> list[torch.Tensor]:
    """Losses and norms."""
    seen = []
    for step in steps:
        seen += backward(model, step)
        norm = clip(model)
        seen += [] if norm is None else [norm]
        optimizer.step()
        model.zero_grad()
    return seen


class Pair:
    """A prepared model and one in eager mode, or with the script's own masters, that are trained alike."""

    def __init__(self, dtype: torch.dtype = torch.float32, steps: int = 3, **keys: Any) -> None:
        self.model, self.eager = Net(dtype), Net(dtype)
        prepare(self.model, config(**keys))
        self.ours = adamw(self.model.parameters())
        masters = keys.get("master_weights") == "fp32"
        self.theirs: Any = Copies(self.eager) if masters else adamw(self.eager.parameters())
        self.steps = 0
        self.go_on(steps)

    def go_on(self, steps: int = 1, clip: Clip = to_low) -> None:
        """Train both."""
        numbers = range(self.steps, self.steps + steps)
        ours, theirs = train(self.model, self.ours, numbers, clip), train(self.eager, self.theirs, numbers, clip)
        assert not steps or same(ours, theirs)
        self.steps += steps

    def assert_same(self) -> None:
        """Weights and moments."""
        if isinstance(self.theirs, Copies):
            assert_same_masters(self.model, self.ours, self.theirs)
            return
        settle(self.model)
        assert same(self.model.parameters(), self.eager.parameters())
        for mine, other in zip(self.model.parameters(), self.eager.parameters(), strict=True):
            assert same(self.ours.state[mine].values(), self.theirs.state[other].values())

    @property
    def both(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        return (self.model, self.ours), (self.eager, self.theirs)

    @property
    def deferred(self) -> int:
        """Clippings."""
        return int(stats(self.model)["clips_deferred"])


def gradients(pair: Pair) -> list[list[torch.Tensor]]:
    return [[p.grad.clone() for p in each.parameters()] for each in (pair.model, pair.eager)]
