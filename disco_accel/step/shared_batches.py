"""What each of several devices gets of a batch, and parts that a batch runs in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import BudgetTooSmall, CaptureError
from disco_accel.plan import Machine
from disco_accel.simulate.simulator import simulate
from disco_accel.step.compile import machine_of
from disco_accel.step.compiled_step import CompiledStep
from disco_accel.step.fitted_batch import FittedBatch
from disco_accel.step.frontend import Frontend

logger = logging.getLogger("disco_accel")


class SharedBatches:
    """``parallel`` and ``micro_batches`` of one session. ``auto`` plans a step of each shape in both ways, and takes
    the faster in simulated time."""

    def __init__(
        self,
        config: DiscoConfig,
        devices: int,
        frontend: Frontend,
        compiled: Callable[[torch.nn.Module, FittedBatch], CompiledStep],
        say_once: Callable[[str], None],
    ) -> None:
        """``devices`` share a step. ``compiled``: the plan of a step that returns its loss."""
        self._config, self._devices, self._frontend = config, devices, frontend
        self._compiled, self._say_once = compiled, say_once
        self._chosen: dict[Any, str] = {}

    def fit(self, model: torch.nn.Module, fitted: FittedBatch) -> FittedBatch:
        """``fitted`` in micro-batches, or with a part of it for each device. Where that cannot be, it stays whole,
        which is told once."""
        parallel = self._config.parallel
        if self._devices == 1:
            return self._layers(model, fitted)
        if parallel == "auto":
            parallel = self._faster(model, fitted)
        return self._by_rows(model, fitted, told=True) if parallel == "batch" else self._layers(model, fitted)

    def _layers(self, model: torch.nn.Module, fitted: FittedBatch) -> FittedBatch:
        count = self._config.micro_batches
        parts = self._frontend.in_parts(model, fitted, count) if count > 1 else fitted
        if isinstance(parts, str):
            self._say_once(f"micro_batches: {count}: this batch stays whole, as {parts}")
            return fitted
        return parts

    def _by_rows(self, model: torch.nn.Module, fitted: FittedBatch, *, told: bool) -> FittedBatch:
        parts = self._frontend.in_parts(model, fitted, self._devices)
        if isinstance(parts, FittedBatch):
            return replace(parts, parallel="batch")
        if told:
            self._say_once(f"parallel: batch: this batch is not shared out, its layers are, as {parts}")
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
                step = self._compiled(model, way)
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
