"""What each move of the timed planner's search is worth: plans with all of them, and with each one switched off.

Called by ``python -m benchmarks.planner --ablate``. Steps are simulated; BUILDMEMGRAPH, which ``make_plan`` falls back
on, is left out, so that a move that only ties with it shows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from disco_accel.errors import PlanError
from disco_accel.graph.check import check_taskgraph
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.plan.bound.lower_bound import bound_of
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.select import inputs_by_use
from disco_accel.plan.timed.search import build_timed
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.simulate.simulator import Machine, simulate
from disco_accel.sizes import format_size
from disco_accel.verify.static import verify

ALL = TimedSettings()

WITHOUT: Mapping[str, TimedSettings] = {
    "min_gap_ratios": replace(ALL, min_gap_ratios=(None,)),
    "resident_shares": replace(ALL, resident_shares=ALL.resident_shares[:1]),
    "outliers_permanent": replace(ALL, outliers_permanent=False),
    "low_peak_order": replace(ALL, low_peak_order=False),
    "program_gaps_from": replace(ALL, program_gaps_from=float("inf")),
    "redrafts": replace(ALL, redrafts=0),
    "range_shares": replace(ALL, range_shares=()),
    "large_range_share": replace(ALL, large_range_share=1.0),
    "descend_in_ranges_up_to": replace(ALL, descend_in_ranges_up_to=0),
    "repacking_rounds": replace(ALL, repacking_rounds=0),
}
"""By move: the settings with that move switched off."""

_SMALL = 1000
"""Vertices."""

_SAME = 1e-4
"""Steps that differ by no larger share are equally long."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One search. ``ratio``: simulated step over the bound (None: no plan); ``seconds``: CPU seconds to plan."""

    case: str
    move: str
    ratio: float | None
    seconds: float


def ablate(graph: TaskGraph, memory: int, bandwidth: float, machine: Machine) -> Iterator[Outcome]:
    """Plan ``graph`` with all moves (``move`` is "" then) and without each; every plan is verified.

    A small graph is planned once before, for the first plan of a process loads libraries."""
    graph = with_memory(inputs_by_use(check_taskgraph(graph)), lambda device: memory)
    bound = bound_of(graph, machine, memory).bound
    case = f"{graph.name:<20} {format_size(memory):>9} {bandwidth / 1e9:5.1f}"
    if len(graph.vertices) < _SMALL:
        with suppress(Infeasible, PlanError):
            build_timed(graph, machine, cyclic=True)
    for move, settings in {"": ALL, **WITHOUT}.items():
        began = time.process_time()
        try:
            plan = build_timed(graph, machine, cyclic=True, work=SearchWork(), settings=settings)
        except (Infeasible, PlanError):
            yield Outcome(case, move, None, time.process_time() - began)
            continue
        seconds = time.process_time() - began
        verify(graph, plan)
        yield Outcome(case, move, simulate(plan, machine).makespan / bound, seconds)


HEADER = f"{'graph':<20} {'memory':>9} {'GB/s':>5} {'without':<26} {'/bound':>7} {'step':>8} {'plan s':>7}"


def show(outcome: Outcome, full: Outcome) -> str | None:
    """Return ``outcome`` as a line beside that with all moves; None if it is like it, or neither has a plan."""
    worth = _worth(outcome, full)
    if outcome.move and (outcome.ratio == full.ratio or (worth is not None and abs(worth) <= _SAME)):
        return None
    ratio = "no plan" if outcome.ratio is None else f"{outcome.ratio:7.3f}"
    change = "" if worth is None else f"{worth:+8.2%}"
    return f"{outcome.case} {outcome.move or '(all moves)':<26} {ratio} {change:>8} {outcome.seconds:7.2f}"


SUMMARY = (
    f"{'move':<26} {'cases':>5} {'needed':>6} {'slower without':>14} {'faster without':>14} {'mean':>7} {'most':>7} "
    f"{'least':>7} {'plan s':>6}"
)


def summaries(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield SUMMARY's line of each move: in how many cases there is no plan without it, in how many the step is slower
    or faster without it by more than 0.01 %, the mean, largest and smallest change, and planning time without it over
    that with it."""
    full = {each.case: each for each in outcomes if not each.move}
    for move in WITHOUT:
        own = [each for each in outcomes if each.move == move and full[each.case].ratio is not None]
        changes = [change for each in own if (change := _worth(each, full[each.case])) is not None]
        if not own:
            continue
        time_ratio = sum(each.seconds for each in own) / max(1e-9, sum(full[each.case].seconds for each in own))
        mean = sum(changes) / len(changes) if changes else 0.0
        yield (
            f"{move:<26} {len(own):>5} {len(own) - len(changes):>6} {sum(c > _SAME for c in changes):>14} "
            f"{sum(c < -_SAME for c in changes):>14} {mean:>+7.2%} {max(changes, default=0.0):>+7.2%} "
            f"{min(changes, default=0.0):>+7.2%} {time_ratio:>6.2f}"
        )


def _worth(outcome: Outcome, full: Outcome) -> float | None:
    """Return how much longer the step is without the move, as a share; None if either has no plan."""
    if outcome.ratio is None or full.ratio is None:
        return None
    return outcome.ratio / full.ratio - 1
