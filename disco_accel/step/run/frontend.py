"""The interface of a model's library: the questions that steps ask it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.run.observer import Observer
from disco_accel.step.run.output_usage import Outputs
from disco_accel.step.run.reports import RunCounts

ContextFactory = Callable[[], AbstractContextManager[Any]]
"""Makes a context that a trace runs in."""


class Frontend(Protocol):
    """The side of a session that knows the model's library."""

    def contexts(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Sequence[ContextFactory]:
        """Contexts around the trace of a training step. Raises CaptureError for a step that cannot be planned."""

    def fit(self, model: torch.nn.Module, batch: Mapping[str, Any], used: Collection[str]) -> FittedBatch:
        """``batch``, padded where that saves plans and changes nothing in the fields that are ``used``."""

    def give_up(self, fitted: FittedBatch, batch: Mapping[str, Any]) -> FittedBatch:
        """``batch`` as it is: ``fitted`` does not fit the budget."""

    def fit_forward(self, model: torch.nn.Module, batch: Mapping[str, Any], fields: Collection[str]) -> FittedBatch:
        """As ``fit``, for a forward without gradients. ``fields``: those of results of such forwards that could not be
        cut; others are cut."""

    def keep_length(self, fitted: FittedBatch, batch: Mapping[str, Any], reason: str | None) -> FittedBatch:
        """``batch`` as it is: a forward on ``fitted`` cannot be planned, for ``reason``, or exceeds the budget."""

    def in_parts(self, model: torch.nn.Module, fitted: FittedBatch, count: int) -> FittedBatch | str:
        """``fitted`` in ``count`` parts, with all that makes its loss the sum of theirs; or why not, in words."""

    def usual_outputs(self, batch: Mapping[str, Any]) -> Outputs:
        """The likely uses of the outputs of such a step; () if nothing is known."""

    def tensor_plan(self, model: torch.nn.Module, count: int) -> Mapping[str, int]:
        """Which weights ``count`` devices share: name → the dimension that is cut. Raises CaptureError."""

    def observer(self, counts: RunCounts) -> Observer:
        """The listener of this side, which is told after ``counts``."""

    def stats(self) -> dict[str, Any]:
        """The part of ``stats(model)`` about this side."""
