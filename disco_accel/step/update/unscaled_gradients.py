"""Gradients that clipping has not multiplied yet: their coefficient is noted, and the update of the weights multiplies.

Nobody can tell. While there are such gradients, ``grad`` of ``torch.nn.Parameter`` is a property that multiplies before
it hands one out, all of one model at once: whoever reads one reads the others too as a rule, and updates with some of
each kind would need plans of their own. ``zero_grad`` alone gets them as they lie, to let go of them.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from disco_accel.errors import ExecutionError
from disco_accel.native.host_memory import expect_rewrite

_grad: Any = torch.Tensor.grad
"""PyTorch's own attribute."""

_names = ("grad", "_grad")
"""Of the attribute, and of the other way to it that ``torch.Tensor`` has."""

_clearing = frozenset(inspect.unwrap(f).__code__ for f in (torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad))

_notes: dict[int, Unscaled] = {}
"""By id of the parameter, which the note keeps alive."""

_guard = threading.RLock()
"""Around the property's coming and going."""


@dataclass(frozen=True, slots=True, eq=False)
class Unscaled:
    """The ``gradient`` of ``parameter`` is to be read as its product with ``coefficient``, of no dimension.
    ``version``: what autograd counted of its writes when that was noted."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    coefficient: torch.Tensor
    version: int
    owner: UnscaledGradients

    @property
    def broken(self) -> bool:
        """Whether autograd has added to the gradient as it lies, or to another in its place."""
        current = _grad.__get__(self.parameter)
        # None: it is away while ``optimizer.step()`` runs.
        return self.gradient._version != self.version or (current is not None and current is not self.gradient)

    def require_whole(self) -> None:
        """Raise ExecutionError if it is broken."""
        if self.broken:
            raise ExecutionError(
                f"update: deferred: a gradient of shape {list(self.parameter.shape)} was clipped, and then changed by "
                "a backward() that no plan runs, before the optimizer's step: clear gradients with "
                "zero_grad(set_to_none=True), and clip behind the last backward(), or use update: step"
            )


class UnscaledGradients:
    """Those of one model. Used under the session's lock, which ``lock`` is."""

    def __init__(self, lock: Any, show: Callable[[], Callable[[], object] | None]) -> None:
        """``show`` gives what calls ``multiply`` and looks after the updates that use the gradients; None if these are
        gone."""
        self._lock, self._show = lock, show
        self._multiplying = False

    def notes(self) -> list[Unscaled]:
        """Of this model."""
        return [note for note in list(_notes.values()) if note.owner is self]

    def note(self, parameter: torch.Tensor, gradient: torch.Tensor, coefficient: torch.Tensor) -> None:
        """``parameter.grad``, which is ``gradient``, is to be read as its product with ``coefficient`` from now on."""
        note = Unscaled(parameter, gradient, coefficient, gradient._version, self)
        with _guard:
            _notes[id(parameter)] = note
            _come_or_go()

    def multiply(self) -> set[int]:
        """Multiply all that are not broken, as PyTorch does. Returns their gradients' ids.

        Raises:
            ExecutionError: a call of this is running, which this one has interrupted.
        """
        if self._multiplying:
            raise ExecutionError(
                "update: deferred: clipped gradients are being multiplied, and code that interrupts that, as the "
                "handler of a signal or a dispatch mode does, reads one of them: read it later"
            )
        whole = [note for note in self.notes() if not note.broken]
        if not whole:
            return set()
        expect_rewrite([note.gradient for note in whole])
        self._multiplying = True
        try:
            with torch.no_grad():
                for note in whole:
                    note.gradient.mul_(note.coefficient)
                    forget(note.parameter)
        finally:
            self._multiplying = False
        return {id(note.gradient) for note in whole}

    def multiply_apart(self) -> None:
        """``multiply`` at a moment that Python chooses: it may be in the middle of a trace, whose modes would take the
        products for those of the traced model, and leave the gradients as they are."""
        with _disable_current_modes():
            self.multiply()

    def require_whole(self) -> None:
        """Raise ExecutionError if one is broken."""
        for note in self.notes():
            note.require_whole()

    def show(self) -> None:
        """Multiply, on behalf of somebody who is about to read."""
        with self._lock:
            (self._show() or self.multiply)()


def forget(parameter: torch.Tensor) -> None:
    """The gradient of ``parameter`` is from now on what it holds."""
    with _guard:
        _notes.pop(id(parameter), None)
        _come_or_go()


def as_it_lies(parameter: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradient of ``parameter``, and the coefficient that it is to be multiplied by if it has not been yet.

    Raises:
        ExecutionError: it was changed since it was clipped.
    """
    gradient, note = _grad.__get__(parameter), _notes.get(id(parameter))
    if gradient is None or note is None:
        return gradient, None
    note.require_whole()
    return gradient, note.coefficient


def put(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Take the gradient of ``parameter`` away for a while, or give it back: what is noted of it stays."""
    _grad.__set__(parameter, gradient)


def owner_of(parameter: torch.Tensor) -> UnscaledGradients | None:
    """Whose gradient that of ``parameter`` is, if it has not been multiplied yet."""
    note = _notes.get(id(parameter))
    return None if note is None else note.owner


def _get(parameter: torch.Tensor) -> torch.Tensor | None:
    # In this order: a reader that is interrupted in between holds a reference, which keeps its gradient from being
    # noted.
    gradient: torch.Tensor | None = _grad.__get__(parameter)
    if gradient is not None and id(parameter) in _notes and not _lets_go(sys._getframe(1)):
        owner = owner_of(parameter)
        if owner is not None:
            owner.show()
        note = _notes.get(id(parameter))
        if note is not None:
            note.require_whole()
    return gradient


def _set(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    _grad.__set__(parameter, gradient)
    forget(parameter)


def _delete(parameter: torch.Tensor) -> None:
    _grad.__delete__(parameter)
    forget(parameter)


def _lets_go(frame: FrameType) -> bool:
    """Whether who reads is ``zero_grad``, which compares with None and assigns that."""
    return frame.f_code in _clearing and bool(frame.f_locals.get("set_to_none"))


_property = property(_get, _set, _delete)


def attribute_is_replaced() -> bool:
    """Whether somebody else has put a property of their own there."""
    return any(vars(torch.nn.Parameter).get(name, _property) is not _property for name in _names)


def _come_or_go() -> None:
    for name in _names:
        present = vars(torch.nn.Parameter).get(name) is _property
        if _notes and not present:
            setattr(torch.nn.Parameter, name, _property)
        elif present and not _notes:
            delattr(torch.nn.Parameter, name)


def _before_fork() -> None:
    # The child would multiply on threads that it does not have.
    for owner in {note.owner for note in list(_notes.values())}:
        with _disable_current_modes():
            owner.show()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
