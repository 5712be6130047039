"""One row: a step captured, spread over devices, planned and verified as a real one is, and run in simulated time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from signal import ITIMER_REAL, SIGALRM, setitimer, signal
from types import FrameType
from typing import Any

from benchmarks.common.shapes import PRESETS
from benchmarks.planner.captures import Workload, lora_outline, prompt_outline
from benchmarks.simulated_devices.cells import MEMORY, SPEEDS, Cell, Kind
from disco_accel.capture.captured_step import CapturedStep
from disco_accel.errors import BudgetTooSmall
from disco_accel.graph.copies import swaps_in, swaps_out
from disco_accel.graph.files import fingerprint
from disco_accel.graph.passes import arena_of
from disco_accel.graph.taskgraph import TaskGraph
from disco_accel.measure.costs import Estimated
from disco_accel.plan.bound.lower_bound import Bound, bound_of
from disco_accel.plan.summary import swapped_bytes
from disco_accel.recipes.outline import Outline
from disco_accel.simulate.simulator import Simulator
from disco_accel.step.compile.budget_parts import Budget
from disco_accel.step.compile.pipeline import PlannerSettings, plan_step, with_costs
from disco_accel.step.compile.stages import Sharing, on_devices

_STEPS = 3
_AS_GOOD = 0.99
"""Share of the bound from which on a part of it says what limits the step."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes and seconds of ``cell``. ``budget``: of each device; ``weights``: of the model, on the host.

    ``needed``: the smallest budget where that is too small; ``unfinished``: seconds after which the row was given up;
    nothing below is known then.

    ``graph``: fingerprint of the graph that was planned; ``period``: a step of the plan among others; ``reload`` and
    ``offload`` in one step; ``parts_of_bound``: what the bound is the largest of; ``plan_seconds`` on the clock;
    ``cut``: a deadline ended the search.
    """

    cell: Cell
    budget: int
    weights: int | None = None
    needed: int | None = None
    unfinished: float | None = None
    graph: str | None = None
    period: float | None = None
    bound: float | None = None
    limit: str | None = None
    parts_of_bound: dict[str, float] | None = None
    reload: int | None = None
    offload: int | None = None
    vertices: int | None = None
    plan_seconds: float | None = None
    cut: bool = False

    def as_json(self) -> dict[str, Any]:
        """All of it flat, the cell's keys first."""
        figures = asdict(self)
        return {**figures.pop("cell"), **figures}


@dataclass(frozen=True)
class Subject:
    """A cell's ``step`` on its devices, with costs, and its budget."""

    step: CapturedStep
    budget: Budget

    @property
    def graph(self) -> TaskGraph:
        """What is planned: each device with the budget's arena."""
        return arena_of(max(self.budget.arena, self.step.graph.devices[0].alignment)).run(self.step.graph)


@lru_cache(maxsize=1)
def _captured(kind: Kind, shape: str, dtype: str, batch: int, tokens: int, parts: int, ranks: int) -> Outline:
    """The last one is kept: those of large models take a gigabyte."""
    work = Workload(PRESETS[shape], batch, tokens, dtype)
    return prompt_outline(work, ranks) if kind is Kind.PROMPT else lora_outline(work, parts=parts, ranks=ranks)


def subject(cell: Cell, say: Say = lambda _: None) -> Subject:
    """Capture the step of ``cell`` and spread it over its devices."""
    say("capturing")
    outlined = _captured(*cell.capture)
    step, _ = with_costs(outlined.captured, Estimated("cuda", SPEEDS[cell.gpu]))
    # Of the tensors alone: what a driver and an allocator take besides is not simulated.
    budget = outlined.budget(MEMORY[cell.gpu])
    if cell.devices > 1:
        say(f"spreading {len(step.graph.vertices)} vertices")
    sharing = Sharing(cell.devices, cell.parallel)
    return Subject(on_devices(step, outlined.part_of, sharing, budget, SPEEDS[cell.gpu].machine), budget)


def row(cell: Cell, plan_seconds: float | None = None, say: Say = lambda _: None) -> Row:
    """Plan and simulate ``cell``. ``plan_seconds``: as in ``PlannerSettings``. ``say`` hears what is going on."""
    found, machine = subject(cell, say), SPEEDS[cell.gpu].machine
    step = found.step
    whole = sum(v.sizes[0] for v in step.graph.vertices if v.id not in step.copies and v.traits.host_has_it)
    made = Row(cell, MEMORY[cell.gpu], weights=whole)
    settings, began = PlannerSettings("timed", machine=machine, plan_seconds=plan_seconds), time.monotonic()
    try:
        planned = plan_step(step, found.budget, settings, say=say)
    except BudgetTooSmall as error:
        return replace(made, needed=error.needed, plan_seconds=round(time.monotonic() - began, 1))
    say(f"simulating {len(planned.plan.vertices)} vertices")
    simulator = Simulator(planned.plan, machine)
    return replace(
        made,
        graph=fingerprint(planned.graph),
        period=(simulator.run(steps=_STEPS).makespan - simulator.run().makespan) / (_STEPS - 1),
        **in_row(bound_of(planned.graph, machine)),
        reload=swapped_bytes(planned.plan, swaps_in),
        offload=swapped_bytes(planned.plan, swaps_out),
        vertices=len(planned.plan.vertices),
        plan_seconds=round(planned.seconds["plan"], 1),
        cut=planned.cut,
    )


def bound_again(cell: Cell, planned: str, say: Say = lambda _: None) -> dict[str, Any] | None:
    """What ``in_row`` says of ``cell`` by today's code; None where its graph is not the one with the fingerprint
    ``planned`` any more, so that a plan of that one says nothing about it."""
    graph = subject(cell, say).graph
    if fingerprint(graph) != planned:
        return None
    return in_row(bound_of(graph, SPEEDS[cell.gpu].machine))


def in_row(bound: Bound) -> dict[str, Any]:
    """``bound``, ``limit`` and ``parts_of_bound`` of a row. On one device the critical path is its kernels in a row,
    and a first load: the limit is the plainest part that is as good as the largest."""
    parts = {name: getattr(bound, name) for name in ("compute", "link", "phases", "critical_path")}
    leading = next(name for name, seconds in parts.items() if seconds >= _AS_GOOD * bound.bound)
    return {"bound": bound.bound, "limit": leading, "parts_of_bound": parts}


class OutOfTime(BaseException):
    """What ``at_most`` raises: no handler of errors on the way is to take it for one."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTime where what runs inside takes longer; in the main thread alone."""

    def late(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal(SIGALRM, late)
    setitimer(ITIMER_REAL, seconds)
    try:
        yield
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, before)
