"""Are two training runs the same, bit for bit?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from disco_accel.recipes.metrics import METRICS_NAME


@dataclass(frozen=True, slots=True)
class Sameness:
    """``losses_equal`` of ``losses`` steps and ``tensors_equal`` of ``tensors`` adapter tensors have the same bits."""

    losses_equal: int
    losses: int
    tensors_equal: int
    tensors: int

    @property
    def same_losses(self) -> bool:
        return 0 < self.losses_equal == self.losses

    @property
    def same_adapters(self) -> bool:
        return 0 < self.tensors_equal == self.tensors


def read_metrics(output: Path) -> dict[str, Any]:
    """What a run of the recipe wrote about itself."""
    metrics: dict[str, Any] = json.loads((output / METRICS_NAME).read_text())
    return metrics


def compare_runs(a: Path, b: Path) -> Sameness:
    """Compare the output folders of two runs: losses step by step, final adapters tensor by tensor."""
    left, right = ([(s["step"], s["loss_hex"]) for s in read_metrics(run)["steps"]] for run in (a, b))
    x, y = (load_file(run / "adapter_model.safetensors") for run in (a, b))
    return Sameness(
        losses_equal=sum(p == q for p, q in zip(left, right, strict=False)),
        losses=max(len(left), len(right)),
        tensors_equal=sum(name in y and same_bits(x[name], y[name]) for name in x),
        tensors=len(x.keys() | y.keys()),
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bits; a NaN equals itself, and 0.0 is not -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
