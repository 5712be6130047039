"""The arguments of a call as the model's own forward would name them."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from disco_accel.errors import CaptureError


def signature_of(model: torch.nn.Module) -> inspect.Signature:
    """Of ``model.forward``; where that passes on whatever it gets, as PEFT's model does, of the model inside it."""
    signature = inspect.signature(model.forward)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD] and hasattr(model, "get_base_model"):
        return signature_of(model.get_base_model())
    return signature


def bind(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name. Raises CaptureError for positional ones beyond the signature."""
    bound = signature.bind(*args, **kwargs).arguments
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            flat.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise CaptureError(f"{name}: positional arguments beyond the signature; pass them by name")
        else:
            flat[name] = value
    return flat
