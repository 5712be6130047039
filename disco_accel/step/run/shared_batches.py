"""``parallel`` and ``micro_batches``: a batch shared out to several devices, or run in parts.

``parallel: auto`` plans each step in all ways, and takes the one that is fastest in simulated time.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

import torch

from disco_accel.errors import BudgetTooSmall, CaptureError, ConfigError
from disco_accel.graph.memgraph import MemGraph
from disco_accel.plan import Machine
from disco_accel.simulate.simulator import simulate
from disco_accel.step.compile.conductor import PlanCheck
from disco_accel.step.compile.fitted_batch import FittedBatch
from disco_accel.step.run.session import Session
from disco_accel.step.run.step_plans import compiled
from disco_accel.step.state.step_key import step_key

logger = logging.getLogger("disco_accel")

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


def shared_out(state: Session, model: torch.nn.Module, fitted: FittedBatch) -> FittedBatch:
    """``fitted`` in micro-batches, or with a part of it for each device. Where that cannot be, it stays whole,
    which is told once."""
    parallel = state.setup.config.parallel
    with state.memory.lock:
        if state.setup.settings.devices == 1:
            return _layers(state, model, fitted)
        if parallel == "auto":
            parallel = _fastest(state, model, fitted)
        if parallel == "tensor":
            return _by_weights(state, model, fitted)
        return _by_rows(state, model, fitted, told=True) if parallel == "batch" else _layers(state, model, fitted)


def _by_weights(state: Session, model: torch.nn.Module, fitted: FittedBatch) -> FittedBatch:
    return replace(_layers(state, model, fitted), parallel="tensor")


def _layers(state: Session, model: torch.nn.Module, fitted: FittedBatch) -> FittedBatch:
    count = state.setup.config.micro_batches
    parts = state.setup.frontend.in_parts(model, fitted, count) if count > 1 else fitted
    if isinstance(parts, str):
        state.reports.say_once(f"micro_batches: {count}: this batch stays whole, as {parts}")
        return fitted
    return parts


def _by_rows(state: Session, model: torch.nn.Module, fitted: FittedBatch, *, told: bool) -> FittedBatch:
    parts = state.setup.frontend.in_parts(model, fitted, state.setup.settings.devices)
    if isinstance(parts, FittedBatch):
        return replace(parts, parallel="batch")
    if told:
        state.reports.say_once(f"parallel: batch: this batch is not shared out, its layers are, as {parts}")
    return _layers(state, model, fitted)


def _fastest(state: Session, model: torch.nn.Module, fitted: FittedBatch) -> str:
    """``layers``, ``batch`` or ``tensor``, for the step on ``fitted`` in the state that ``model`` is in."""
    key = step_key(model, fitted.batch)
    known = state.calls.parallel.get(key)
    if known is not None:
        return known
    seconds: dict[str, float] = {}
    refusal: Exception | None = None
    ways = [_layers(state, model, fitted), _by_rows(state, model, fitted, told=False)]
    with suppress(CaptureError):
        state.setup.frontend.tensor_plan(model, state.setup.settings.devices)
        # Last, because with its plan come copies of parts of weights, which are made only if it is the fastest.
        ways.append(_by_weights(state, model, fitted))
    for way in ways:
        if way.parallel in seconds:
            continue
        below = min(seconds.values(), default=float("inf")) if way.parallel == "tensor" else float("inf")
        try:
            step = compiled(state, model, way, ("loss",), check=_faster_than(below))
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
    chosen = state.calls.parallel[key] = min(seconds, key=seconds.__getitem__)
    took = ", ".join(f"{way} {each:.3g} s a step" for way, each in seconds.items())
    logger.info("parallel: auto: %s (in simulated time: %s)%s", chosen, took, _ROUNDING[chosen])
    return chosen


def _faster_than(below: float) -> PlanCheck:
    def check(plan: MemGraph, machine: Machine) -> None:
        if below < float("inf") and (seconds := simulate(plan, machine).makespan) >= below:
            raise _NotFaster(seconds)

    return check
