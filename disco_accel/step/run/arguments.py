"""The arguments of a call as the model's own forward would name them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from disco_accel.errors import CaptureError


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside PEFT's; any other model itself."""
    base: Callable[[], torch.nn.Module] | None = getattr(model, "get_base_model", None)
    return model if base is None else base()


def signature_of(model: torch.nn.Module) -> inspect.Signature:
    """Of ``model.forward``; where that passes on whatever it gets, as PEFT's model does, of the model inside it."""
    signature = inspect.signature(model.forward)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD] and hasattr(model, "get_base_model"):
        return signature_of(base_model(model))
    return signature


class Arguments:
    """What a forward takes, and how calls give it."""

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature
        kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._named = {name: p.default for name, p in signature.parameters.items() if p.kind in kinds}
        self._required = {name for name, default in self._named.items() if default is inspect.Parameter.empty}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, in the signature's order.

        Raises:
            CaptureError: positional ones beyond the signature.
        """
        if not args and self._required <= kwargs.keys() <= self._named.keys():
            return {name: kwargs[name] for name in self._named if name in kwargs}
        bound = self._signature.bind(*args, **kwargs).arguments
        flat: dict[str, Any] = {}
        for name, value in bound.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                flat.update(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                raise CaptureError(f"{name}: positional arguments beyond the signature; pass them by name")
            else:
                flat[name] = value
        return flat
