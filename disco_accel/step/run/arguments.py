"""The arguments of a call as the model's own forward would name them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from disco_accel.errors import CaptureError

BindArguments = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]
"""From the arguments of a call to all arguments by name, in the order of the forward's signature. Raises CaptureError
for positional ones beyond the signature."""


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside PEFT's; any other model itself."""
    base: Callable[[], torch.nn.Module] | None = getattr(model, "get_base_model", None)
    return model if base is None else base()


def _signature_of(model: torch.nn.Module) -> inspect.Signature:
    """Of ``model.forward``; where that passes all arguments on, as PEFT's model does, of the model inside it."""
    signature = inspect.signature(model.forward)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD] and hasattr(model, "get_base_model"):
        return _signature_of(base_model(model))
    return signature


def binder_of(model: torch.nn.Module) -> BindArguments:
    """Of calls of ``model``; its signature is read once."""
    signature = _signature_of(model)
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = {name: p.default for name, p in signature.parameters.items() if p.kind in kinds}
    required = {name for name, default in named.items() if default is inspect.Parameter.empty}

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if not args and required <= kwargs.keys() <= named.keys():
            return {name: kwargs[name] for name in named if name in kwargs}
        flat: dict[str, Any] = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                flat.update(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                raise CaptureError(f"{name}: positional arguments beyond the signature; pass them by name")
            else:
                flat[name] = value
        return flat

    return bind
