"""What refusals of training that changes all weights say: device and host memory, part by part, and sizes that work."""

from __future__ import annotations

import re

import pytest
import torch

from disco_accel import DiscoConfig, prepare, restore, stats
from disco_accel.errors import BudgetTooSmall, ConfigError

ROWS, WIDTH = 8, 64
WEIGHTS = 4 * 4 * WIDTH * WIDTH


class Stack(torch.nn.Module):
    """Four products in float32, all trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def train(**keys: object) -> dict[str, object]:
    model = Stack()
    prepare(model, DiscoConfig(device="cpu", plan_cache=None, quiet=True, **keys))  # type: ignore[arg-type]
    try:
        model(torch.ones(ROWS, WIDTH)).backward()
        return stats(model)
    finally:
        restore(model)


def refusal(**keys: object) -> BudgetTooSmall:
    with pytest.raises(BudgetTooSmall) as caught:
        train(**keys)
    return caught.value


def test_an_optimizer_on_the_device_is_counted_and_the_host_named() -> None:
    error = refusal(memory_budget="16KiB", optimizer="device")
    for part in ("64KiB for trained weights", "64KiB for their gradients", "128KiB for two moments", "for the plan"):
        assert part in str(error)
    assert error.parts.endswith("optimizer: host keeps 256KiB of these in host memory")
    assert train(memory_budget=error.needed, optimizer="device")["steps_compiled"] == 1
    assert train(memory_budget=error.needed // 2, optimizer="host")["steps_compiled"] == 1


def test_with_the_optimizer_on_the_host_both_memories_are_named_by_part() -> None:
    error = refusal(memory_budget="16KiB", optimizer="host")
    device, host = str(error).split("; host memory holds ")
    assert re.search(r"KiB for the plan, 2KiB for the batch$", device) and "moments" not in device
    for part in ("64KiB for trained weights", "64KiB for their gradients", "128KiB for two moments"):
        assert part in host
    assert error.needed < WEIGHTS
    assert train(memory_budget=error.needed, optimizer="host")["steps_compiled"] == 1


def test_host_memory_that_offloaded_values_exceed_says_what_would_do() -> None:
    """Weights, gradients and moments fit; what a plan in little memory saves does not."""
    least = refusal(memory_budget="16KiB", optimizer="host").needed
    with pytest.raises(
        ConfigError, match=r"host_memory: .* too small, the step needs .* for offloaded values"
    ) as caught:
        train(memory_budget=least, optimizer="host", host_memory=4 * WEIGHTS)
    for part in ("64KiB for trained weights", "64KiB for their gradients", "128KiB for two moments", "raise it, or "):
        assert part in str(caught.value)
    assert train(memory_budget=least, optimizer="host", host_memory=6 * WEIGHTS)["steps_compiled"] == 1
    assert train(memory_budget="1MiB", optimizer="host", host_memory=4 * WEIGHTS)["steps_compiled"] == 1
