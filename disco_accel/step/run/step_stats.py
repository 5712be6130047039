"""The numbers of ``stats(model)``: counts of what ran, and figures of the plan that ran last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from disco_accel.graph.dequantise_again import dequantise_again
from disco_accel.graph.taskgraph import VertexKind
from disco_accel.graph.value_numbering import kept_bytes, left_out
from disco_accel.plan.summary import link_bytes, peak_bytes
from disco_accel.step.compile.compiled_step import CompiledStep
from disco_accel.step.run.observer import Fallback, Observer


class CountedRuns(TypedDict):
    """The part of ``stats(model)`` that is there from the start."""

    steps_compiled: int
    steps_eager: int
    plan_hits: int
    prefills: int
    inner_forwards: int
    fallbacks: list[str]
    plans: int
    without_gradient: list[str]


@dataclass
class RunCounts(Observer):
    """How often one model ran from plans and without, why not, and which parameters got no gradient."""

    steps_compiled: int = 0
    steps_eager: int = 0
    plan_hits: int = 0
    prefills: int = 0
    inner_forwards: int = 0
    plans: int = 0
    fallbacks: list[str] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)

    def on_plan(self, step: CompiledStep) -> None:
        """One plan more."""
        self.plans += 1

    def on_plan_hit(self, step: CompiledStep) -> None:
        """One step more that had its plan already."""
        self.plan_hits += 1

    def on_step(self, step: CompiledStep) -> None:
        """One planned training step more."""
        self.steps_compiled += 1

    def on_prefill(self, step: CompiledStep) -> None:
        """One planned prefill more."""
        self.prefills += 1

    def on_fallback(self, kind: Fallback, reason: str) -> None:
        """One forward more without a plan; of steps and prefills the reason is noted."""
        self.steps_eager += kind is Fallback.STEP
        self.inner_forwards += kind is Fallback.INNER_FORWARD
        if kind in (Fallback.STEP, Fallback.PREFILL) and reason not in self.fallbacks:
            self.fallbacks.append(reason)

    def as_dict(self) -> CountedRuns:
        """Copies, for the user."""
        return {
            "steps_compiled": self.steps_compiled,
            "steps_eager": self.steps_eager,
            "plan_hits": self.plan_hits,
            "prefills": self.prefills,
            "inner_forwards": self.inner_forwards,
            "fallbacks": list(self.fallbacks),
            "plans": self.plans,
            "without_gradient": list(self.without_gradient),
        }


class PlanFigures(TypedDict):
    """The part of ``stats(model)`` that is about the plan that ran last: sizes in bytes, times in seconds."""

    arena_bytes: int
    devices: int
    parts: int
    peak_bytes: int
    resident_weight_bytes: int
    offload_bytes: int
    reload_bytes: int
    step_seconds: float
    bound_seconds: float
    compute_seconds: float
    compile_seconds: dict[str, float]
    plan_cache: str
    budget: dict[str, int]
    optimizer: str
    kernels: int
    dequantisations_saved: int
    kept_dequantised_bytes: int
    engine: dict[str, int | float]


def plan_figures(step: CompiledStep, link_bandwidth: float | None) -> PlanFigures:
    """The figures of ``step``, whose executor is loaded. ``link_bandwidth``: in bytes/s, None = not throttled."""
    counters = step.executor.counters()
    loaded_bytes, saved_bytes = link_bytes(step.plan)
    devices = sum(not device.is_host_device for device in step.plan.devices)
    taken = int(counters["touched_bytes"]) if devices == 1 else peak_bytes(step.plan)
    saved = left_out(dequantise_again(step.captured.graph), step.graph)
    return {
        "arena_bytes": int(counters["arena_bytes"]),
        "devices": devices,
        "parts": step.parts,
        "peak_bytes": step.budget.outside + taken,
        "resident_weight_bytes": step.resident_bytes,
        "offload_bytes": saved_bytes,
        "reload_bytes": loaded_bytes,
        "step_seconds": counters["step_seconds"],
        "bound_seconds": step.bound_seconds(link_bandwidth),
        "compute_seconds": step.compute_seconds,
        "compile_seconds": dict(step.seconds),
        "plan_cache": step.plan_cache.value,
        "budget": step.budget.as_dict(),
        "optimizer": "host" if step.trained_on_host else "device",
        "kernels": sum(v.kind is VertexKind.KERNEL for v in step.plan.vertices),
        "dequantisations_saved": len(saved),
        "kept_dequantised_bytes": kept_bytes(saved),
        "engine": counters,
    }
