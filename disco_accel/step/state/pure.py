"""Functions of which the user says that a forward's result is all that matters of them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

_MARK = "_disco_pure"


def pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Say of a hook, or of another function that a forward calls, that nothing is lost if it does not run each step.

    It then runs when a step is captured, on tensors without values, and what it changes outside the model is not looked
    at. What it does to the values that pass through it becomes part of the plan. Returns ``function``.
    """
    target = getattr(function, "__func__", function)
    setattr(target, _MARK, True)
    _pure_code.update(code for part in (target, type(target).__call__) if (code := getattr(part, "__code__", None)))
    return function


_pure_code: set[types.CodeType] = set()


def is_pure(code: types.CodeType) -> bool:
    """Whether ``code`` is of a function that was marked with ``pure``."""
    return code in _pure_code


def is_marked(function: Any) -> bool:
    """Whether ``function``, of any kind that can be called, was marked with ``pure``."""
    try:
        # Not by way of a __getattr__ of its class, which may do anything.
        return bool(object.__getattribute__(function, _MARK))
    except AttributeError:
        # A method has no attributes of its own.
        return _MARK in vars(function.__func__) if isinstance(function, types.MethodType) else False
