"""Fake twins of a model's parameters, buffers and batch: same layout on the run's device, no memory behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from disco_accel.capture.parts import PlainTensor, has_rule, is_plain, named_parts
from disco_accel.errors import CaptureError


def twin(tensor: torch.Tensor, device: torch.device, *, requires_grad: bool = False) -> torch.Tensor:
    """A fake tensor on ``device`` laid out as ``tensor``; call it under a ``FakeTensorMode``."""
    fake = torch.empty_strided(tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=device)
    return fake.requires_grad_(requires_grad)


def model_twins(mode: FakeTensorMode, model: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Name → twin on ``device`` of every part of a parameter or buffer, each shared one once, parameters first.

    Raises:
        CaptureError: a tensor lives on another accelerator or is of a class that has no plain twin.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_plain(parameter):
            raise CaptureError(
                f"{name}: a {type(parameter).__name__} cannot be trained under a plan; freeze it "
                "(requires_grad_(False)), and train adapters"
            )
    twins: dict[str, torch.Tensor] = {}
    parts = list(named_parts(model))
    with mode:
        for part in parts:
            _check(part, device)
            twins[part.name] = twin(part.tensor, device, requires_grad=part.requires_grad)
    return twins


def _check(part: PlainTensor, device: torch.device) -> None:
    name, tensor = part.name, part.tensor
    if not (tensor.is_cpu or tensor.is_meta) and tensor.device != device:
        raise CaptureError(f"{name}: is on {tensor.device}; move it to the CPU or to {device}, where the step will run")
    if not has_rule(tensor):
        raise CaptureError(
            f"{name}: a {type(tensor).__name__} ({tensor.layout}) cannot be captured; load plain weights"
        )


# Python numbers that change from step to step: as constants they would mean a new graph each time.
PER_STEP_NUMBERS = ("num_items_in_batch",)


def batch_tensors(kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Dotted name → tensor for every tensor of a batch, also those inside tuples, lists and dicts.

    Numbers named in ``PER_STEP_NUMBERS`` become 0-d tensors, of a dtype that gives the bits the number would.
    """
    found = dict(_walk(kwargs, ""))
    for name in PER_STEP_NUMBERS:
        value = kwargs.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            dtype = torch.int64 if isinstance(value, int) else torch.float32
            found[name] = torch.tensor(value, dtype=dtype)
    return found


def _walk(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _walk(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}.{index}")


def replace_tensors(value: Any, tensors: Mapping[str, torch.Tensor], path: str = "") -> Any:
    """``value`` with everything that ``batch_tensors`` names replaced by the tensor under that name."""
    if path in tensors:
        return tensors[path]
    if isinstance(value, Mapping):
        return {k: replace_tensors(v, tensors, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        items = [replace_tensors(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value
