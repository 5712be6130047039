"""Trainer callbacks: a progress bar with loss, time and memory, and a stop that leaves a resumable checkpoint."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from disco_accel.observe.report import first_step_text
from disco_accel.recipes.metrics import Ledger, plan_stats, resident_set_bytes
from disco_accel.sizes import format_size

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def memory_text(model: torch.nn.Module) -> str:
    """Memory in a few characters: peak of the plan over its budget, of the CUDA device, or of the process."""
    planned = plan_stats(model)
    if "peak_bytes" in planned:
        return f"{format_size(planned['peak_bytes'])} of {format_size(planned['budget_bytes'])}"
    if torch.cuda.is_available():
        return format_size(torch.cuda.max_memory_allocated())
    return f"rss {format_size(resident_set_bytes())}"


class Progress(TrainerCallback):
    """A bar on stderr of the main process; closes each step's entry in the ledger everywhere."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._bar: tqdm[Any] | None = None
        self._started = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit="step", file=sys.stderr, dynamic_ncols=True
            )

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        record = self.ledger.end_step(state.global_step, time.perf_counter() - self._started)
        if self._bar is not None:
            if len(self.ledger.steps) == 1:
                self._describe(plan_stats(kwargs["model"]))
            postfix = {
                "loss": f"{record.loss:.4f}",
                "s/step": f"{record.seconds:.2f}",
                "mem": memory_text(kwargs["model"]),
            }
            self._bar.set_postfix(postfix, refresh=False)
            self._bar.update(1)

    def _describe(self, planned: dict[str, Any]) -> None:
        if "budget" in planned:
            tqdm.write(first_step_text(planned), file=sys.stderr)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bar as it is and give the line back."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class StopAtStepEnd(TrainerCallback):
    """Turns the first Ctrl-C (or SIGTERM) into: finish this step, save a checkpoint, stop. The second one kills.

    A step is never cut in two: optimizer, scheduler and random state in the checkpoint belong to one step.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopAtStepEnd:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        tqdm.write("stopping after this step, with a checkpoint; once more stops at once", file=sys.stderr)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        if self.signal is not None:
            control.should_save = True
            control.should_training_stop = True
        return control
