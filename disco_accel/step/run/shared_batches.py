"""What each of several devices gets of a batch, and parts that a batch runs in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from disco_accel.config.settings import DiscoConfig
from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError
from disco_accel.graph.memgraph import MemGraph
from disco_accel.plan import Machine
from disco_accel.simulate.simulator import simulate
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.compile.conductor import PlanCheck
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.run.frontend import Frontend
from disco_accel.step.state.step_key import StepKey, step_key

logger = logging.getLogger("disco_accel")

Compiled = Callable[[torch.nn.Module, FittedBatch, PlanCheck], CompiledStep]
"""The plan of a step that returns its loss."""

_ROUNDING = {
    "layers": "",
    "batch": "; rounds as accumulation over the parts does",
    "tensor": "; sums over devices round otherwise than on one",
}


class _NotFaster(Exception):
    """A plan takes ``seconds`` in simulated time, no less than another."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class SharedBatches:
    """``parallel`` and ``micro_batches`` of one session. ``auto`` plans each step in all ways, and takes the one that
    is fastest in simulated time."""

    def __init__(
        self,
        config: DiscoConfig,
        devices: int,
        frontend: Frontend,
        compiled: Compiled,
        say_once: Callable[[str], None],
    ) -> None:
        """``devices`` share a step."""
        self._config, self._devices, self._frontend = config, devices, frontend
        self._compiled, self._say_once = compiled, say_once
        self._chosen: dict[StepKey, str] = {}

    def fit(self, model: torch.nn.Module, fitted: FittedBatch) -> FittedBatch:
        """``fitted`` in micro-batches, or with a part of it for each device. Where that cannot be, it stays whole,
        which is told once."""
        parallel = self._config.parallel
        if self._devices == 1:
            return self._layers(model, fitted)
        if parallel == "auto":
            parallel = self._fastest(model, fitted)
        if parallel == "tensor":
            return self._by_weights(model, fitted)
        return self._by_rows(model, fitted, told=True) if parallel == "batch" else self._layers(model, fitted)

    def _by_weights(self, model: torch.nn.Module, fitted: FittedBatch) -> FittedBatch:
        return replace(self._layers(model, fitted), parallel="tensor")

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

    def _fastest(self, model: torch.nn.Module, fitted: FittedBatch) -> str:
        """``layers``, ``batch`` or ``tensor``, for the step on ``fitted`` in the state that ``model`` is in."""
        key = step_key(model, fitted.batch)
        known = self._chosen.get(key)
        if known is not None:
            return known
        seconds: dict[str, float] = {}
        refusal: Exception | None = None
        ways = [self._layers(model, fitted), self._by_rows(model, fitted, told=False)]
        with suppress(CaptureError):
            self._frontend.tensor_plan(model, self._devices)
            # Last, because with its plan come copies of parts of weights, which are made only if it is the fastest.
            ways.append(self._by_weights(model, fitted))
        for way in ways:
            if way.parallel in seconds:
                continue
            below = min(seconds.values(), default=float("inf")) if way.parallel == "tensor" else float("inf")
            try:
                step = self._compiled(model, way, _faster_than(below))
            except _NotFaster as slower:
                seconds[way.parallel] = slower.seconds
            except (BudgetTooSmall, CaptureError) as error:
                refusal = refusal or error
            except ConfigError as error:
                if way.parallel != "tensor":
                    raise
                refusal = refusal or error
            else:
                seconds[way.parallel] = simulate(step.plan, step.settings.machine or Machine()).makespan
        if not seconds:
            assert refusal is not None, "there is a way more than there are plans"
            raise refusal
        chosen = self._chosen[key] = min(seconds, key=seconds.__getitem__)
        took = ", ".join(f"{way} {each:.3g} s a step" for way, each in seconds.items())
        logger.info("parallel: auto: %s (in simulated time: %s)%s", chosen, took, _ROUNDING[chosen])
        return chosen


def _faster_than(below: float) -> PlanCheck:
    def check(plan: MemGraph, machine: Machine) -> None:
        if below < float("inf") and (seconds := simulate(plan, machine).makespan) >= below:
            raise _NotFaster(seconds)

    return check
