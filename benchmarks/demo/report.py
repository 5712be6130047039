"""What must hold in the demo, which figures it aims at, and the table that it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.common.compare import Sameness
from disco_accel.observe.report import table
from disco_accel.sizes import format_size

STEP_OVER_BOUND = 1.15
FASTER_THAN_SYNCHRONOUS = 1.25
ENGINE_SECONDS_PER_VERTEX = 1e-6
CAPTURE_AND_PLAN_SECONDS = 15.0
TRAINING_SECONDS = 120.0


@dataclass
class BudgetRun:
    """One budget: its training run against the run without a plan, and its steps timed in turn with others."""

    name: str
    budget: int
    metrics: dict[str, Any]
    sameness: Sameness
    seconds: float
    steps: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold; a ``timed`` one depends on what else the machine is doing."""

    what: str
    holds: bool
    timed: bool

    def as_dict(self) -> dict[str, Any]:
        return {"what": self.what, "holds": self.holds, "timed": self.timed}


@dataclass(frozen=True, slots=True)
class Ratios:
    """Step times in seconds: medians of steps taken in turn."""

    eager: float
    planned: float
    synchronous: float
    compute: float
    link: float

    @property
    def bound(self) -> float:
        return max(self.compute, self.link)

    @property
    def over_bound(self) -> float:
        return self.planned / self.bound

    @property
    def over_eager(self) -> float:
        return self.planned / self.eager

    @property
    def faster(self) -> float:
        return self.synchronous / self.planned


def first_comparison(run: BudgetRun) -> str:
    """What is known of a budget as soon as it was trained under: a few words a line."""
    same, planned = run.sameness, run.metrics["disco"]
    return (
        f"   {same.losses_equal} of {same.losses} losses and {same.tensors_equal} of {same.tensors} adapter tensors "
        f"have the bits of training without a plan\n"
        f"   {planned['steps_compiled']} steps ran from the plan, {planned['steps_eager']} did not; memory touched "
        f"{format_size(planned['peak_bytes'])} of {format_size(run.budget)}, "
        f"{format_size(planned['reload_bytes'])} loaded over the link each step"
    )


def ratios(steps: Mapping[str, Any]) -> Ratios:
    """Medians of what ``benchmarks.demo.interleaved`` measured."""
    seconds = {name: median(values) for name, values in steps["seconds"].items()}
    return Ratios(
        eager=seconds["eager"],
        planned=seconds["planned"],
        synchronous=seconds["synchronous"],
        compute=seconds["compute_alone"],
        link=steps["link_seconds"],
    )


def limits(run: BudgetRun, memory: Mapping[str, int], steps: int) -> list[Check]:
    """Everything that is checked for one budget."""
    planned, name = run.metrics["disco"], run.name
    counters = run.steps["counters"]
    checks = [
        Check(f"{name}: {run.sameness.losses} losses have the bits of plain training", run.sameness.same_losses, False),
        Check(f"{name}: all {steps} steps were compared", run.sameness.losses == steps, False),
        Check(f"{name}: the adapters have the bits of plain training", run.sameness.same_adapters, False),
        Check(f"{name}: every step ran from the plan", _all_planned(planned, steps), False),
        Check(f"{name}: single steps have the bits of eager ones", bool(run.steps["same_bits"]), False),
        Check(f"{name}: memory touched stays within the budget", planned["peak_bytes"] <= run.budget, False),
        Check(f"{name}: the arena stays within its part", planned["arena_bytes"] <= planned["budget"]["arena"], False),
        Check(f"{name}: a steady step allocates no tensor memory", counters["c10_allocations"] == 0, False),
        Check(
            f"{name}: engine threads allocate nothing of 4 KiB or more in steady steps",
            run.steps["large_allocations"] == 0,
            False,
        ),
        Check(f"{name}: training took at most {TRAINING_SECONDS:.0f} s", run.seconds <= TRAINING_SECONDS, True),
    ]
    if name == "half":
        checks += _limits_of_half(run, memory)
    if name == "all":
        checks.append(Check("all: nothing crosses the link", planned["reload_bytes"] == 0, False))
    return checks


