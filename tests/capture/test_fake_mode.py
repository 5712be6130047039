"""A forward that copies its input is captured with the copy, and the memory of others is left alone."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.capture.steps import assert_same_bits, capture, run_captured, run_eager


class Copying(torch.nn.Module):
    """Copies its input, beside a tensor of its own, which torch keeps in a table of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.modes: list[tuple[Any, Any]] = []

    def forward(self, x: torch.Tensor) -> Any:
        three, copied = torch.tensor(3.0), copy.deepcopy(x)
        if isinstance(copied, FakeTensor):
            self.modes += [(copied.fake_mode, x.fake_mode)]  # type: ignore[attr-defined]
        return SimpleNamespace(loss=((self.layer(copied.add_(1)) + x) * three).square().mean())


def test_copies_of_tensors_are_of_the_same_mode_and_have_eagers_bits() -> None:
    """A copied mode would release what it shares with the first one a second time: in memory of somebody else."""
    torch.manual_seed(0)
    model = Copying()
    step = capture(model, {"x": torch.randn(4, 8)})
    assert model.modes and all(one is other for one, other in model.modes)
    batch = {"x": torch.randn(4, 8)}
    assert_same_bits(run_captured(step, model, batch), run_eager(model, batch, nullcontext()))
