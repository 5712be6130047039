"""The time that plans take to make, kept out of transformers' Trainer's speed and logged beside it."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from disco_accel.step.run.session import Session

KEY = "disco_planning_seconds"
_RUNTIME = "train_runtime"
_SPEEDS = ("train_samples_per_second", "train_steps_per_second", "train_tokens_per_second")


def keep_planning_apart(find_state: Callable[[torch.nn.Module], Session | None]) -> None:
    """From now on ``Trainer.log`` counts ``train_runtime`` and the speeds of a prepared model without the seconds in
    which plans were made, which it logs as ``disco_planning_seconds``; their sum is the time on the clock.

    For a Trainer that is imported already: called when a plan is made, by a training that runs. Trainer treats the time
    that it takes to prepare a model for evaluation in the same way.
    """
    module = sys.modules.get("transformers.trainer")
    if module is None or hasattr(module.Trainer.log, "_disco"):
        return
    log = module.Trainer.log

    @functools.wraps(log)
    def log_apart(self: Any, logs: dict[str, Any], start_time: float | None = None) -> None:
        state = find_state(self.model)
        if state is not None and start_time is not None:
            planning = state.reports.messages.seconds_since(start_time)
            if round(planning, 4) != getattr(self, "_disco_logged", 0.0):
                self._disco_logged = logs[KEY] = round(planning, 4)
            start_time += planning
        elif state is not None and _RUNTIME in logs:
            _without(logs, state.reports.messages.seconds_since(time.time() - logs[_RUNTIME]))
        log(self, logs, start_time)

    log_apart._disco = True  # type: ignore[attr-defined]
    module.Trainer.log = log_apart


def _without(metrics: dict[str, Any], planning: float) -> None:
    """``metrics`` of a whole training, as if it had taken so many seconds less. In place: they are its result too."""
    runtime = metrics[_RUNTIME]
    if not 0 < planning < runtime:
        return
    metrics[_RUNTIME] = round(runtime - planning, 4)
    metrics |= {name: round(metrics[name] * runtime / (runtime - planning), 3) for name in _SPEEDS if name in metrics}
    metrics[KEY] = round(planning, 4)