def _limits_of_half(run: BudgetRun, memory: Mapping[str, int]) -> list[Check]:
    times = ratios(run.steps)
    stages = run.metrics["disco"]["compile_seconds"]
    engine = min(run.steps["engine_seconds_per_vertex"])
    made = stages["capture"] + stages["plan"]
    return [
        Check(
            "half: the budget is at most half of the in-memory peak", 2 * run.budget <= memory["in_memory_peak"], False
        ),
        Check("half: the budget is less than the weights alone", run.budget < memory["weights"], False),
        Check(
            f"half: step over bound {times.over_bound:.2f} <= {STEP_OVER_BOUND}",
            times.over_bound <= STEP_OVER_BOUND,
            True,
        ),
        Check(
            f"half: {times.faster:.2f} >= {FASTER_THAN_SYNCHRONOUS} times as fast as one vertex after another",
            times.faster >= FASTER_THAN_SYNCHRONOUS,
            True,
        ),
        Check(f"half: engine {engine * 1e6:.2f} us per vertex <= 1", engine <= ENGINE_SECONDS_PER_VERTEX, True),
        Check(f"half: capture and plan {made:.1f} s <= 15", made <= CAPTURE_AND_PLAN_SECONDS, True),
    ]


def _all_planned(planned: Mapping[str, Any], steps: int) -> bool:
    return planned.get("steps_compiled") == steps and planned.get("steps_eager") == 0


def print_report(runs: Sequence[BudgetRun], memory: Mapping[str, int], checks: Sequence[Check]) -> None:
    """Print the table, then what does not hold and which figures were missed."""
    size = format_size
    print(f"\nwithout a plan: {size(memory['in_memory_peak'])} at the peak ({size(memory['weights'])} of weights)")
    print("step times are medians of steps taken in turn; +- is half of the range\n")
    rows = [[label, *(show(run) for run in runs)] for label, show in _ROWS]
    print(table(["budget", *(run.name for run in runs)], rows))
    failed = [c.what for c in checks if not c.holds and not c.timed]
    missed = [c.what for c in checks if not c.holds and c.timed]
    held = sum(c.holds for c in checks)
    print(f"\n{held} of {len(checks)} checks hold")
    for what in failed:
        print(f"DOES NOT HOLD  {what}")
    for what in missed:
        print(f"figure missed  {what}")


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} +-{(max(values) - min(values)) / 2:.3f}"


def _disco(run: BudgetRun) -> Mapping[str, Any]:
    planned: Mapping[str, Any] = run.metrics["disco"]
    return planned


_ROWS: Any = [
    ("losses with the same bits", lambda r: f"{r.sameness.losses_equal}/{r.sameness.losses}"),
    ("adapter tensors with the same bits", lambda r: f"{r.sameness.tensors_equal}/{r.sameness.tensors}"),
    ("budget", lambda r: format_size(r.budget)),
    ("  adapters, gradients, optimizer, batch", lambda r: format_size(r.budget - _disco(r)["budget"]["arena"])),
    ("  arena", lambda r: format_size(_disco(r)["arena_bytes"])),
    ("  of it weights that stay", lambda r: format_size(_disco(r)["resident_weight_bytes"])),
    ("memory touched, all parts", lambda r: format_size(_disco(r)["peak_bytes"])),
    ("loaded over the link each step", lambda r: format_size(_disco(r)["reload_bytes"])),
    ("saved over the link each step", lambda r: format_size(_disco(r)["offload_bytes"])),
    ("step, s", lambda r: _spread(r.steps["seconds"]["planned"])),
    ("eager step, s", lambda r: _spread(r.steps["seconds"]["eager"])),
    ("one vertex after another, s", lambda r: _spread(r.steps["seconds"]["synchronous"])),
    ("compute alone, s", lambda r: _spread(r.steps["seconds"]["compute_alone"])),
    ("link alone, s", lambda r: f"{r.steps['link_seconds']:.3f}"),
    ("step over eager", lambda r: f"{ratios(r.steps).over_eager:.2f}"),
    ("step over bound", lambda r: f"{ratios(r.steps).over_bound:.2f}"),
    ("times as fast as one after another", lambda r: f"{ratios(r.steps).faster:.2f}"),
    ("tensor allocations in a step", lambda r: r.steps["counters"]["c10_allocations"]),
    ("allocations of 4 KiB or more in all timed steps", lambda r: r.steps["large_allocations"]),
    ("engine, us per vertex (least of the rounds)", lambda r: f"{min(r.steps['engine_seconds_per_vertex']) * 1e6:.2f}"),
    ("vertices", lambda r: r.steps["counters"]["vertices"]),
    ("capture, s", lambda r: f"{_disco(r)['compile_seconds']['capture']:.1f}"),
    ("measure ops, s", lambda r: f"{_disco(r)['compile_seconds']['record']:.1f}"),
    ("plan and verify, s", lambda r: f"{sum(_disco(r)['compile_seconds'][k] for k in ('plan', 'verify')):.1f}"),
    ("load, s", lambda r: f"{_disco(r)['compile_seconds']['load']:.1f}"),
    ("load average while timing", lambda r: f"{r.steps['load_average']:.1f}"),
]
