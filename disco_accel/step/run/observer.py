"""Events of prepared models, and the interface of their listeners: counts, messages, a test suite's report."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disco_accel.step.compile.compiled_step import CompiledStep


class Fallback(enum.StrEnum):
    """A kind of run without a plan."""

    STEP = "step"
    """A training step's forward, and with it its backward."""
    GRADIENTS = "gradients"
    """The gradients of an output that no plan could differentiate."""
    INNER_FORWARD = "inner forward"
    """A module inside a prepared model that was called past the model."""
    FORWARD = "forward"
    """A forward without gradients."""


class Observer:
    """Each call does nothing until a subclass says otherwise.

    Calls come in the thread that runs the step, in the middle of it: they must not run the model. Their exceptions
    reach the caller of the step.
    """

    def on_plan(self, step: CompiledStep) -> None:
        """A plan has been made, or read from the cache of plans."""

    def on_plan_hit(self, step: CompiledStep) -> None:
        """A step is about to run that had its plan already."""

    def on_step(self, step: CompiledStep) -> None:
        """The forward of a planned training step has returned its outputs."""

    def on_backward(self, step: CompiledStep) -> None:
        """The backward of a planned step has returned the gradients."""

    def on_forward(self, step: CompiledStep, kind: str) -> None:
        """A planned forward without gradients has returned its outputs. ``kind``: as of ``ForwardRequest``."""

    def on_fallback(self, kind: Fallback, reason: str) -> None:
        """Something is about to run without a plan, in eager mode, for ``reason``."""


of_all_models: list[Observer] = []
"""Observers of every prepared model of this process."""


def observe_all(observer: Observer) -> Callable[[], None]:
    """Tell ``observer`` of every prepared model of this process from now on; a call of the result ends that."""
    of_all_models.append(observer)
    return lambda: of_all_models.remove(observer)
