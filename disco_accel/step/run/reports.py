"""Everything that a user is told of one prepared model: messages, the numbers of ``stats(model)``, the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from disco_accel.graph.taskgraph import VertexKind
from disco_accel.observe.report import write_report
from disco_accel.observe.step_facts import step_facts
from disco_accel.plan.summary import link_bytes, peak_bytes
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.observer import Fallback, Observer, of_all_models
from disco_accel.step.run.progress_messages import ProgressMessages

logger = logging.getLogger("disco_accel")

_WARM_STEPS = 2


@dataclass
class RunCounts(Observer):
    """How often one model ran from plans and without, with the reasons, and which parameters got no gradient."""

    steps_compiled: int = 0
    steps_eager: int = 0
    plan_hits: int = 0
    prefills: int = 0
    forwards_planned: int = 0
    """Forwards without gradients, prefills among them."""
    forwards_unplanned: int = 0
    inner_forwards: int = 0
    fallbacks: list[str] = field(default_factory=list)
    """Reasons of steps and forwards without a plan."""
    plans: int = 0
    without_gradient: list[str] = field(default_factory=list)

    def on_plan(self, step: CompiledStep) -> None:
        self.plans += 1

    def on_plan_hit(self, step: CompiledStep) -> None:
        self.plan_hits += 1

    def on_step(self, step: CompiledStep) -> None:
        self.steps_compiled += 1

    def on_forward(self, step: CompiledStep, kind: str) -> None:
        self.forwards_planned += 1
        self.prefills += kind == "prefill"

    def on_fallback(self, kind: Fallback, reason: str) -> None:
        self.steps_eager += kind is Fallback.STEP
        self.inner_forwards += kind is Fallback.INNER_FORWARD
        self.forwards_unplanned += kind is Fallback.FORWARD
        if kind in (Fallback.STEP, Fallback.FORWARD) and reason not in self.fallbacks:
            self.fallbacks.append(reason)

    def as_dict(self) -> dict[str, Any]:
        """Copies, for the user."""
        return asdict(self)


def plan_figures(step: CompiledStep, link_bandwidth: float | None) -> dict[str, Any]:
    """The figures of the plan of ``step``, whose executor is loaded: sizes in bytes, times in seconds.
    ``link_bandwidth``: in bytes/s, None = not throttled."""
    counters = step.executor.counters()
    loaded_bytes, saved_bytes = link_bytes(step.plan)
    devices = sum(not device.is_host_device for device in step.plan.devices)
    taken = int(counters["touched_bytes"]) if devices == 1 else peak_bytes(step.plan)
    return {
        "arena_bytes": int(counters["arena_bytes"]),
        "devices": devices,
        "parts": step.parts,
        "peak_bytes": step.budget.outside + taken,
        "resident_weight_bytes": step.resident_bytes,
        "offload_bytes": saved_bytes,
        "reload_bytes": loaded_bytes,
        "cache_at_home_bytes": step.captured.bytes_at_home,
        "step_seconds": counters["step_seconds"],
        "bound_seconds": step.bound_seconds(link_bandwidth),
        "compute_seconds": step.compute_seconds,
        "compile_seconds": dict(step.seconds),
        "plan_cache": step.plan_cache.value,
        "budget": step.budget.as_dict(),
        "optimizer": "host" if step.trained_on_host else "device",
        "kernels": sum(v.kind is VertexKind.KERNEL for v in step.plan.vertices),
        "fused": len(step.fused),
        "fused_refused": 0 if step.settings.fusing is None else step.settings.fusing.refused,
        "recomputation": None if step.recomputation is None else asdict(step.recomputation),
        "launches": int(counters["launches"]),
        "launch_graphs": step.executor.launch_graphs(),
        "engine": counters,
        **step.gains_of_memory,
    }


class Reports(Observer):
    """Tells its observers of all events, ``counts`` and ``messages`` first, then those of all models, in the order in
    which they came."""

    def __init__(
        self,
        model: torch.nn.Module,
        observer: Callable[[RunCounts], Observer],
        report_dir: str | None,
        link_bandwidth: float | None,
    ) -> None:
        """``observer``: makes the third observer from the counts. ``link_bandwidth``: of a throttled link, in
        bytes/s."""
        self.messages, self.counts = ProgressMessages(model, link_bandwidth), RunCounts()
        self._observers: tuple[Observer, ...] = (self.counts, self.messages, observer(self.counts))
        self._folder, self._left = report_dir, 1 if report_dir is not None else 0
        self._said: set[str] = set()

    def _all(self) -> tuple[Observer, ...]:
        return (*self._observers, *of_all_models)

    def on_plan(self, step: CompiledStep) -> None:
        for observer in self._all():
            observer.on_plan(step)

    def on_plan_hit(self, step: CompiledStep) -> None:
        for observer in self._all():
            observer.on_plan_hit(step)

    def on_step(self, step: CompiledStep) -> None:
        for observer in self._all():
            observer.on_step(step)

    def on_backward(self, step: CompiledStep) -> None:
        for observer in self._all():
            observer.on_backward(step)

    def on_forward(self, step: CompiledStep, kind: str) -> None:
        for observer in self._all():
            observer.on_forward(step, kind)

    def on_fallback(self, kind: Fallback, reason: str) -> None:
        for observer in self._all():
            observer.on_fallback(kind, reason)

    def say_once(self, warning: str) -> None:
        """Log ``warning`` the first time."""
        if warning not in self._said:
            self._said.add(warning)
            logger.warning("%s", warning)

    def trace_wanted(self) -> bool:
        """Whether the step about to start is the one that ``report_dir`` shows: the first in steady state."""
        return self._left > 0 and self.counts.steps_compiled >= _WARM_STEPS

    def write(self, step: CompiledStep, stats: Mapping[str, Any]) -> None:
        """Write plan, trace, numbers and picture of the step that just ran into ``report_dir``."""
        self._left -= 1
        assert self._folder is not None
        facts = step_facts(step.graph, {binding.vertex: binding.name for binding in step.captured.bindings})
        write_report(self._folder, step.plan, step.executor.events(), stats, facts=facts)
