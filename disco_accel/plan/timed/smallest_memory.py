"""The smallest memory in which the timed planner has a plan of a graph that BUILDMEMGRAPH cannot plan."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, with_at_least
from disco_accel.graph.values import is_foreign, overwrites
from disco_accel.plan.buildmemgraph.min_memory import bisect, bisect_down, least_memory
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import SearchWork
from disco_accel.plan.timed.search import build_timed
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.simulate.machine import Machine

FRUGAL = replace(TimedSettings(), resident_shares=(0.0,), outliers_permanent=False)
"""Only moves that make a plan feasible, none that makes it fast: a draft for each gap ratio, its redrafts and
offsets."""

_STEP = 4
"""Sizes are tried from the largest vertex's need up, each larger than the one before by this part of it."""

_WORTH = 5.0
"""Seconds of counted work that are spent on the last few units, after the modest search."""


def plan_frugally(
    graph: TaskGraph, machine: Machine, *, cyclic: bool, work: SearchWork, not_offloaded: Collection[int] = ()
) -> MemGraph:
    """Return a plan of ``graph`` that need not be fast. Raises Infeasible."""
    return build_timed(
        graph, machine, cyclic=cyclic, work=work, settings=FRUGAL, not_offloaded=not_offloaded, any_plan=True
    )


def smallest_timed_memory(graph: TaskGraph, machine: Machine, *, cyclic: bool, work: SearchWork) -> int:
    """Return bytes in which the timed planner has a plan, of every device that has less but those in host memory.

    One alignment unit less has none, unless the search for that would take long (``_WORTH``), or the user's time is up.
    The memory that the devices of ``graph`` have now is known to be infeasible. Raises Infeasible where even memory for
    everything is not enough.
    """
    devices = [device for device in graph.devices if not device.is_host_device]
    unit = max(device.alignment for device in devices)
    least = -(-least_memory(graph) // unit)
    counted = SearchWork()

    def fits(units: int, settings: TimedSettings) -> bool:
        trial = SearchWork()
        try:
            frugal = settings is FRUGAL
            sized = with_at_least(graph, units * unit)
            build_timed(sized, machine, cyclic=cyclic, work=trial, settings=settings, any_plan=frugal)
        except Infeasible:
            return False
        finally:
            counted.spent += trial.spent
        return True

    feasible = max(_everything(graph, unit), least)
    # Not monotone: a bisection from memory for everything would stop at any size that happens to fail.
    failing, found = climb(least, feasible, partial(fits, settings=FRUGAL), lambda: not work.late())
    if found is None and not fits(feasible, FRUGAL):
        raise Infeasible(0)
    feasible = feasible if found is None else found
    feasible = bisect(failing, feasible, partial(fits, settings=FRUGAL), lambda: not work.late())
    # The whole search may find a plan where the modest one has none; planning is not monotone in memory.
    limit = counted.spent + _WORTH
    return unit * bisect_down(
        feasible, least, partial(fits, settings=TimedSettings()), lambda: counted.spent < limit and not work.late()
    )


def climb(
    least: int, most: int, fits: Callable[[int], bool], goes_on: Callable[[], bool] = lambda: True
) -> tuple[int, int | None]:
    """Try sizes from ``least`` up, below ``most``: the last one that fails, ``least - 1`` if none does, and the first
    one that fits, None if none does before ``goes_on`` says no."""
    failing, trial = least - 1, least
    while trial < most and goes_on():
        if fits(trial):
            return failing, trial
        failing, trial = trial, trial + max(1, trial // _STEP)
    return failing, None


def _everything(graph: TaskGraph, unit: int) -> int:
    """Return the units that all values of the graph take together, each at an offset of its own."""
    blocks = 0
    for vertex in graph.vertices:
        in_place = {output for output, _ in overwrites(vertex)}
        sizes = [size for k, size in enumerate(vertex.sizes) if k not in in_place and not is_foreign(vertex)]
        blocks += sum(-(-size // unit) for size in sizes)
    return max(1, blocks)
