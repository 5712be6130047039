"""What each of several devices gets of a batch, and parts that a batch runs in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from disco_accel.errors import BudgetTooSmall, CaptureError
from disco_accel.plan import Machine
from disco_accel.simulate.simulator import simulate
from disco_accel.step.compile import machine_of
from disco_accel.step.fitted_batch import FittedBatch

if TYPE_CHECKING:
    from disco_accel.step.session import Session

logger = logging.getLogger("disco_accel")


class SharedBatches:
    """``parallel`` and ``micro_batches`` of one session. ``auto`` plans a step of each shape in both ways, and takes
    the faster in simulated time."""

    def __init__(self, state: Session) -> None:
        self._state = state
        self._chosen: dict[Any, str] = {}

    def fit(self, model: torch.nn.Module, fitted: FittedBatch) -> FittedBatch:
        """``fitted`` in micro-batches, or with a part of it for each device. Where that cannot be, it stays whole,
        which is told once."""
        parallel = self._state.config.parallel
        if self._state.settings.devices == 1:
            return self._layers(model, fitted)
        if parallel == "auto":
            parallel = self._faster(model, fitted)
        return self._by_rows(model, fitted, told=True) if parallel == "batch" else self._layers(model, fitted)

    def _layers(self, model: torch.nn.Module, fitted: FittedBatch) -> FittedBatch:
        count = self._state.config.micro_batches
        parts = self._state.frontend.in_parts(model, fitted, count) if count > 1 else fitted
        if isinstance(parts, str):
            self._state.say_once(f"micro_batches: {count}: this batch stays whole, as {parts}")
            return fitted
        return parts

    def _by_rows(self, model: torch.nn.Module, fitted: FittedBatch, *, told: bool) -> FittedBatch:
        parts = self._state.frontend.in_parts(model, fitted, self._state.settings.devices)
        if isinstance(parts, FittedBatch):
            return replace(parts, parallel="batch")
        if told:
            self._state.say_once(f"parallel: batch: this batch is not shared out, its layers are, as {parts}")
        return self._layers(model, fitted)

    def _faster(self, model: torch.nn.Module, fitted: FittedBatch) -> str:
        """``layers`` or ``batch``, for batches of the shape of ``fitted``."""
        shape = _shape(fitted.batch)
        known = self._chosen.get(shape)
        if known is not None:
            return known
        seconds: dict[str, float] = {}
        refusal: Exception | None = None
        for way in (self._layers(model, fitted), self._by_rows(model, fitted, told=False)):
            if way.parallel in seconds:
                continue
            try:
                step = self._state.compiled(model, way, ("loss",))
            except (BudgetTooSmall, CaptureError) as error:
                refusal = refusal or error
                continue
            seconds[way.parallel] = simulate(step.plan, machine_of(step.engine) or Machine()).makespan
        if not seconds:
            assert refusal is not None, "there is a way more than there are plans"
            raise refusal
        chosen = self._chosen[shape] = min(seconds, key=seconds.__getitem__)
        ways = ", ".join(f"{way} {took:.3g} s a step" for way, took in seconds.items())
        logger.info("parallel: auto: %s (in simulated time: %s)", chosen, ways)
        return chosen


def _shape(batch: Mapping[str, Any]) -> Any:
    tensors = ((name, value) for name, value in batch.items() if isinstance(value, torch.Tensor))
    return tuple((name, tuple(value.shape), value.dtype) for name, value in tensors)
