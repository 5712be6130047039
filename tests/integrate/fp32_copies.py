"""A model that trains with ``master_weights: fp32`` beside a twin whose script keeps fp32 copies of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from disco_accel import DiscoConfig, prepare, settle
from tests.support.models import random_batch

Optimizer = torch.optim.Optimizer
UPDATES = ("step", "deferred")


def config(update: str = "step", **keys: Any) -> DiscoConfig:
    ours = {"memory_budget": 1 << 30, "device": "cpu", "plan_cache": None, "optimizer": "host", "update": update}
    return DiscoConfig(**(ours | {"master_weights": "fp32"} | keys))


class Net(torch.nn.Module):
    """Two products in a low precision, a norm in float32 between them."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (torch.nn.Linear(24, 24, dtype=dtype) for _ in range(2))
        self.norm = torch.nn.LayerNorm(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x.to(self.first.weight.dtype)).to(self.norm.weight.dtype))
        return self.last(hidden.to(self.last.weight.dtype)).float().square().mean()


def adamw(parameters: Iterable[Any], **keys: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, **({"lr": 1e-2, "weight_decay": 0.1, "fused": True} | keys))


class Copies:
    """What a script of its own does: fp32 copies that an optimizer updates, with the gradients in fp32."""

    def __init__(self, model: torch.nn.Module, make: Callable[..., Optimizer] = adamw) -> None:
        low = (torch.bfloat16, torch.float16)
        self.model = model
        self.masters = {p: torch.nn.Parameter(p.detach().float()) if p.dtype in low else p for p in model.parameters()}
        self.optimizer = make(self.masters.values())

    def step(self) -> None:
        for parameter, master in self.masters.items():
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)

    def follow(self) -> None:
        """Copies of weights that were written to begin anew."""
        with torch.no_grad():
            for parameter, master in self.masters.items():
                master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))


def batches(model: torch.nn.Module, step: int, parts: int = 2) -> list[dict[str, torch.Tensor]]:
    if not isinstance(model, Net):
        return [random_batch(seed=step * parts + part) for part in range(parts)]
    torch.manual_seed(step)
    return [{"x": torch.randn(8, 24)} for _ in range(parts)]


def train(model: Any, optimizer: Any, steps: Iterable[int]) -> list[torch.Tensor]:
    """Losses; two parts a step, clipped, behind a warm-up."""
    losses = []
    for step in steps:
        for batch in batches(model, step):
            out = model(**batch)
            loss = (out if isinstance(out, torch.Tensor) else out.loss) / 2
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in getattr(optimizer, "optimizer", optimizer).param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 3)
        optimizer.step()
        model.zero_grad()
    return losses


def assert_same(model: torch.nn.Module, optimizer: Optimizer, copies: Copies) -> None:
    """Weights, masters, moments and counts."""
    settle(model)
    for (name, weight), (expected, master) in zip(model.named_parameters(), copies.masters.items(), strict=True):
        assert torch.equal(weight, expected), name
        state, theirs = optimizer.state.get(weight, {}), copies.optimizer.state.get(master, {})
        shown = state | {"master": state["master"]} if "master" in state else state
        wanted = theirs | {"master": master.detach()} if master is not expected and theirs else theirs
        assert shown.keys() == wanted.keys(), name
        for key, value in wanted.items():
            assert shown[key].dtype is torch.float32 and torch.equal(shown[key], value), (name, key)


def pair(update: str = "step", dtype: torch.dtype = torch.bfloat16) -> tuple[Net, Optimizer, Copies]:
    """A prepared model with its optimizer, and its twin's copies; two steps old."""
    model, twin = Net(dtype), Copies(Net(dtype))
    prepare(model, config(update))
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2))
    train(twin.model, twin, range(2))
    return model, optimizer, twin


def go_on(model: Net, optimizer: Optimizer, twin: Copies, steps: Iterable[int] = range(2, 5)) -> None:
    losses, expected = train(model, optimizer, steps), train(twin.model, twin, steps)
    assert all(map(torch.equal, losses, expected))
    assert_same(model, optimizer, twin)
