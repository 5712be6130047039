"""Messages while plans are made: each stage as it begins, signs of life, one line of result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from disco_accel.capture.fake_inputs import batch_tensors
from disco_accel.execute.launch_graphs import in_words
from disco_accel.observe.log_to_stderr import say
from disco_accel.plan.plan_cache import PlanCacheUse
from disco_accel.sizes import format_size
from disco_accel.step.compile.compiled_step import CompiledStep, describe
from disco_accel.step.optimizer_home import OptimizerHome, TrainedBytes
from disco_accel.step.run.arguments import base_model
from disco_accel.step.run.observer import Observer
from disco_accel.threads import start_thread

FIRST_BEAT = 10.0
"""Seconds into a plan's making after which a stage says that it goes on; from then on whenever the time has doubled."""
_STEADY = 3
"""The first run of a plan loads it, the second is the first that begins as the last one ended."""


class ProgressMessages(Observer):
    """The messages about one prepared model, and the times at which its plans were made."""

    def __init__(self, model: torch.nn.Module, link_bandwidth: float | None = None) -> None:
        """``link_bandwidth``: of a throttled link, in bytes/s."""
        self._link_bandwidth = link_bandwidth
        self.name = name_of(model)
        self.made: list[tuple[float, float]] = []
        """When the making of each plan, or the attempt, began and ended, in ``time.time()``."""

    def prepared(
        self,
        model: torch.nn.Module,
        budget: int,
        device: torch.device,
        optimizer: OptimizerHome,
        masters: bool,
        why: str,
    ) -> None:
        """Said before weights move, which takes a while for large ones. ``masters``: weights have fp32 ones. ``why``:
        about a budget that is not a size."""
        sizes = TrainedBytes.of(model, masters)
        there = ""
        if optimizer is OptimizerHome.HOST:
            kept = f"fp32 masters {format_size(sizes.masters)}, " if sizes.masters else ""
            there = (
                f" in {format_size(sizes.training)} of the host (weights {format_size(sizes.weights)}, {kept}"
                f"gradients {format_size(sizes.gradients)}, two moments {format_size(sizes.moments)}; "
                f"{format_size(sizes.gradients)} more where autograd adds to gradients)"
            )
        trained = f"{format_size(sizes.weights)} are trained{there}" if sizes.weights else "no parameter is trained"
        say(
            f"{self.name}: {format_size(sizes.frozen)} of frozen weights go to the host, {trained}; budget "
            f"{format_size(budget)} on {device.type}"
        )
        if why:
            say(f"{self.name}: {why}")

    def host_by_size(self) -> None:
        """Said where ``optimizer: auto`` means the host."""
        say(
            f"{self.name}: optimizer: auto is host here: most weights are trained, and with gradients and moments they "
            "take more than half of memory_budget; optimizer: device keeps them there"
        )

    @contextmanager
    def making(self, what: str) -> Iterator[Callable[[str], None]]:
        """Around the making of a plan for ``what``, such as ``a training step on 2 x 512 tokens``. Yields the call that
        each stage begins with: a participle and its object."""
        last = f"; the last plan took {self.made[-1][1] - self.made[-1][0]:.1f} s" if self.made else ""
        began = time.time()
        stage = _Stage(f"capturing {what}")
        say(f"{self.name}: capturing {what}, to plan its memory{last}")
        try:
            yield stage
        finally:
            stage.end()
            self.made.append((began, time.time()))

    def on_plan(self, step: CompiledStep) -> None:
        """The line of result."""
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in step.seconds.items() if seconds >= 0.05)
        how = "plan read from the cache, ready" if step.plan_cache is PlanCacheUse.HIT else "planned"
        began, ended = self.made[-1]
        say(f"{self.name}: {how} in {ended - began:.1f} s{f' ({stages})' if stages else ''}; {describe(step)}")

    def on_step(self, step: CompiledStep) -> None:
        """Counts the runs of a plan that trains; of the first in steady state, says how long it took."""
        step.runs += 1
        if step.runs != _STEADY or not step.captured.gradients:
            return
        counters = step.executor.counters()
        seconds = float(counters["step_seconds"]) - float(counters["gate_seconds"])
        bound = step.bound_seconds(self._link_bandwidth)
        if seconds > 0 and bound > 0:
            graphs = in_words(step.executor.launch_graphs())
            say(
                f"{self.name}: a planned step takes {seconds:.3g} s, {seconds / bound:.2f} times its bound, "
                f"{bound:.3g} s{f'; {graphs}' if graphs else ''}"
            )

    def seconds_since(self, start: float) -> float:
        """Seconds of making plans since ``start``, a ``time.time()``."""
        return sum(max(0.0, ended - max(began, start)) for began, ended in self.made)


class _Stage:
    """The stage of a plan's making, which is said again while it takes long."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = start_thread(self._beat, name="disco-progress", stop=self._over.set)

    def __call__(self, text: str) -> None:
        self._text = text
        say(text)

    def end(self) -> None:
        """No word more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        wait = FIRST_BEAT
        while not self._over.wait(wait):
            seconds = time.monotonic() - self._began
            say(f"still {self._text}, {seconds:.0f} s so far")
            wait = max(seconds, FIRST_BEAT)


def name_of(model: torch.nn.Module) -> str:
    """The class that the user knows: under PEFT that of the model inside."""
    return type(base_model(model)).__name__


def batch_text(batch: Mapping[str, Any], length: int | None = None) -> str:
    """A batch in a few words. ``length``: of its rows before they were padded, if they were."""
    tensors = batch_tensors(batch)
    ids = tensors.get("input_ids")
    if ids is not None:
        padded = "" if length is None else f" (padded from {length})"
        return f"{_shape(ids)} tokens{padded}"
    name, tensor = next(iter(tensors.items()), ("no tensor", None))
    return name if tensor is None else f"{name} of {_shape(tensor)}"


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "1"
