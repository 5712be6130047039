"""Functions of other libraries that are wrapped in the place where these look them up."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def wrap(
    module: ModuleType,
    name: str,
    parameters: Sequence[str],
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    aliases: Sequence[tuple[ModuleType, str]] = (),
) -> bool:
    """Put ``make(function)`` in the place of the ``function`` that ``module`` calls by ``name``, and into ``aliases``
    that are the same function. Changes nothing and returns False where it is missing, takes other ``parameters``, or
    ``make`` returns it as it is."""
    function = getattr(module, name, None)
    if not callable(function) or tuple(inspect.signature(function).parameters) != tuple(parameters):
        return False
    made = make(function)
    if made is function:
        return False
    functools.update_wrapper(made, function)
    setattr(module, name, made)
    for other, alias in aliases:
        if getattr(other, alias, None) is function:
            setattr(other, alias, made)
    return True
