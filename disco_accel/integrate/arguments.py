"""The arguments of a call as the model's own forward would name them."""

from __future__ import annotations

import inspect
from typing import Any

from disco_accel.errors import CaptureError


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
