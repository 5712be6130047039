"""The tensors in the output of a model's forward: its loss, and fields under dotted paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from disco_accel.errors import CaptureError

REAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Those that have gradients."""


class NoSuchOutput(CaptureError):
    """The model's output has no tensor of that name, or none that reaches a trainable parameter. ``fields``: its real
    tensors, in its order."""

    def __init__(self, message: str, output: Any) -> None:
        super().__init__(message)
        self.fields = tuple(
            name
            for name, value in (output.items() if isinstance(output, Mapping) else ())
            if isinstance(value, torch.Tensor) and value.dtype in REAL_DTYPES
        )


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output. Raises CaptureError where there is none that can be differentiated."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if isinstance(output, torch.Tensor):
        loss = output
    if not isinstance(loss, torch.Tensor):
        raise NoSuchOutput("labels: the model returned no loss; pass labels so that it computes one", output)
    if loss.dim() != 0 or loss.dtype not in REAL_DTYPES:
        raise CaptureError(f"loss: must be a real scalar, the model returned {tuple(loss.shape)} of {loss.dtype}")
    return loss


def field_at(output: Any, path: str) -> Any:
    """The value in ``output`` under a dotted path of keys, positions and attributes; None if it has nothing there."""
    for name in path.split("."):
        if isinstance(output, Mapping):
            output = next((v for k, v in output.items() if str(k) == name), getattr(output, name, None))
        elif isinstance(output, (tuple, list)) and name.isdigit():
            output = output[int(name)] if int(name) < len(output) else None
        else:
            output = getattr(output, name, None)
    return output


def tensor_of(output: Any, name: str) -> torch.Tensor:
    """Field ``name`` of a model's output, which may be that tensor alone. Raises NoSuchOutput."""
    if isinstance(output, torch.Tensor):
        return output
    value = field_at(output, name)
    if not isinstance(value, torch.Tensor):
        raise NoSuchOutput(f"{name}: the model returned none; a step needs labels and a loss, or {name}", output)
    return value
