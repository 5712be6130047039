"""The smallest memory in which the timed planner has a plan of a graph that BUILDMEMGRAPH cannot plan."""

from __future__ import annotations

from dataclasses import replace

from disco_accel.graph.check import largest_need
from disco_accel.graph.memgraph import MemGraph
from disco_accel.graph.taskgraph import TaskGraph, with_memory
from disco_accel.graph.values import is_foreign, overwrites
from disco_accel.plan.infeasible import Infeasible
from disco_accel.plan.search_work import Work
from disco_accel.plan.timed.search import build_timed
from disco_accel.plan.timed.search_settings import TimedSettings
from disco_accel.simulate.machine import Machine

FRUGAL = replace(
    TimedSettings(),
    resident_shares=(0.0,),
    share_step=0.0,
    outliers_permanent=False,
    prefetch_horizons=(),
    second_run=False,
    effort=1,
    good=1e9,
)
"""Only what makes a plan feasible, not what makes it fast: a draft for each gap ratio, its redrafts and its offsets."""

_STEPS = 40
"""Sizes that are tried: between the working set and all bytes of the graph, 40 halvings reach the alignment unit."""


def plan_frugally(graph: TaskGraph, machine: Machine, *, cyclic: bool, work: Work) -> MemGraph:
    """Return a plan of ``graph`` that need not be fast. Raises Infeasible."""
    return build_timed(graph, machine, cyclic=cyclic, work=work, settings=FRUGAL)


def smallest_timed_memory(graph: TaskGraph, machine: Machine, *, cyclic: bool, work: Work) -> int:
    """Return bytes, the same for every device, in which ``plan_frugally`` has a plan.

    One alignment unit less has none, unless feasibility is not monotone there or the user's time is up. Raises
    Infeasible where even memory for everything is not enough.
    """
    unit = max(device.alignment for device in graph.devices)
    feasible = _everything(graph, unit)
    failing = max(largest_need(graph, device.id)[0] for device in graph.devices) // unit - 1

    def plan_in(units: int) -> None:
        plan_frugally(with_memory(graph, lambda _: units * unit), machine, cyclic=cyclic, work=Work())

    plan_in(feasible)
    for _ in range(_STEPS):
        if feasible - failing <= 1 or work.late():
            break
        # Invariant: a plan fits in feasible units; in failing units either none was found or none can be.
        middle = (failing + feasible) // 2
        try:
            plan_in(middle)
        except Infeasible:
            failing = middle
        else:
            feasible = middle
    return feasible * unit


def _everything(graph: TaskGraph, unit: int) -> int:
    """Return the units that all values of the graph take together, each at an offset of its own."""
    blocks = 0
    for vertex in graph.vertices:
        in_place = {output for output, _ in overwrites(vertex)}
        sizes = [size for k, size in enumerate(vertex.sizes) if k not in in_place and not is_foreign(vertex)]
        blocks += sum(-(-size // unit) for size in sizes)
    return max(1, blocks)
