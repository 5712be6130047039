"""Does a step wait for what its caller's stream still has to do, and the caller's stream for the step?

Each case puts long work (``Backend.delay``) where a missing wait would let a step read a value too early, or write
over one that has not left yet. On the CPU the same calls are made without streams and without delays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from disco_accel.native.backend import backend_of
from disco_accel.selfcheck.outcome import Difference, compare
from disco_accel.selfcheck.subject import batch_of, by_name
from disco_accel.selfcheck.trial import Trial, eager_runs, one, values_of

LEAST_DELAY, MOST_DELAY = 0.03, 0.3
"""Seconds. A delay is as long as a step of the subject takes, within these."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Caller:
    """Two streams of the caller's and a delay for the current one; on the CPU all of them do nothing."""

    device: torch.device
    streams: tuple[Any, ...]
    delay: Callable[[], object]

    def stream(self, index: int = 0) -> AbstractContextManager[object]:
        """Inside, the stream of this index is the current one."""
        return backend_of(self.device).on_stream(self.streams[index])

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        backend_of(self.device).synchronize()


def orders(trial: Trial, step_seconds: float = 0.0) -> list[Difference]:
    """The differences of all cases of ``CASES``. ``step_seconds``: of a step of the subject."""
    subject = trial.subject
    device, backend = subject.device, backend_of(subject.device)
    streams = backend.streams(2)
    caller = _Caller(device, streams, backend.delay(streams[0], min(max(step_seconds, LEAST_DELAY), MOST_DELAY)))
    batches: list[Tensors] = [batch_of(seed, device) for seed in (1, 2)]
    eager = [eager_runs(subject, batch, seed) for seed, batch in enumerate(batches)]
    differences: list[Difference] = []
    for name, case in CASES.items():
        caller.synchronize()
        results = case(trial, caller, batches, values_of(subject))
        caller.synchronize()
        for runs, got in zip(eager, results, strict=False):
            differences += compare(name, runs, got)
    return differences


def _late_inputs(trial: Trial, caller: _Caller, batches: list[Tensors], trained: Tensors) -> list[Tensors]:
    """Batch and parameters get their values right before the step, behind a delay."""
    inputs = [{name: torch.full_like(tensor, torch.nan) for name, tensor in t.items()} for t in (batches[0], trained)]
    caller.synchronize()
    with caller.stream():
        caller.delay()
        for target, source in zip(inputs, (batches[0], trained), strict=True):
            for name, tensor in target.items():
                tensor.copy_(source[name])
        return [trial.step(inputs[0], inputs[1], 0)]


def _late_tangent(trial: Trial, caller: _Caller, batches: list[Tensors], trained: Tensors) -> list[Tensors]:
    """The gradient of the loss gets its value right before the backward, behind a delay."""
    tangent = one(caller.device).fill_(torch.nan)
    caller.synchronize()
    with caller.stream():
        trial.begin(batches[0], trained, 0)
        loss = trial.loss()
        caller.delay()
        tangent.fill_(1)
        trial.end(tangent)
        return [by_name(loss, trial.gradients())]


def _late_copies(trial: Trial, caller: _Caller, batches: list[Tensors], trained: Tensors) -> list[Tensors]:
    """Results leave behind a delay, and the next step begins at once."""
    return [_slow_reader(trial, caller, batch, trained, seed, 0) for seed, batch in enumerate(batches)]


def _two_streams(trial: Trial, caller: _Caller, batches: list[Tensors], trained: Tensors) -> list[Tensors]:
    """The same, and the next step is called from another stream."""
    return [_slow_reader(trial, caller, batch, trained, seed, seed) for seed, batch in enumerate(batches)]


def _slow_reader(
    trial: Trial, caller: _Caller, batch: Tensors, trained: Tensors, seed: int, stream: int
) -> dict[str, torch.Tensor]:
    with caller.stream(stream):
        trial.begin(batch, trained, seed)
        caller.delay()
        loss = trial.loss()
        trial.end(one(caller.device))
        caller.delay()
        return by_name(loss, trial.gradients())


CASES: dict[str, Callable[[Trial, _Caller, list[Tensors], Tensors], list[Tensors]]] = {
    "inputs that arrive late": _late_inputs,
    "a loss gradient that arrives late": _late_tangent,
    "results that leave late": _late_copies,
    "results that leave late, then a step of another stream": _two_streams,
}
